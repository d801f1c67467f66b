"""Scores of relative positions, as Transformer-XL has them: products, and their shift to keys."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 8  # 16-bit entries of 16 bytes


def position_scores(query: Tensor, positions: Tensor, keys: int) -> Tensor:
    """The products of queries and positions as scores of keys, see `relative_shift`.

    With an odd number of distances a matrix product in 16 bits takes its slowest kernels, and so
    does its backward pass: there are zeros behind the positions here. The examples that share
    positions are one product.

    Args:
        query: [batch, heads, queries, head_dim], scaled.
        positions: [batch or 1, heads, distances, head_dim], at least keys + queries - 1 distances.

    Returns:
        [batch, heads, queries, keys], a view.
    """
    batch, _, queries, _ = query.shape
    positions = torch.nn.functional.pad(positions, (0, 0, 0, -positions.shape[2] % _ALIGNED))
    if positions.shape[0] == batch:
        return relative_shift(torch.matmul(query, positions.transpose(2, 3)), keys)
    rows = query.transpose(0, 1).flatten(1, 2)
    scores = torch.bmm(rows, positions.squeeze(0).transpose(1, 2)).unflatten(1, (batch, queries))
    return relative_shift(scores, keys).transpose(0, 1)


def relative_shift(scores: Tensor, keys: int) -> Tensor:
    """Scores of keys from scores of distances, as a view: score (i, j) is (i, j - i + queries - 1).

    Padding and reshaping, as models do it, copies the scores twice. Here rows of a view begin one
    element earlier each, because they are one element shorter than those of `scores`.

    Args:
        scores: [..., queries, distances], contiguous. The first distance is that of the last query
            to the first key.
        keys: at most distances - queries + 1.

    Returns:
        [..., queries, keys], a view with rows of distances - 1 elements.

    Source:
        Dai et al., https://arxiv.org/abs/1901.02860, appendix B.
    """
    shifted: Tensor = _Shift.apply(scores, keys)
    return shifted


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
    """Lets autograd save how a tensor is computed, in place of the tensor.

    Args:
        tensor: an argument of the operations in the block. Autograd does not notice if what these
            save is changed in place later.
        compute: the same values once more, without a graph. What it holds stays in memory.
    """

    # Autograd keeps `pack` too, as long as what it has packed.
    of_block = weakref.ref(tensor)

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        kept = of_block()
        return compute if kept is not None and saved.is_set_to(kept) else saved

    def unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with torch.no_grad():
            return saved()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _shifted(flat: Tensor, queries: int, keys: int) -> Tensor:
    """Of scores whose last two dimensions are one."""
    if queries == 1:
        return flat[..., None, :keys]
    rows = flat[..., queries - 1 : -1]
    return rows.view(*rows.shape[:-1], queries, rows.shape[-1] // queries)[..., :keys]


class _Shift(torch.autograd.Function):
    """Autograd would fill and copy two tensors of all distances, one for each slice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, keys: int) -> Tensor:
        return _shifted(scores.flatten(-2), scores.shape[-2], keys)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        scores, ctx.keys = inputs
        ctx.distances = scores.shape[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        queries = gradient.shape[-2]
        flat = gradient.new_zeros((*gradient.shape[:-2], queries * ctx.distances))
        _shifted(flat, queries, ctx.keys).copy_(gradient)
        return flat.view(*gradient.shape[:-1], ctx.distances), None
