"""What the mask functions of transformers let a query see, as ranges of keys.

transformers describes a mask by a function (batch, head, query, key) -> visible, put together from
few pieces: causality, windows, chunks and packed sequences. A piece is recognised by its code, and
what it was made with is read from its closure. Positions count all tokens, also those that a cache
has forgotten.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

import megasoftmax
from megasoftmax.options import Ranges, Window


class Rule(NamedTuple):
    """A query sees the keys that all of these let it see; None limits nothing."""

    left: int | None = None
    """The largest query - key."""
    right: int | None = None
    """The largest key - query: 0 for causality."""
    chunk: tuple[int, Tensor] | None = None
    """Tokens of a chunk; the position of the first chunk, integers [batch or 1]."""
    sequence: Tensor | None = None
    """Packed sequences: not decreasing, integers [batch, tokens]; equal: of one sequence."""
    positions: Tensor | None = None
    """Within the sequences, integers [batch, tokens]. None: those in the whole row."""

    @property
    def window(self) -> Window | None:
        """left and right as `megasoftmax.attention` takes them beside `causal`."""
        if self.left is None and self.right in (None, 0):
            return None
        left, right = (-1 if limit is None else limit for limit in (self.left, self.right))
        return left, right

    def visible(
        self, queries: int, keys: int, q_offset: Any, kv_offset: int, aligned: bool, device: Any
    ) -> Ranges | None:
        """Ranges of keys, int32 [batch or 1, 1, queries], made on the device.

        Args:
            queries, keys: of the call.
            q_offset, kv_offset: positions of the first of each; q_offset may be a tensor.
            aligned: the last query stands at the last key. Then causal and window express left and
                right, and the ranges leave them out.
        """
        left, right = (None, None) if aligned else (self.left, self.right)
        if all(piece is None for piece in (left, right, self.chunk, self.sequence)):
            return None
        position = torch.arange(queries, device=device) + q_offset
        firsts, ends = [], []
        if left is not None:
            firsts.append((position - left).view(1, 1, queries))
        if right is not None:
            ends.append((position + right + 1).view(1, 1, queries))
        if self.chunk is not None:
            size, begin = self.chunk
            counted = position if self.positions is None else self.positions
            first = position - (counted - begin.view(-1, 1)) % size
            firsts.append(first[:, None])
            ends.append(first[:, None] + size)
        if self.sequence is not None:
            first, end = megasoftmax.ranges.segments(self.sequence)
            firsts.append(first)
            ends.append(end)
        return (
            _as_keys(firsts, torch.maximum, kv_offset, keys),
            _as_keys(ends, torch.minimum, kv_offset, keys),
        )


def rule_of(function: Callable[..., Any]) -> Rule | None:
    """What a mask function says; None: it is not made of the pieces known here."""
    parts = _parts(function)
    if parts is None:
        return None
    rule = Rule()
    for name, value in parts:
        found = getattr(rule, name)
        if found is None:
            rule = rule._replace(**{name: value})
        elif name in ("left", "right"):
            rule = rule._replace(**{name: min(found, value)})
        else:
            return None  # two kinds of chunks or sequences
    # Only within a sequence do positions count as those in the row do.
    return None if rule.positions is not None and rule.sequence is None else rule


def _as_keys(
    limits: list[Tensor], tighter: Callable[[Tensor, Tensor], Tensor], kv_offset: int, keys: int
) -> Tensor | None:
    """The tightest of the limits, counted from the first key."""
    if not limits:
        return None
    return (functools.reduce(tighter, limits) - kv_offset).clamp(0, keys).to(torch.int32)


_Parts = list[tuple[str, Any]]


def _parts(function: Any) -> _Parts | None:
    """Fields of Rule, one after the other; None: not all is known."""
    read = _READ.get(getattr(function, "__code__", None))
    if read is None:
        return None
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return read(**{name: cell.cell_contents for name, cell in zip(names, cells, strict=True)})


def _of_all(mask_functions: tuple[Any, ...]) -> _Parts | None:
    """The fields of all mask functions that and_masks combines."""
    every: _Parts = []
    for function in mask_functions:
        parts = _parts(function)
        if parts is None:
            return None
        every += parts
    return every


def _of_remapped(mask_function: Any, position_ids: Tensor) -> _Parts | None:
    """Within a packed sequence positions grow by one: distances are those in the row."""
    parts = _parts(mask_function)
    return None if parts is None else [*parts, ("positions", position_ids)]


def _of_window(sliding_window: Any) -> _Parts | None:
    if not isinstance(sliding_window, int) or sliding_window < 1:
        return None
    return [("left", sliding_window - 1)]


def _of_both_sides(sliding_window: Any) -> _Parts | None:
    if not isinstance(sliding_window, int) or sliding_window < 0:
        return None
    return [("left", sliding_window), ("right", sliding_window)]


def _readers() -> dict[Any, Callable[..., _Parts | None]]:
    """By the code of what transformers would make."""
    causal = masking_utils.causal_mask_function
    some = torch.empty(0, dtype=torch.int64, device="cpu")
    made: dict[Any, Callable[..., _Parts | None]] = {
        causal: lambda: [("right", 0)],
        masking_utils.bidirectional_mask_function: list,
        masking_utils.and_masks(causal): _of_all,
        masking_utils.sliding_window_overlay(1): _of_window,
        masking_utils.sliding_window_bidirectional_overlay(1): _of_both_sides,
        masking_utils.chunked_overlay(1, some): lambda chunk_size, left_padding: [
            ("chunk", (chunk_size, left_padding))
        ],
        masking_utils.packed_sequence_mask_function(some): lambda packed_sequence_mask: [
            ("sequence", packed_sequence_mask)
        ],
    }
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # not in 5.17
        made[masking_utils.remap_positions_for_packed_sequence(causal, some)] = _of_remapped
    return {function.__code__: read for function, read in made.items()}


_READ = _readers()
