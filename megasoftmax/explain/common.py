"""What explanations share: the plans, checks, and the pairs that causality and windows leave."""

import ctypes
import functools

import torch

from megasoftmax.build import library
from megasoftmax.explain.gpu import LAUNCH_MICROSECONDS, Gpu
from megasoftmax.limits import kernel_limits
from megasoftmax.options import Window

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@functools.cache
def plans() -> ctypes.CDLL:
    """`library.plans`, asked once."""
    return library.plans()


class Moved:
    """An explanation of a call whose time is that of the bytes that it moves."""

    gpu: Gpu
    bytes_read: int
    bytes_written: int
    launches: int = 1

    def microseconds(self, bytes_per_second: float | None = None) -> float:
        """The time that the fewest bytes take, with the launches.

        Args:
            bytes_per_second: of a copy. Default: of the GPU.
        """
        moved = self.bytes_read + self.bytes_written
        moving = 1e6 * moved / (bytes_per_second or self.gpu.bytes_per_second)
        return moving + self.launches * LAUNCH_MICROSECONDS


def check_call(counts: dict[str, int], dtype: torch.dtype, limits: Window = (-1, -1)) -> None:
    """Raises a ValueError for arguments that every explanation refuses."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
    if min(limits) < -1:
        raise ValueError(f"window: expected sides of -1 (no limit) or more, got {limits}")


def check_index(largest: int) -> None:
    """Raises a ValueError for more rows or columns than kernels count."""
    most = kernel_limits().max_index
    if largest > most:
        raise ValueError(f"rows and columns: the kernels take at most {most:,} of them")


def ask(function: str, gpu: Gpu, **call: int) -> dict[str, list[str]]:
    """The named values of a plan, such as {"threads": ["256"]}. csrc/common/named.h has the form.

    A name that comes several times has several values.
    """
    ask_library = getattr(plans(), function)
    ask_library.restype = ctypes.c_char_p
    for name in ("major", "multiprocessors", "max_cluster", "shared_bytes"):
        call[name] = getattr(gpu, name)
    given = "\n".join(f"{name} {value:d}" for name, value in call.items())
    words = ask_library(given.encode()).decode().split()
    found: dict[str, list[str]] = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        found.setdefault(name, []).append(value)
    return found


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
