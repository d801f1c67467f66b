"""Checks of the arguments of the public functions.

They are cheap: nothing is read and nothing is launched. An error names the argument, what was
expected and what came.
"""

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasoftmax.biases import RelativeBias
from megasoftmax.checks import (
    FLOATING,
    FLOATING_NAMES,
    as_integer,
    check_device,
    check_flag,
    check_floating,
    check_layout,
    check_rank,
    has_values,
    kind,
)
from megasoftmax.masks import TileMask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_INTEGERS = (torch.int32, torch.int64)
_INT32_MAX = torch.iinfo(torch.int32).max
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}
LARGEST_FLOAT32 = _LARGEST[torch.float32]

Window = tuple[int, int]
Ranges = tuple[Tensor | None, Tensor | None]


def check_softmax(
    scores: Tensor,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: Window | None,
    sink: Tensor | float | None,
    dtype: torch.dtype | None,
    dim: int,
    fused: bool | None,
    visible: Ranges | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
) -> None:
    """The window is one that `checked_window` returned."""
    _check_scores("scores", scores, scale, mask, bias)
    if causal is not False:
        check_flag("causal", causal)
        _check_has_queries("causal", scores)
    if window is not None:
        _check_has_queries("window", scores)
    if sink is not None:
        _check_sink(sink, "scores", scores)
    if visible is not None:
        _check_visible(visible, "scores", scores, scores.shape[:-1])
    _check_dropout(dropout, seed, "scores", scores)
    if type(dim) is not int or dim != -1:
        _check_dim(dim, scores, causal, window, sink, visible, dropout)
    _check_choices(dtype, return_lse, fused)


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


def check_topk(
    logits: Tensor,
    k: int,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    renormalize: bool,
    dtype: torch.dtype | None,
    return_lse: bool,
    group: "ProcessGroup | None",
    fused: bool | None,
) -> None:
    """k is one that `as_integer` returned."""
    _check_scores("logits", logits, scale, mask, bias)
    columns = logits.shape[-1]
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k: expected an integer from 0 to {columns}, got {kind(k)}")
    if k < 0 or (k > columns and group is None):
        raise ValueError(f"k: expected an integer from 0 to {columns}, got {k}")
    if group is not None:
        check_group(group)
        if hasattr(logits, "device_mesh"):
            raise ValueError("group: expected None for a DTensor, got a group")
    check_flag("renormalize", renormalize)
    _check_choices(dtype, return_lse, fused)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | RelativeBias | None = None,
    mask: Tensor | TileMask | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    sink: Tensor | float | None = None,
    fused: bool | None = None,
    visible: Ranges | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
) -> None:
    """The window is one that `checked_window` returned."""
    check_floating("query", query)
    if query.dim() != 4:
        raise ValueError(
            f"query: expected [batch, heads, queries, head_dim], got shape {tuple(query.shape)}"
        )
    batch, heads, queries, head_dim = query.shape
    _check_of_keys("key", key, query, (batch, None, None, head_dim))
    _, key_heads, keys, _ = key.shape
    _check_of_keys("value", value, query, (batch, key_heads, keys, None))
    if heads != key_heads and (key_heads == 0 or heads % key_heads != 0):
        raise ValueError(
            f"key: expected heads that divide {heads}, those of query, got {key_heads}"
        )
    if scale is not None:
        check_scale(scale, query.dtype)
    shape = (batch, heads, queries, keys)
    if isinstance(mask, TileMask):
        _check_tile_mask(mask, query, shape)
    elif mask is not None:
        _check_mask(mask)
        _check_companion("mask", mask, "query", query, shape)
    if bias is not None:
        check_attention_bias(bias, query, shape)
    if visible is not None:
        _check_visible(visible, "query", query, shape[:-1])
    check_flag("causal", causal)
    if sink is not None:
        _check_sink(sink, "query", query)
    check_flag("return_lse", return_lse)
    _check_fused(fused)
    _check_dropout(dropout, seed, "query", query)


def check_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: "ProcessGroup",
    lengths: Sequence[int] | None,
    bias: Tensor | RelativeBias | None,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
    window: Window | None,
    sink: Tensor | float | None,
    fused: bool | None,
    visible: Ranges | None,
    dropout: float,
    seed: Tensor | None,
    order: str,
) -> tuple[int, ...]:
    """Returns the number of keys of each rank."""
    check_attention(
        query, key, value, None, None, scale, causal, window, sink, fused, visible, dropout, seed
    )
    if hasattr(query, "device_mesh"):
        raise ValueError("query: expected the part of this rank, to_local(), got a DTensor")
    every = _check_lengths(lengths, key, group)
    _check_order(order, every)
    batch, heads, queries, _ = query.shape
    relative = isinstance(bias, RelativeBias)
    needs_positions = causal or window is not None or relative or order == "zigzag"
    if needs_positions and queries != key.shape[2]:
        raise ValueError(
            f"query: expected as many queries as keys, {key.shape[2]}, with causal, window, a "
            f"RelativeBias or order='zigzag', got {queries}"
        )
    total = sum(every)
    if mask is not None:
        _check_mask(mask)
        _check_companion("mask", mask, "query", query, (batch, heads, queries, total))
    if bias is not None:
        check_attention_bias(bias, query, (batch, heads, total if relative else queries, total))
    return every


