"""Scores of relative positions, as Transformer-XL has them, for a `ShiftedBias`."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_ALIGNED = 8  # 16-bit entries of 16 bytes


def position_scores(query: Tensor, positions: Tensor) -> Tensor:
    """The products of queries and positions, the table of a `ShiftedBias`.

    With an odd number of distances a matrix product in 16 bits takes its slowest kernels, and so
    does its backward pass: there are zeros behind the positions here. The examples that share
    positions are one product.

    Args:
        query: [batch, heads, queries, head_dim], scaled.
        positions: [batch or 1, heads, distances, head_dim], of at least keys + queries - 1
            distances.

    Returns:
        [batch, heads, queries, distances, rounded up to a multiple of 8].
    """
    batch, _, queries, _ = query.shape
    positions = torch.nn.functional.pad(positions, (0, 0, 0, -positions.shape[2] % _ALIGNED))
    if positions.shape[0] == batch:
        return torch.matmul(query, positions.transpose(2, 3))
    rows = query.transpose(0, 1).flatten(1, 2)
    scores = torch.bmm(rows, positions.squeeze(0).transpose(1, 2)).unflatten(1, (batch, queries))
    return scores.transpose(0, 1)


def may_recompute() -> bool:
    """Whether `recomputed` can be used: neither compiled nor under torch.func, which know no hooks.

    Others' hooks, as of checkpointing, would not see what autograd saves.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


@contextmanager
def recomputed(tensor: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """Lets autograd save how a tensor is computed, in place of the tensor and its views.

    Args:
        tensor: an argument of the operations in the block. Autograd does not notice if what these
            save is changed in place later.
        compute: the same values once more, in the same layout, without a graph. What it holds
            stays in memory.
    """

    # Autograd keeps `pack` too, as long as what it has packed.
    of_block = weakref.ref(tensor)

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        kept = of_block()
        if kept is None or saved.untyped_storage()._cdata != kept.untyped_storage()._cdata:
            return saved
        place = saved.shape, saved.stride(), saved.storage_offset()
        return lambda: compute().as_strided(*place)

    def unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with torch.no_grad():
            return saved()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
