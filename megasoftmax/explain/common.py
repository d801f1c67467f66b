"""What explanations share: the plans, and the pairs that causality and windows leave."""

import ctypes
import functools
from typing import Any

from megasoftmax.build import library

Window = tuple[int, int]


@functools.cache
def plans() -> ctypes.CDLL:
    """`library.plans`, asked once."""
    return library.plans()


def integers(*names: str) -> list[tuple[str, Any]]:
    """Members of a record that C++ shares, int64 each."""
    return [(name, ctypes.c_int64) for name in names]


def window_of(causal: bool, window: Window | None) -> Window:
    """The sides (left, right) of both together; -1: no limit."""
    left, right = window or (-1, -1)
    return left, 0 if causal else right


def visible_entries(limits: Window, queries: int, columns: int) -> int:
    """How many scores of a head are visible, over all its queries."""
    left, right = limits
    offset = columns - queries
    ends = queries * columns
    if right >= 0:
        ends = _sum_of_clamped(offset + right + 1, queries, columns)
    begins = _sum_of_clamped(offset - left, queries, columns) if left >= 0 else 0
    return max(ends - begins, 0)


def _sum_of_clamped(first: int, count: int, most: int) -> int:
    """The sum of `count` integers from `first` on, each clamped to 0 ... `most`."""

    def sum_below(end: int) -> int:  # from 0 on
        rising = max(min(end, most), 0)
        return rising * (rising - 1) // 2 + max(end - rising, 0) * most

    return sum_below(first + count) - sum_below(first)