def check_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    bias: RelativeBias | None,
) -> None:
    """What `check_attention` does not check of the arguments of `attention_varlen`."""
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
    """What `check_attention` does not check of torch's scaled_dot_product_attention.

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
        _check_companion("attn_mask", attn_mask, "query", query, shape)
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
    name: str, tensor: Tensor, rank: int, expected: str, is_bool: bool = False
) -> None:
    if not isinstance(tensor, Tensor) or (
        tensor.dtype not in _INTEGERS
        and not (is_bool and not (tensor.is_floating_point() or tensor.is_complex()))
    ):
        kinds = "integers or bool" if is_bool else "int32 or int64"
        raise TypeError(f"{name}: expected a tensor of {kinds}, {expected}, got {kind(tensor)}")
    check_rank(name, tensor, rank, expected)


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


def _check_of_keys(name: str, tensor: Tensor, query: Tensor, shape: tuple[int | None, ...]) -> None:
    """A tensor like the query, with the sizes that are not None."""
    if not isinstance(tensor, Tensor) or tensor.dtype != query.dtype:
        raise TypeError(f"{name}: expected a tensor of {query.dtype}, as query, got {kind(tensor)}")
    check_layout(name, tensor)
    check_device(name, tensor, "query", query)
    fits = tensor.dim() == 4
    if fits:
        for size, wanted in zip(tensor.shape, shape, strict=True):  # all() takes twice as long
            fits = fits and (wanted is None or size == wanted)
    if not fits:
        names = ("batch", "key_heads", "keys", "value_dim")
        expected = ", ".join(
            name if wanted is None else str(wanted)
            for name, wanted in zip(names, shape, strict=True)
        )
        raise ValueError(f"{name}: expected shape [{expected}], got {tuple(tensor.shape)}")


def _check_tile_mask(mask: TileMask, query: Tensor, shape: tuple[int, int, int, int]) -> None:
    if mask.block == 1:
        _check_companion("mask", mask.tensor, "query", query, shape)
        return
    check_device("mask", mask.tensor, "query", query)
    blocks = tuple(-(-size // mask.block) for size in shape[2:])
    found = mask.tensor.shape
    if found[-2:] != blocks or not _broadcasts(found, (*shape[:2], *blocks)):
        raise ValueError(
            f"mask: expected blocks of {mask.block} that broadcast to "
            f"{(*shape[:2], *blocks)}, none missing in the last two, got {tuple(found)}"
        )


def check_attention_bias(
    bias: Tensor | RelativeBias, query: Tensor, shape: tuple[int, int, int, int]
) -> None:
    relative = isinstance(bias, RelativeBias)
    name, tensor = ("bias.table", bias.table) if isinstance(bias, RelativeBias) else ("bias", bias)
    check_floating(name, tensor)
    check_device(name, tensor, "query", query)
    batch, heads, queries, keys = shape
    target = (batch, heads, max(queries + keys - 1, 0)) if relative else shape
    shape_of_bias = tensor.shape
    if _broadcasts_in_groups(shape_of_bias, target):
        return
    expected = f"[heads, {target[-1]}] or [batch, heads, {target[-1]}]," if relative else "a shape"
    explicit = (1,) * (len(target) - len(shape_of_bias)) + tuple(shape_of_bias)
    hint = ""
    if len(shape_of_bias) < len(target) and _broadcasts_in_groups(explicit, target):
        hint = f"; pass it as {explicit} if neighbouring heads share an entry"
    raise ValueError(
        f"{name}: expected {expected} that broadcasts to {target}, or {len(target)} dimensions of "
        f"which the first two divide {batch} and {heads}, got {tuple(shape_of_bias)}{hint}"
    )


def _broadcasts_in_groups(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether it broadcasts, or has all dimensions and divides batches and heads.

    The entries of a table, its last dimension, do not broadcast.
    """
    if len(shape) > len(target):
        return False
    all_dims = len(shape) == len(target)
    for dim in range(-1, -len(shape) - 1, -1):
        size, wanted = shape[dim], target[dim]
        if size == wanted or (size == 1 and (len(target) == 4 or dim != -1)):
            continue
        if not all_dims or len(target) + dim > 1 or size == 0 or wanted % size != 0:
            return False
    return True


