"""Masks of attention that many calls share, or that have an entry for many pairs."""

from collections.abc import Callable

import torch
from torch import Tensor

from megasoftmax import checks
from megasoftmax.limits import kernel_limits
from megasoftmax.reference.attention import mask_of_blocks
from megasoftmax.tracing import may_keep


class TileMask:
    """A mask that keeps a note of what kernels may skip, for further calls.

        mask = TileMask(excluded)  # [batch, heads, queries, keys]
        for layer in layers:
            hidden = layer(hidden, mask)  # calls megasoftmax.attention(..., mask=mask)

    Kernels skip tiles of 64 queries and 64 keys without a visible pair, and read no mask in tiles
    without an excluded pair. For a plain tensor they look for these tiles in every call, forward
    and backward. With a TileMask the first fused call on a GPU does, and later ones reuse its note.
    Results are the same.

    These calls look for the tiles themselves: under torch.compile, torch.jit.trace, transforms of
    torch.func and dispatch modes, of DTensors, with `visible`, and in a CUDA graph that is
    captured, so that its replays see what the mask holds then. Outside of them the tensor must not
    change once a call has run. A note is for the stream that made it, as any tensor.

    Args:
        mask: bool, True = excluded, as in `megasoftmax.attention`: it broadcasts to [..., heads,
            queries, keys]; any strides.

    Raises:
        TypeError, ValueError: the mask is not as above.
    """

    def __init__(self, mask: Tensor) -> None:
        _check(mask, "mask", 0, "[..., heads, queries, keys]")
        self.tensor = mask
        self.block = 1
        self._notes: dict[tuple[int, int], Tensor] = {}
        self._merged: dict[tuple[int, ...], TileMask] = {}

    @classmethod
    def from_blocks(cls, blocks: Tensor, size: int) -> "TileMask":
        """A mask with one entry for each block of size x size pairs; no larger tensor is made.

        Args:
            blocks: bool, True = excluded, [..., query blocks, key blocks], the dimensions before
                these broadcast to [..., heads]; any strides. A call with m queries and n keys takes
                ceil(m / size) and ceil(n / size) blocks. Block (i, j) is for queries from i * size
                on and keys from j * size on; the last may reach beyond the tensors.
            size: queries, and keys, of a block: a multiple of 64.

        Raises:
            TypeError, ValueError: an argument is not as above.
        """
        _check(blocks, "blocks", 2, "[..., query blocks, key blocks]")
        tile = kernel_limits().attention["kNoteTile"]
        size = checks.checked_integer("size", size, tile)
        if size % tile != 0:
            raise ValueError(f"size: expected a multiple of {tile}, got {size}")
        return cls._of(blocks, size)

    @classmethod
    def _of(cls, tensor: Tensor, block: int) -> "TileMask":
        self = cls.__new__(cls)
        self.tensor, self.block, self._notes, self._merged = tensor, block, {}, {}
        return self

    def to_mask(self, queries: int, keys: int) -> Tensor:
        """The plain mask: what was given, or a new one of blocks, [..., queries, keys]."""
        if self.block == 1:
            return self.tensor
        return mask_of_blocks(self.tensor, self.block, queries, keys)

    def with_leading(
        self, leading: tuple[int, ...], merge: Callable[[Tensor], Tensor]
    ) -> "TileMask":
        """The mask whose leading dimensions, broadcast to these, `merge` makes one.

        Kept with what kernels note of it, as this one is, where that may be.
        """
        if not may_keep(self.tensor.device):
            return TileMask._of(merge(self.tensor), self.block)
        if leading not in self._merged:
            with torch.inference_mode(False):  # else no later call could save it for gradients
                self._merged[leading] = TileMask._of(merge(self.tensor), self.block)
        return self._merged[leading]

    def note(
        self, queries: int, keys: int, tile_note: Callable[[Tensor, int, int, int], Tensor]
    ) -> Tensor | None:
        """What kernels noted, from the first call on; None where it cannot be kept.

        Args:
            queries, keys: of a call on a GPU.
            tile_note: the op that makes it.
        """
        if not may_keep(self.tensor.device):
            return None
        found = self._notes.get((queries, keys))
        if found is None:
            mask = self.tensor[(None,) * (4 - self.tensor.dim())]
            with torch.inference_mode(False):  # else no later call could save it for gradients
                found = self._notes[queries, keys] = tile_note(mask, self.block, queries, keys)
        return found

    def __repr__(self) -> str:
        return f"TileMask({tuple(self.tensor.shape)}, block={self.block})"


def _check(mask: Tensor, name: str, least: int, expected: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = checks.kind(mask)
        raise TypeError(f"{name}: expected a bool tensor, True = excluded, got {kind}")
    checks.check_layout(name, mask)
    checks.check_least_rank(name, mask, least, expected)
