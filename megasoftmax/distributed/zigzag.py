"""The zigzag order: a sequence over ranks in which causal attention costs all ranks the same."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megasoftmax import checks


def parts_of_rank(rank: int, ranks: int) -> tuple[int, int]:
    """Which two of the 2 * ranks parts of the sequence a rank holds, the earlier one first."""
    return rank, 2 * ranks - 1 - rank


def zigzag_chunk(tensor: Tensor, ranks: int, dim: int) -> tuple[Tensor, ...]:
    """Cut a tensor for `ring_attention(..., order="zigzag")`; torch.chunk in another order.

        zigzag_chunk(torch.arange(8), 2, 0)  # [0, 1, 6, 7], [2, 3, 4, 5]

    The dimension is cut into 2 * ranks equal parts. Rank r gets parts r and 2 * ranks - 1 - r. All
    that has an entry per token is cut alike: token ids, labels, position ids, masks by query. Give
    the model the position ids, and shift labels before they are cut: the token after the last one
    of a part is on another rank.

    Args:
        tensor: of the whole sequence, any dtype.
        ranks: of the group, from 1 on.
        dim: the dimension that counts tokens. Its size is a multiple of 2 * ranks.

    Returns:
        A copy for each rank, of size / ranks tokens. Differentiable.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    ranks = checks.checked_integer("ranks", ranks, 1)
    dim = _checked_dim(dim, "tensor", tensor)
    if tensor.shape[dim] % (2 * ranks) != 0:
        raise ValueError(
            f"tensor: expected a multiple of 2 * ranks, {2 * ranks}, in dimension {dim}, "
            f"got shape {tuple(tensor.shape)}; pad the sequence"
        )
    parts = tensor.tensor_split(2 * ranks, dim)
    return tuple(
        torch.cat([parts[number] for number in parts_of_rank(rank, ranks)], dim)
        for rank in range(ranks)
    )


def zigzag_cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Join what `zigzag_chunk` cut, or what ranks computed of it: outputs, gradients, losses.

        zigzag_cat(zigzag_chunk(tensor, ranks, dim), dim)  # tensor

    Args:
        tensors: one of each rank, in the order of the ranks, of one shape.
        dim: the dimension that counts tokens. Its size is even.

    Returns:
        The tensor of the whole sequence. Differentiable.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    checks.check_tensors("tensors", tensors)
    dim = _checked_dim(dim, "tensors[0]", tensors[0])
    shape = tensors[0].shape
    if shape[dim] % 2 != 0:
        raise ValueError(
            f"tensors[0]: expected an even size of dimension {dim}, got shape {tuple(shape)}"
        )
    for i, tensor in enumerate(tensors):
        if tensor.shape != shape:
            raise ValueError(
                f"tensors[{i}]: expected shape {tuple(shape)}, as tensors[0], "
                f"got {tuple(tensor.shape)}"
            )
    halves = [tensor.tensor_split(2, dim) for tensor in tensors]
    firsts, lasts = zip(*halves, strict=True)
    return torch.cat([*firsts, *reversed(lasts)], dim)


def _checked_dim(dim: int, name: str, tensor: Tensor) -> int:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {checks.kind(tensor)}")
    checks.check_layout(name, tensor)
    dim = checks.checked_integer("dim", dim, -(2**63))
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim: expected a dimension of {name}, {tuple(tensor.shape)}, got {dim}")
    return dim