def _check_scores(
    name: str, scores: Tensor, scale: float, mask: Tensor | None, bias: Tensor | None
) -> None:
    check_floating(name, scores)
    if scores.dim() == 0:
        raise ValueError(f"{name}: expected at least 1 dimension, got a tensor without dimensions")
    check_scale(scale, scores.dtype)
    if mask is not None:
        _check_mask(mask)
        _check_companion("mask", mask, name, scores, scores.shape)
    if bias is not None:
        check_floating("bias", bias)
        _check_companion("bias", bias, name, scores, scores.shape)


def as_number(name: str, value: Any) -> Any:
    """The Python number of a numpy scalar, or of a tensor without dimensions on a CPU.

    Python numbers, and what is no number, are returned as they are.

    Raises:
        TypeError: a tensor that cannot be read without waiting for a device, or that needs a
            gradient, which a number does not get.
    """
    if value is None or isinstance(value, float):  # the next takes as long as all checks
        return value
    if isinstance(value, int):  # a larger one than torch's is refused, or that of a float
        return value if abs(value) < 2**63 or abs(value) > _LARGEST[torch.float64] else float(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if not isinstance(value, Tensor) or value.dim() != 0 or value.is_complex():
        return value
    check_layout(name, value)
    if value.requires_grad:
        raise TypeError(
            f"{name}: expected a number, which gets no gradient, got a tensor that requires one; "
            "multiply the query or the scores by it"
        )
    if value.device.type != "cpu":
        raise TypeError(
            f"{name}: expected a number, got a tensor on {value.device}; reading it would wait for "
            "the device: keep it on the CPU"
        )
    return value.item()


def check_scale(scale: float, dtype: torch.dtype, name: str = "scale") -> None:
    """A finite number of the type that scores of `dtype` are computed in."""
    if not isinstance(scale, (float, int)):
        raise TypeError(f"{name}: expected a number, got {kind(scale)}")
    if not -LARGEST_FLOAT32 <= scale <= LARGEST_FLOAT32:
        if not -torch.inf < scale < torch.inf:
            raise ValueError(f"{name}: expected a finite number, got {scale}")
        _check_range(name, scale, dtype)


def _check_range(name: str, number: float, dtype: torch.dtype) -> None:
    """Whether a finite number is one in the type that scores of `dtype` are computed in."""
    computed = torch.promote_types(dtype, torch.float32)
    if abs(number) > _LARGEST[computed]:
        largest = f"{_LARGEST[computed]:.5g}"
        raise ValueError(
            f"{name}: expected a number within the range of {computed}, up to {largest}, in which "
            f"{dtype} is computed, got {number}"
        )


def _check_mask(mask: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        hint = ""
        if isinstance(mask, Tensor) and mask.is_floating_point():
            hint = "; pass a mask that is added to the scores as bias="
        elif isinstance(mask, Tensor):
            hint = (
                "; pass a tokenizer's attention_mask as "
                "visible=megasoftmax.ranges.padding(attention_mask)"
            )
        raise TypeError(
            "mask: expected a bool tensor, True = excluded (in scaled_dot_product_attention "
            f"True = keep), got {kind(mask)}{hint}"
        )
    check_layout("mask", mask)


def check_group(group: "ProcessGroup") -> None:
    is_one = torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)
    if not is_one:
        raise TypeError(f"group: expected a process group, got {kind(group)}")


def _check_lengths(
    lengths: Sequence[int] | None, key: Tensor, group: "ProcessGroup"
) -> tuple[int, ...]:
    keys, ranks = key.shape[2], group.size()
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


def _check_choices(dtype: torch.dtype | None, return_lse: bool, fused: bool | None) -> None:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in FLOATING):
        found = dtype if isinstance(dtype, (torch.dtype, str)) else kind(dtype)
        raise TypeError(f"dtype: expected {FLOATING_NAMES}, got {found!r}")
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    _check_fused(fused)


def _check_fused(fused: bool | None) -> None:
    if fused is not None and not isinstance(fused, bool):
        raise TypeError(f"fused: expected None or a bool, got {kind(fused)}")


def check_dropout(dropout: float, name: str = "dropout") -> None:
    if isinstance(dropout, bool) or not isinstance(dropout, (float, int)):
        raise TypeError(f"{name}: expected a number from 0 to 1, got {kind(dropout)}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {dropout}")


def _check_dropout(
    dropout: float, seed: Tensor | None, name_of_scores: str, scores: Tensor
) -> None:
    check_dropout(dropout)
    if seed is None:
        return
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64:
        hint = ""
        if type(as_integer(seed)) is int:
            hint = f"; pass torch.tensor([{seed}], device={str(scores.device)!r})"
        raise TypeError(f"seed: expected None or a tensor of int64, got {kind(seed)}{hint}")
    check_layout("seed", seed)
    if seed.numel() != 1:
        raise ValueError(f"seed: expected one element, got shape {tuple(seed.shape)}")
    check_device("seed", seed, name_of_scores, scores)


