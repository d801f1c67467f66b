"""Attention over a sequence that is split among the ranks of a group."""

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from megasoftmax import arguments, checks
from megasoftmax.autocast import as_autocast
from megasoftmax.biases import RelativeBias
from megasoftmax.distributed import context_parallel
from megasoftmax.functions import leading
from megasoftmax.functions.attention import AttentionCall
from megasoftmax.options import (
    AttentionOptions,
    Ranges,
    Window,
    as_number,
    check_group,
    checked_window,
)
from megasoftmax.reference.attention import ForwardArguments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: "ProcessGroup",
    order: Literal["contiguous", "zigzag"] = "contiguous",
    lengths: Sequence[int] | None = None,
    bias: Tensor | RelativeBias | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    visible: Ranges | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a sequence that is split among the ranks of a group: context parallelism.

        group = mesh.get_group("context")
        query, key, value = (
            megasoftmax.zigzag_chunk(each, group.size(), 2)[group.rank()] for each in whole
        )
        output, lse = megasoftmax.ring_attention(
            query, key, value, group=group, order="zigzag", causal=True
        )

    What `attention` would compute for this rank's queries if it had the keys of all ranks, in the
    order of the sequence. Keys and values go round in a ring while blocks are computed, forward and
    backward; beside its own, a rank holds those of two ranks at a time, of some heads where there
    is much to compute. What is kept for the backward pass is of this rank: inputs, output, and
    three numbers for each query and head. Without kernels the backward pass computes each block
    anew.

    With causality and the order "contiguous" the last rank computes 2 * ranks - 1 times as much as
    the first, and all wait for it. With "zigzag" each rank has an early and a late part of the
    sequence, and all compute the same. Blocks that causality excludes are computed in neither.

    Differentiable once, in reverse mode. The gradients of query, key and value are whole. That of a
    sink or bias is what this rank's queries contribute: where ranks share one, as with any
    parameter of a model whose batch is sharded, their gradients are to be added up.

    All ranks must call it, with the same options and kinds of arguments, forward and backward.
    Compiled code leaves its graph for the call. torch.autocast acts as on `attention`.

    Args:
        query: [..., heads, queries, head_dim] of this rank, as in `attention`.
        key: [..., key_heads, keys, head_dim] of this rank, of the same dtype.
        value: [..., key_heads, keys, value_dim], of the same dtype.
        group: the ranks. Every backend of torch.distributed that can send and receive serves.
        order: "contiguous": rank r holds part r of the sequence, as torch.chunk cuts it. "zigzag":
            the sequence has 2 * ranks equal parts, and rank r holds parts r and 2 * ranks - 1 - r,
            one after the other, as `zigzag_chunk` cuts it; `zigzag_cat` joins outputs. Each rank
            then has as many queries as keys, an even number.
        lengths: the number of keys of each rank, from 0 on; by default that of this rank. It must
            be given if ranks differ, which is not checked. With "zigzag" all must be equal.
        bias: floating, broadcastable to this rank's queries, in their order, and the keys of all
            ranks, in the order of the sequence: [..., heads, queries, sum(lengths)], as in
            `attention`. Or a `RelativeBias` with the table of the whole sequence,
            2 * sum(lengths) - 1 entries.
        mask: bool, True = excluded, broadcastable to the same.
        scale: factor of the products; by default head_dim ** -0.5.
        softcap: as in `attention`.
        causal: exclude keys after the query.
        window: (left, right), as in `attention`.
        visible: (first, end) of this rank's queries, [..., heads, queries], as in `attention`,
            counted in the whole sequence.
        sink: a logit that joins the denominator, once: floating [heads], or one element, or a
            number.
        dropout: as in `attention`.
        seed: as in `attention`; ranks may have the same or others. The queries of rank r and the
            keys of rank k drop what `attention` of these alone drops with the seed
            seed + r * ranks + k, where seed is that of rank r. With "zigzag" the 2 * ranks parts
            of the sequence take the place of ranks.
        fused: of each block, as in `attention`.

    Returns:
        The output of this rank's queries, [..., heads, queries, value_dim], in the dtype of the
        query, in memory [..., queries, heads, value_dim]; and the log-sum-exp over the keys of
        all ranks, sink included, [..., heads, queries], float32 (float64 for float64 queries),
        differentiable too.

    Raises:
        TypeError, ValueError: an argument is not as above; causality, a window, a `RelativeBias` or
            "zigzag" is given, for which query i is the token of key i, but not as many queries as
            keys; or `fused` is True and a block cannot run fused.
        NotImplementedError: a backward pass with create_graph=True, or a forward-mode derivative.

    Source:
        Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889. "zigzag": the context
        parallelism of The Llama 3 Herd of Models, section 3.3, https://arxiv.org/abs/2407.21783.
    """
    check_group(group)
    query, key, value = as_autocast(query, key, value)
    scale, dropout = as_number("scale", scale), as_number("dropout", dropout)
    window = checked_window("window", window)
    softcap = as_number("softcap", softcap)
    options = AttentionOptions(
        bias, mask, scale, softcap, causal, window, visible, sink, dropout, seed, fused=fused
    )
    every = arguments.check_ring(query, key, value, options, group, lengths, order)
    merged = leading.merged(query, key, value, options)
    call = AttentionCall(*merged)
    implementation = call.implementation()
    operands = call.operands(implementation, sum(every))
    attend = _outside_of_graphs if torch.compiler.is_compiling() else context_parallel.attention
    output, lse = attend(
        implementation,
        context_parallel.Ring(group, every, order == "zigzag"),
        ForwardArguments(*merged[:3], *operands),
    )
    return leading.unmerged(output, query), leading.unmerged(lse, query)


# Without it torch.compile makes a graph of each piece of code between two collectives. What torch
# exports, torch.compiler.disable, would import torch._dynamo here, 1.3 s.
_outside_of_graphs = _disable_dynamo(context_parallel.attention)


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from that over parts of them.

        parts = [
            megasoftmax.attention(query, *part, return_lse=True)
            for part in zip(key.chunk(2, 2), value.chunk(2, 2))
        ]
        output, lse = megasoftmax.merge_attention(*zip(*parts))

    A part with nothing for a query, where its log-sum-exp is -inf, counts for nothing, whatever its
    output holds; a query for which no part has anything has output 0 and -inf again. If there is a
    sink, one part has it. Give the others a sink of -inf where all logits of a query can be -inf in
    a part, as when they overflow: by itself such a row is NaN, and so are its gradients.
    Plain torch, differentiable with respect to all.

    Args:
        outputs: of the parts, at least one, [..., queries, value_dim], floating, of one dtype
            and device.
        lses: their log-sum-exps, [..., queries], float32 or float64, of one dtype.

    Returns:
        The output in the dtype of the parts, added up in that of the log-sum-exps; and the
        log-sum-exp.

    Raises:
        TypeError: dtypes do not agree, or are others.
        ValueError: there are no parts, or shapes or devices do not agree.
    """
    _check_parts(outputs, lses)
    largest = reduce(torch.maximum, lses).detach()
    largest = largest.masked_fill(largest == -torch.inf, 0)
    weights = [torch.exp(lse - largest) for lse in lses]
    total = sum(weights[1:], weights[0])
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    shares = [
        # A clone and a product lie in memory as the output does.
        output.clone().masked_fill_((weight == 0).unsqueeze(-1), 0)  # may have been NaN
        * (weight / total).unsqueeze(-1)
        for weight, output in zip(weights, outputs, strict=True)
    ]
    lse = total.log().masked_fill(nothing, -torch.inf) + largest
    return sum(shares[1:], shares[0]).to(outputs[0].dtype), lse


