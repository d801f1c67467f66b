"""What megasoftmax is timed beside: builders by name, for softmax, softmax_topk and attention.

What a builder does is not timed: imports, compilation, block masks. A call does what users do in
each step. A package that is missing is named once.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from measure import Way
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import megasoftmax

FLEX, FLASH = "FlexAttention", "FlashAttention-4"
CUEQUIVARIANCE, TRIFAST = "cuEquivariance", "trifast"
TIMM, OPENFOLD = "timm", "OpenFold-3"
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# An older package of FlashAttention has the same name, without these kernels.
MODULES = {
    "liger": "liger_kernel",
    "quack": "quack",
    "FlashInfer": "flashinfer",
    FLASH: "flash_attn.cute",
    CUEQUIVARIANCE: "cuequivariance_ops_torch",
    TRIFAST: "trifast",
    TIMM: "timm",
    OPENFOLD: "openfold3",
}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@functools.cache
def is_there(peer: str) -> bool:
    """Whether its package is installed; says which is missing."""
    names = MODULES[peer].split(".")
    paths = (".".join(names[: i + 1]) for i in range(len(names)))
    found = all(importlib.util.find_spec(path) is not None for path in paths)
    if not found:
        print(f"without {peer}: {MODULES[peer]} is not installed")
    return found


def only_there(ways: dict[str, Any]) -> dict[str, Any]:
    """Those whose package is installed, or that need none."""
    return {name: way for name, way in ways.items() if name not in MODULES or is_there(name)}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By torch.compile for these sizes; cases before do not count towards its limit."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


# Softmax of rows


def rows(
    function: Callable[..., Tensor],
    scores: Tensor,
    *args: Any,
    passes: Sequence[str] | None = None,
    **options: Any,
) -> Way:
    """A function of scores that get a gradient."""
    return Way(lambda: function(scores, *args, **options), (scores,), passes=passes)


def eager(
    scale: float,
    excluded: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Callable[[Tensor], Tensor]:
    """What a model without fused kernels runs: scale to softmax, in its order, a cast, dropout."""

    def softmax(scores: Tensor) -> Tensor:
        logits = scores * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if bias is not None:
            logits = logits + bias
        if excluded is not None:
            logits = logits.masked_fill(excluded, torch.finfo(logits.dtype).min)
        if sink is not None:
            column = sink.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, column], -1)
        p = logits.softmax(-1, dtype=torch.float32)
        p = (p if sink is None else p[..., :-1]).to(scores.dtype)
        return torch.nn.functional.dropout(p, dropout) if dropout else p

    return softmax


def liger() -> Callable[[Tensor], Tensor]:
    return importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply


def quack() -> Callable[[Tensor], Tensor]:
    return importlib.import_module("quack.softmax").softmax


# softmax_topk


def softmax_then_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What most libraries write."""
    return logits.softmax(-1).topk(k)


