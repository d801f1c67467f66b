"""Leading dimensions of attention: all that precede the heads become the batch of a kernel.

Query, key and value merge as views where their strides allow it. So do operands that have an entry
for each example, or one for all. A bias may also be constant along the last leading dimensions: it
keeps an entry for each of the others, and kernels divide the index of an example by how many share
one. A mask may be constant along the first: its entries repeat. Other operands are expanded to all
examples, which copies them; `copies` names them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megasoftmax.biases import RelativeBias
from megasoftmax.dispatch import Reason, merges
from megasoftmax.masks import TileMask
from megasoftmax.options import AttentionOptions, Ranges


class _Kind(NamedTuple):
    trailing: int  # dimensions from the heads on
    shares: bool = False  # an entry may be that of several examples that follow each other
    repeats: bool = False  # entries may begin again after the last


_QUERY, _BIAS, _MASK = _Kind(3), _Kind(3, shares=True), _Kind(3, repeats=True)
_BOUNDS = _Kind(2)


def merged(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, AttentionOptions]:
    """A valid call whose tensors have one leading dimension.

    The batches of its bias and of its mask may divide that of the query, b: example i reads entry
    i // (b / batches) of the bias, and i % batches of the mask.
    """
    if query.dim() == 4:
        return query, key, value, options
    leading = query.shape[:-3]
    bias, mask, visible = options.bias, options.mask, options.visible
    options = options._replace(
        bias=_merged_bias(bias, leading),
        mask=_merged_mask(mask, leading),
        visible=None if visible is None else _merged_bounds(visible, leading),
    )
    return _one_batch(query), _one_batch(key), _one_batch(value), options


def unmerged(result: Tensor, query: Tensor) -> Tensor:
    """A result [batch, ...] of a merged call, with the leading dimensions of the query."""
    if query.dim() == 4:
        return result
    return result.view(*query.shape[:-3], *result.shape[1:])


def entries(options: AttentionOptions, leading: Sequence[int]) -> list[tuple[int, int]]:
    """(batch, heads) of bias, mask and ranges once merged; what is missing is 1.

    A mask whose entries repeat counts as one with an entry for each example.
    """
    found = []
    for _, tensor, kind in _operands(options):
        heads = tensor.shape[-kind.trailing] if tensor.dim() >= kind.trailing else 1
        batch = math.prod(_sizes(tensor, kind, leading))
        if kind.repeats and batch != 1:
            batch = math.prod(leading)
        found.append((batch, heads))
    return found


def copies(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> tuple[Reason, ...]:
    """The tensors whose leading dimensions do not merge as a view."""
    leading = query.shape[:-3]
    if len(leading) < 2:
        return ()
    found = []
    tensors = (("query", query), ("key", key), ("value", value))
    for name, tensor, kind in (
        *((name, tensor, _QUERY) for name, tensor in tensors),
        *_operands(options),
    ):
        if tensor.dim() > kind.trailing and not merges(
            _expanded(tensor, kind, leading), len(leading)
        ):
            shape = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            limit = f"a view that broadcasts to {tuple(leading)} and merges them"
            found.append(Reason(f"leading dimensions of {name}", shape, limit))
    return tuple(found)


def _kind_of_table(bias: RelativeBias) -> _Kind:
    return _Kind(bias.trailing, shares=True)


def _one_batch(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0) if tensor.dim() == 3 else tensor.flatten(0, -4)


def _merged_bias(
    bias: Tensor | RelativeBias | None, leading: Sequence[int]
) -> Tensor | RelativeBias | None:
    if isinstance(bias, RelativeBias):
        return type(bias)(_merged(bias.table, _kind_of_table(bias), leading))
    return None if bias is None else _merged(bias, _BIAS, leading)


def _merged_mask(
    mask: Tensor | TileMask | None, leading: Sequence[int]
) -> Tensor | TileMask | None:
    def merge(tensor: Tensor) -> Tensor:
        return _merged(tensor, _MASK, leading)

    if isinstance(mask, TileMask):
        return mask.with_leading(tuple(leading), merge)
    return None if mask is None else merge(mask)


def _merged_bounds(visible: Ranges, leading: Sequence[int]) -> Ranges:
    first, end = (None if bound is None else _merged(bound, _BOUNDS, leading) for bound in visible)
    return first, end


def _operands(options: AttentionOptions) -> list[tuple[str, Tensor, _Kind]]:
    bias, mask = options.bias, options.mask
    found = []
    if isinstance(bias, RelativeBias):
        found.append(("bias.table", bias.table, _kind_of_table(bias)))
    elif bias is not None:
        found.append(("bias", bias, _BIAS))
    if mask is not None:
        tensor = mask.tensor if isinstance(mask, TileMask) else mask
        found.append(("mask", tensor, _MASK))
    for name, bound in zip(("visible[0]", "visible[1]"), options.visible or (), strict=False):
        if bound is not None:
            found.append((name, bound, _BOUNDS))
    return found


def _sizes(tensor: Tensor, kind: _Kind, leading: Sequence[int]) -> tuple[int, ...]:
    """What the leading dimensions of a tensor are expanded to before they merge."""
    own = tensor.shape[: -kind.trailing]
    missing = len(leading) - len(own)
    if len(leading) == 1:  # it may have been merged
        return (*(1,) * missing, *own)
    varying = [missing + dim for dim, size in enumerate(own) if size != 1]
    if len(varying) == 0:
        return (1,) * len(leading)
    begin = varying[0] if kind.repeats else 0
    end = varying[-1] + 1 if kind.shares else len(leading)
    return (*(1,) * begin, *leading[begin:end], *(1,) * (len(leading) - end))


def _expanded(tensor: Tensor, kind: _Kind, leading: Sequence[int]) -> Tensor:
    return tensor.expand(*_sizes(tensor, kind, leading), *(-1,) * kind.trailing)


def _merged(tensor: Tensor, kind: _Kind, leading: Sequence[int]) -> Tensor:
    if tensor.dim() <= kind.trailing:  # no leading dimension
        return tensor
    return _expanded(tensor, kind, leading).flatten(0, -1 - kind.trailing)