def _check_parts(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    checks.check_tensors("outputs", outputs)
    checks.check_tensors("lses", lses)
    if len(outputs) != len(lses):
        raise ValueError(f"lses: expected one for each of {len(outputs)} outputs, got {len(lses)}")
    checks.check_device("lses[0]", lses[0], "outputs[0]", outputs[0])
    shape, dtype, lse_dtype = outputs[0].shape, outputs[0].dtype, lses[0].dtype
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if dtype not in checks.FLOATING or output.dtype != dtype:
            expected = checks.FLOATING_NAMES if i == 0 else f"{dtype}, as outputs[0]"
            raise TypeError(f"outputs[{i}]: expected {expected}, got {output.dtype}")
        if lse.dtype not in (torch.float32, torch.float64) or lse.dtype != lse_dtype:
            expected = "float32 or float64" if i == 0 else f"{lse_dtype}, as lses[0]"
            raise TypeError(f"lses[{i}]: expected {expected}, got {lse.dtype}")
        if output.shape != shape:
            raise ValueError(
                f"outputs[{i}]: expected shape {tuple(shape)}, as outputs[0], "
                f"got {tuple(output.shape)}"
            )
        if lse.shape != shape[:-1]:
            raise ValueError(
                f"lses[{i}]: expected shape {tuple(shape[:-1])}, that of the outputs without the "
                f"last dimension, got {tuple(lse.shape)}"
            )