def topk_and_logsumexp(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Without a softmax of the length of the logits."""
    best, indices = logits.topk(k)
    return (best - logits.logsumexp(-1, keepdim=True)).exp(), indices


def flashinfer() -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """FlashInfer's softmax, in float32, then its top-k.

    Its results are not sorted, unlike those of the others. Its kernels are compiled when they are
    first called, which needs nvcc.
    """
    top_k = importlib.import_module("flashinfer").top_k
    softmax = importlib.import_module("flashinfer.sampling").softmax
    return lambda logits, k: top_k(softmax(logits), k, sorted=False)


def sample_torch(logits: Tensor, k: int, top_p: float) -> Tensor:
    """Top-k, then top-p, then a draw, as generation loops in torch have them."""
    top, tokens = logits.float().topk(k)
    p = top.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)
    return tokens.gather(-1, torch.multinomial(p, 1))


def sample_by_warpers(logits: Tensor, k: int, top_p: float) -> Tensor:
    """The chain of transformers' generate, whose tensors are as long as the vocabulary."""
    scores = logits.float()
    scores = scores.masked_fill(scores < scores.topk(k).values[..., -1:], -torch.inf)
    ordered, indices = scores.sort(-1)
    removed = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[..., -1:] = False
    scores = scores.masked_fill(removed.scatter(-1, indices, removed), -torch.inf)
    return torch.multinomial(scores.softmax(-1), 1)


def sample_flashinfer() -> Callable[[Tensor, int, float], Tensor]:
    """FlashInfer's top_k_top_p_sampling_from_logits, of logits in float32 as it takes them."""
    sampling = importlib.import_module("flashinfer.sampling")
    return lambda logits, k, top_p: sampling.top_k_top_p_sampling_from_logits(
        logits.float(), k, top_p
    )


# Attention


def projected(heads: int, dim: int, lengths: Iterable[int], batch: int) -> list[Tensor]:
    """Query, key and value as a projection lays them out, on the default device."""
    return [
        torch.randn(batch, length, heads, dim, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for length in lengths
    ]


def ours(**options: Any) -> Attend:
    """megasoftmax, fused on a GPU."""
    return lambda q, k, v: megasoftmax.attention(q, k, v, fused=q.is_cuda or None, **options)


def sdpa(
    backend: SDPBackend | None = None,
    mask: Callable[[], Tensor | None] | None = None,
    **options: Any,
) -> Attend:
    """torch's attention; of a backend with no other to fall back on.

    Args:
        mask: makes `attn_mask` in each call.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = {} if mask is None else {"attn_mask": mask()}
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **options, **made)

    return attend


def flex(**options: Any) -> Attend:
    """FlexAttention, compiled for these options alone."""
    function = compiled(flex_attention.flex_attention)
    return lambda q, k, v: function(q, k, v, **options)


def flex_with_sink(sink: Tensor, **options: Any) -> Attend:
    """What models with a sink do: the output times the share that the sink leaves."""

    def with_sink(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
        output, auxiliary = flex_attention.flex_attention(
            query, key, value, **options, return_aux=flex_attention.AuxRequest(lse=True)
        )
        share = torch.sigmoid(auxiliary.lse - sink.float()[:, None])
        return (output * share.unsqueeze(-1)).to(output.dtype)

    function = compiled(with_sink)
    return lambda q, k, v: function(q, k, v, sink)


def flash_attention(
    causal: bool, window: int | None, bias: Tensor | None, is_table: bool, last: int
) -> Attend:
    """Of the package flash-attn-4, whose kernels are written in CuTe and compiled when called.

    Args:
        window: keys before the query's own.
        bias: dense, or a table of distances in which the last query has the place `last`.
    """
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"  # so that processes share them
    flash_attn_func = importlib.import_module("flash_attn.cute").flash_attn_func
    options: dict[str, Any] = {"causal": causal}
    options["window_size"] = (None, None) if window is None else (window, 0)
    if bias is not None:
        add = added_bias(is_table, not is_table and len(bias) > 1, last)
        options |= {"score_mod": add, "aux_tensors": [bias]}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(*(each.transpose(1, 2) for each in (q, k, v)), **options)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return attend


def added_bias(is_table: bool, is_of_batch: bool, last: int) -> Callable[..., object]:
    """The score_mod of FlashAttention-4 that adds its only auxiliary tensor: forward alone."""
    import cutlass
    from cutlass import cute

    @cute.jit
    def add(scores, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        bias = aux_tensors[0]
        entry = cute.make_rmem_tensor(1, bias.element_type)
        if cutlass.const_expr(is_table):
            entry[0] = bias[h[0], kv_idx[0] - q_idx[0] + last]
        elif cutlass.const_expr(is_of_batch):
            entry[0] = bias[b[0], h[0], q_idx[0], kv_idx[0]]
        else:
            entry[0] = bias[0, h[0], q_idx[0], kv_idx[0]]
        return scores + entry.load().to(cutlass.Float32)

    return add


def cuequivariance(bias: Tensor, mask: Tensor | None) -> Attend:
    """Triangle attention of cuEquivariance: a bias [1, heads, n, n], a mask of keys, or none."""
    attention = importlib.import_module(MODULES[CUEQUIVARIANCE]).triangle_attention
    options = {} if mask is None else {"mask": ~mask[None]}  # there True is a key that counts

    def attend(*tensors: Tensor) -> Tensor:
        return attention(*(each[None] for each in tensors), bias[:, None], **options)[0]

    return attend


def trifast(bias: Tensor, mask: Tensor | None) -> Attend:
    """Triangle attention of trifast, which has as many rows as tokens, and heads before rows."""
    attention = importlib.import_module(MODULES[TRIFAST]).triangle_attention
    tokens = bias.shape[-1]
    if mask is None:
        mask = torch.zeros(tokens, 1, 1, tokens, dtype=torch.bool, device=bias.device)
    masked = mask[None, :, 0, 0]

    def attend(*tensors: Tensor) -> Tensor:
        found = attention(*(each.transpose(0, 1)[None] for each in tensors), bias, masked)
        return found[0].transpose(0, 1)

    return attend