def _check_companion(
    name: str, tensor: Tensor, name_of_scores: str, scores: Tensor, target: tuple[int, ...]
) -> None:
    """Same device, and broadcastable to the target."""
    check_device(name, tensor, name_of_scores, scores)
    shape = tensor.shape
    if shape != target and not _broadcasts(shape, target):
        hint = ""
        if len(target) == 4 and tuple(shape) == (target[0], target[3]):
            hint = f"; pass one of [batch, keys] as {name}[:, None, None, :]"
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {tuple(target)}, got {tuple(shape)}{hint}"
        )


def _broadcasts(shape: torch.Size, target: tuple[int, ...]) -> bool:
    if len(shape) > len(target):
        return False
    for size, wanted in zip(
        reversed(shape), reversed(target), strict=False
    ):  # all() takes twice as long
        if size != 1 and size != wanted:  # not `in`: sizes may be symbolic
            return False
    return True


def _check_has_queries(name: str, scores: Tensor) -> None:
    if scores.dim() < 2:
        raise ValueError(
            f"{name}: expected scores [..., queries, keys], got shape {tuple(scores.shape)}"
        )


def checked_window(name: str, window: Window | None) -> Window | None:
    """The window as two ints; -1 for a limit beyond those of int32, which limits nothing."""
    if window is None:
        return None
    expected = f"{name}: expected None or (left, right), two integers from -1 on"
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"{expected}, got {kind(window)}")
    if len(window) != 2:
        raise ValueError(f"{expected}, got {window}")
    left, right = as_integer(window[0]), as_integer(window[1])
    for limit in (left, right):
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise TypeError(f"{expected}, got {window}")
        if limit < -1:
            raise ValueError(f"{expected}, got {window}")
    return (-1 if left >= _INT32_MAX else left), (-1 if right >= _INT32_MAX else right)


def _check_visible(
    visible: Ranges, name_of_scores: str, scores: Tensor, shape: tuple[int, ...]
) -> None:
    expected = "visible: expected None or (first, end)"
    if not isinstance(visible, (tuple, list)):
        raise TypeError(f"{expected}, got {kind(visible)}")
    if len(visible) != 2:
        raise ValueError(f"{expected}, got {len(visible)} elements")
    for name, bound in zip(("visible[0]", "visible[1]"), visible, strict=True):
        if bound is None:
            continue
        if not isinstance(bound, Tensor) or bound.dtype not in _INTEGERS:
            raise TypeError(
                f"{name}: expected None or a tensor of int32 or int64, got {kind(bound)}"
            )
        check_layout(name, bound)
        _check_companion(name, bound, name_of_scores, scores, shape)


def _check_sink(sink: Tensor | float, name_of_scores: str, scores: Tensor) -> None:
    if not isinstance(sink, Tensor):
        if not isinstance(sink, numbers.Real):
            raise TypeError(f"sink: expected a tensor or a number, got {kind(sink)}")
        if abs(sink) > LARGEST_FLOAT32 and abs(sink) != torch.inf:
            _check_range("sink", sink, scores.dtype)
        return
    check_floating("sink", sink)
    check_device("sink", sink, name_of_scores, scores)
    if sink.numel() == 1:
        return
    if scores.dim() < 3 or sink.dim() != 1 or sink.shape[0] != scores.shape[-3]:
        heads = f" or [{scores.shape[-3]}], one per head," if scores.dim() > 2 else ""
        raise ValueError(f"sink: expected one element{heads} got shape {tuple(sink.shape)}")


def _check_dim(
    dim: int,
    scores: Tensor,
    causal: bool,
    window: Window | None,
    sink: Tensor | float | None,
    visible: Ranges | None,
    dropout: float,
) -> None:
    rank = scores.dim()
    expected = f"dim: expected an integer from {-rank} to {rank - 1}"
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{expected}, got {kind(dim)}")
    if not -rank <= dim < rank:
        raise ValueError(f"{expected}, got {dim}")
    if dim % rank == rank - 1:
        return
    for name, is_given in (
        ("causal", causal),
        ("window", window is not None),
        ("visible", visible is not None),
        ("dropout", dropout > 0),
    ):
        if is_given:
            raise ValueError(f"{name}: expected only over the last dimension, got dim {dim}")
    if isinstance(sink, Tensor) and sink.numel() != 1:
        raise ValueError(
            f"sink: expected one element, or dim -1, got shape {tuple(sink.shape)} and dim {dim}"
        )
