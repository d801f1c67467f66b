"""Checks of the arguments of the public functions beside their options.

They are cheap: nothing is read and nothing is launched. An error names the argument, what was
expected and what came.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megasoftmax.biases import RelativeBias, ShiftedBias
from megasoftmax.checks import (
    FLOATING,
    as_integer,
    check_device,
    check_flag,
    check_floating,
    check_layout,
    check_least_rank,
    check_rank,
    has_values,
    kind,
)
from megasoftmax.options import (
    AttentionOptions,
    check_attention_bias,
    check_companion,
    check_mask,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_INTEGERS = (torch.int32, torch.int64)


def check_gradient(gradient: Tensor, probabilities: Tensor) -> None:
    check_floating("gradient", gradient)
    if gradient.dtype != probabilities.dtype:
        raise TypeError(
            f"gradient: expected a tensor of {probabilities.dtype}, as probabilities, "
            f"got {kind(gradient)}"
        )
    check_device("gradient", gradient, "probabilities", probabilities)
    if gradient.shape != probabilities.shape:
        raise ValueError(
            f"gradient: expected shape {tuple(probabilities.shape)}, as probabilities, "
            f"got {tuple(gradient.shape)}"
        )


def check_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    group: "ProcessGroup",
    lengths: Sequence[int] | None,
    order: str,
) -> tuple[int, ...]:
    """Returns the number of keys of each rank."""
    bias, mask = options.bias, options.mask
    options._replace(bias=None, mask=None).check(query, key, value)
    if hasattr(query, "device_mesh"):
        raise ValueError("query: expected the part of this rank, to_local(), got a DTensor")
    every = _check_lengths(lengths, key, group)
    _check_order(order, every)
    queries = query.shape[-2]
    if isinstance(bias, ShiftedBias):
        raise TypeError(
            "bias: expected a tensor or a RelativeBias with one table for all queries, "
            f"got {kind(bias)}"
        )
    relative = isinstance(bias, RelativeBias)
    needs_positions = options.causal or options.window is not None or relative or order == "zigzag"
    if needs_positions and queries != key.shape[-2]:
        raise ValueError(
            f"query: expected as many queries as keys, {key.shape[-2]}, with causal, window, a "
            f"RelativeBias or order='zigzag', got {queries}"
        )
    total = sum(every)
    if mask is not None:
        check_mask(mask, "query", query, (*query.shape[:-1], total))
    if bias is not None:
        rows = total if relative else queries
        check_attention_bias(bias, query, (*query.shape[:-2], rows, total))
    return every


def check_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    bias: RelativeBias | None,
) -> None:
    """What `AttentionOptions` does not check of the arguments of `attention_varlen`."""
    for name, tensor, heads in (
        ("query", query, "heads"),
        ("key", key, "key_heads"),
        ("value", value, "key_heads"),
    ):
        check_floating(name, tensor)
        check_rank(name, tensor, 3, f"[tokens, {heads}, dim]")
    check_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    check_device("cu_seqlens_q", cu_seqlens_q, "query", query)
    if cu_seqlens_k is not cu_seqlens_q:
        check_offsets("cu_seqlens_k", cu_seqlens_k, key.shape[0])
        check_device("cu_seqlens_k", cu_seqlens_k, "query", query)
        if cu_seqlens_k.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"cu_seqlens_k: expected {cu_seqlens_q.shape[0]} entries, as cu_seqlens_q, "
                f"got {cu_seqlens_k.shape[0]}"
            )
    if bias is None:
        return
    if not isinstance(bias, RelativeBias):
        raise TypeError(f"bias: expected None or a RelativeBias, got {kind(bias)}")
    if isinstance(bias, ShiftedBias):
        raise TypeError(
            "bias: expected None or a RelativeBias with one table for all queries, "
            f"got {kind(bias)}"
        )
    if cu_seqlens_k is not cu_seqlens_q:
        raise ValueError(
            "bias: expected one cu_seqlens for queries and keys, whose documents then lie at the "
            "same places, got two tensors"
        )
    if key.shape[0] != query.shape[0]:
        raise ValueError(
            f"bias: expected as many keys as queries, {query.shape[0]}, got {key.shape[0]}"
        )
    check_floating("bias.table", bias.table)
    columns = bias.table.shape[-1]
    if columns % 2 == 0 and (columns != 0 or query.shape[0] != 0):
        raise ValueError(
            "bias.table: expected [heads, 2 * length - 1] or [batch, heads, 2 * length - 1], "
            f"got shape {tuple(bias.table.shape)}"
        )


def check_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> tuple[torch.Size, int, int]:
    """What `AttentionOptions` does not check of torch's scaled_dot_product_attention.

    Returns the dimensions before heads, at least one, the heads of the query, and those of key and
    value, all after broadcasting.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_floating(name, tensor)
        if tensor.dim() < 2:
            raise ValueError(
                f"{name}: expected [..., heads, tokens, dim] or [tokens, dim], "
                f"got shape {tuple(tensor.shape)}"
            )
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"value: expected as many tokens as key, {key.shape[-2]}, got {value.shape[-2]}"
        )
    tensors = (query, key, value)
    batch = _broadcast_sizes("batch dimensions", *(each.shape[:-3] for each in tensors))
    query_heads, *others = (each.shape[-3:-2] for each in tensors)
    key_heads = _broadcast_sizes("heads of key and value", *others)
    if enable_gqa:
        heads = (1, *query_heads)[-1:]  # checked where `key_heads` must divide them
    else:
        what = "heads (or enable_gqa=True, if query heads share keys)"
        heads = _broadcast_sizes(what, query_heads, key_heads)
    if attn_mask is not None:
        dtypes = (torch.bool, *FLOATING)
        if not isinstance(attn_mask, Tensor) or attn_mask.dtype not in dtypes:
            raise TypeError(
                "attn_mask: expected None, a bool tensor, True = keep, or a floating tensor that "
                f"is added to the scores, got {kind(attn_mask)}"
            )
        check_layout("attn_mask", attn_mask)
        if is_causal:
            raise ValueError(
                "is_causal: expected False beside attn_mask, as in torch, got True; "
                "megasoftmax.attention takes both"
            )
        shape = (*batch, *heads, query.shape[-2], key.shape[-2])
        check_companion("attn_mask", attn_mask, "query", query, shape)
    return batch, heads[0], key_heads[0]


