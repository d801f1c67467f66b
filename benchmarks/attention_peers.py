"""megasoftmax.attention and its peers, as bench_attention.py calls them.

Each is built once, outside of what is timed: FlexAttention's block masks and compilation, the mask
of a window. What their users do in each step is inside: SDPA has no causal mask beside a bias, so
the bias is filled with -inf first.
"""

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from attention_cases import DEVICE, Case, Inputs, visible
from measured import DENSE, OURS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import megasoftmax
from megasoftmax.build import library

FLEX = "FlexAttention"
FLASH = "FlashAttention-4"
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Implementation:
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]  # that get a gradient
    during: Callable[[], AbstractContextManager[None]] = nullcontext  # of forward and backward


Build = Callable[[Inputs], Implementation]


def builders(inputs: Inputs, flex: bool, like: Sequence[str] = ()) -> dict[str, Build]:
    """By name; building, as well as calling, may fail: that is a refusal.

    Args:
        flex: FlexAttention too, where the case has it.
        like: compute capabilities whose kernels megasoftmax takes besides, such as "8.6".
    """
    case = inputs.case
    found: dict[str, Build] = {OURS: ours}
    for capability in like:
        found[f"{OURS} as on {capability}"] = functools.partial(ours, capability=capability)
    if case.bias == "table":
        found[DENSE] = functools.partial(ours, dense=True)
    if not case.sink:  # SDPA has none
        for name, backend in BACKENDS.items():
            found[name] = functools.partial(sdpa, backend=backend)
    if has_flash_attention(case):
        found[FLASH] = flash_attention
    if flex and case.flex:
        found[FLEX] = flex_attention
    return found


def has_flash_attention(case: Case) -> bool:
    """Whether the package is there and has the case: 16 bits, and no gradient of a bias."""
    is_taken = not (case.gradient or case.sink or case.decode) and case.dtype.itemsize == 2
    # An older package has the same name, without these kernels.
    names = ("flash_attn", "flash_attn.cute")
    return is_taken and all(importlib.util.find_spec(name) is not None for name in names)


@contextmanager
def gpu_like(capability: str) -> Iterator[None]:
    """Kernels are chosen as on a GPU of common/limits.h."""
    act_as = ctypes.CDLL(str(library.load().path)).megasoftmax_act_as
    if not act_as(*map(int, capability.split("."))):
        raise ValueError(f"common/limits.h has no GPU of compute capability {capability}")
    try:
        yield
    finally:
        act_as(0, 0)


def ours(inputs: Inputs, dense: bool = False, capability: str | None = None) -> Implementation:
    case = inputs.case
    window = None if case.window is None else (case.window, 0)
    table = None if dense else inputs.table
    leaves = [leaf for leaf in inputs.leaves if table is None or leaf is not inputs.bias]
    if table is not None and case.gradient:
        leaves.append(table)

    def forward() -> Tensor:
        bias = inputs.bias if table is None else megasoftmax.biases.RelativeBias(table)
        return megasoftmax.attention(
            inputs.query,
            inputs.key,
            inputs.value,
            bias=bias,
            causal=case.causal,
            window=window,
            sink=inputs.sink,
            fused=True,
        )

    during = functools.partial(gpu_like, capability) if capability else nullcontext
    return Implementation(forward, tuple(leaves), during)


def sdpa(inputs: Inputs, backend: SDPBackend) -> Implementation:
    """One backend of torch's, with no other to fall back on."""
    case, bias, excluded = inputs.case, inputs.bias, inputs.excluded
    seen = None if case.window is None or excluded is None else ~excluded

    def forward() -> Tensor:
        mask = seen if bias is None else bias
        if bias is not None and excluded is not None:
            mask = bias.masked_fill(excluded, -torch.inf)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                inputs.query,
                inputs.key,
                inputs.value,
                attn_mask=mask,
                is_causal=case.causal and mask is None,
                enable_gqa=case.groups != case.heads,
            )

    return Implementation(forward, inputs.leaves)


def flash_attention(inputs: Inputs) -> Implementation:
    """Of the package flash-attn-4, whose kernels are written in CuTe and compiled when called."""
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"  # so that processes share them
    from flash_attn.cute import flash_attn_func

    case = inputs.case
    window = (None, None) if case.window is None else (case.window, 0)
    options = {"causal": case.causal, "window_size": window}
    if inputs.bias is not None:
        bias = inputs.bias if inputs.table is None else inputs.table
        options |= {"score_mod": added_bias(case), "aux_tensors": [bias]}

    def forward() -> Tensor:
        query, key, value = (
            each.transpose(1, 2) for each in (inputs.query, inputs.key, inputs.value)
        )
        found = flash_attn_func(query, key, value, **options)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return Implementation(forward, inputs.leaves)


def added_bias(case: Case) -> Callable[..., object]:
    """The score_mod of FlashAttention-4 that adds its only auxiliary tensor: forward alone."""
    import cutlass
    from cutlass import cute

    is_table, is_of_batch, last = case.bias == "table", case.bias == "b,h", case.queries - 1

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


def flex_attention(inputs: Inputs) -> Implementation:
    """Compiled for these sizes and this bias, block mask or sink alone."""
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()
    case, bias, table, sink = inputs.case, inputs.bias, inputs.table, inputs.sink
    last = case.queries - 1
    score_mod = None
    leaves = inputs.leaves
    if table is not None:
        leaves = tuple(table if leaf is bias else leaf for leaf in leaves)

        def score_mod(score, b, h, i, j):
            return score + table[h, j - i + last]

    elif case.bias == "1,h":

        def score_mod(score, b, h, i, j):
            return score + bias[0, h, i, j]

    elif case.bias:

        def score_mod(score, b, h, i, j):
            return score + bias[b, h, i, j]

    block_mask = None
    if case.causal:
        sizes = (None, None, case.queries, case.keys)
        block_mask = flex.create_block_mask(visible(case.window), *sizes, device=DEVICE)
    options = {
        "score_mod": score_mod,
        "block_mask": block_mask,
        "enable_gqa": case.groups != case.heads,
    }

    def with_sink(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
        """What models with a sink do: the output times the share that the sink leaves."""
        output, auxiliary = flex.flex_attention(
            query, key, value, **options, return_aux=flex.AuxRequest(lse=True)
        )
        share = torch.sigmoid(auxiliary.lse - sink.float()[:, None])
        return (output * share.unsqueeze(-1)).to(output.dtype)

    tensors = (inputs.query, inputs.key, inputs.value)
    if sink is not None:
        compiled = torch.compile(with_sink, dynamic=False)
        return Implementation(lambda: compiled(*tensors, sink), leaves)
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return Implementation(lambda: compiled(*tensors, **options), leaves)