def _broadcast_sizes(what: str, *sizes: Sequence[int]) -> torch.Size:
    """At least one dimension."""
    try:
        return torch.broadcast_shapes((1,), *sizes)
    except RuntimeError:
        found = ", ".join(str(tuple(each)) for each in sizes)
        raise ValueError(
            f"query, key, value: expected {what} that broadcast, got {found}"
        ) from None


def check_integers(
    name: str, tensor: Tensor, least_rank: int, expected: str, is_bool: bool = False
) -> None:
    if not isinstance(tensor, Tensor) or (
        tensor.dtype not in _INTEGERS
        and not (is_bool and not (tensor.is_floating_point() or tensor.is_complex()))
    ):
        kinds = "integers or bool" if is_bool else "int32 or int64"
        raise TypeError(f"{name}: expected a tensor of {kinds}, {expected}, got {kind(tensor)}")
    check_layout(name, tensor)
    check_least_rank(name, tensor, least_rank, expected)


def check_offsets(name: str, offsets: Tensor, tokens: int) -> None:
    """Of documents that lie one after the other. Values are checked on a CPU alone."""
    if not isinstance(offsets, Tensor) or offsets.dtype not in _INTEGERS:
        raise TypeError(f"{name}: expected a tensor of int32 or int64, got {kind(offsets)}")
    check_layout(name, offsets)
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name}: expected [documents + 1], got shape {tuple(offsets.shape)}")
    if not has_values(offsets):
        return
    values = offsets.tolist()
    if values[0] != 0 or values != sorted(values) or values[-1] > tokens:
        raise ValueError(
            f"{name}: expected offsets that begin at 0, do not decrease and end at {tokens} at "
            f"most, got {values if len(values) < 10 else [*values[:9], '...']}"
        )


def _check_lengths(
    lengths: Sequence[int] | None, key: Tensor, group: "ProcessGroup"
) -> tuple[int, ...]:
    keys, ranks = key.shape[-2], group.size()
    if lengths is None:
        return (keys,) * ranks
    expected = f"lengths: expected {ranks} integers from 0 on, {keys} at {group.rank()}"
    if not isinstance(lengths, (tuple, list)):
        raise TypeError(f"{expected}, got {kind(lengths)}")
    lengths = [as_integer(each) for each in lengths]
    if not all(type(each) is int for each in lengths):
        raise TypeError(f"{expected}, got {lengths}")
    if len(lengths) != ranks or min(lengths) < 0 or lengths[group.rank()] != keys:
        raise ValueError(f"{expected}, got {lengths}")
    return tuple(lengths)


def _check_order(order: str, lengths: tuple[int, ...]) -> None:
    expected = "order: expected 'contiguous' or 'zigzag'"
    if not isinstance(order, str):
        raise TypeError(f"{expected}, got {kind(order)}")
    if order not in ("contiguous", "zigzag"):
        raise ValueError(f"{expected}, got {order!r}")
    if order == "zigzag" and (len(set(lengths)) != 1 or lengths[0] % 2 != 0):
        raise ValueError(
            "order: expected as many keys on each rank, an even number, with 'zigzag', "
            f"got {lengths}"
        )


def check_shards(name: str, scores: Tensor) -> None:
    """DTensors that do not run fused: they run as ops all the same, which CPUs have in any case."""
    if scores.is_cuda:
        raise ValueError(
            f"{name}: expected a DTensor that runs fused (see why_not_fused), or to_local() of it, "
            "got one that cannot or must not"
        )
