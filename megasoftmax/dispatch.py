"""Why a call cannot run fused: named constraints, each a function that returns a Reason or None."""

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megasoftmax import _extension

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_CAPABILITY = (8, 0)
MAX_INDEX = 2**31 - 1  # kernels count rows and columns in 32 bits, and address in 64

Window = tuple[int, int]


@dataclass(frozen=True)
class Reason:
    """A constraint of the fused kernels that a call does not meet."""

    constraint: str
    actual: str
    limit: str

    def __str__(self) -> str:
        return f"{self.constraint}: expected {self.limit}, got {self.actual}"


def reasons_against_fused_softmax(
    scores: Tensor,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: Window | None,
    dtype: torch.dtype | None,
) -> tuple[Reason, ...]:
    """All the reasons why these arguments, which must be valid, cannot run fused; empty: they can.

    Loads the compiled part, and builds it where it can be built, when the scores are on a GPU.
    """
    is_limited = causal or window is not None
    found = (
        _device(scores),
        _compiled_part(scores),
        _compute_capability(scores),
        _dtype("dtype of scores", scores.dtype),
        None if dtype is None else _dtype("dtype", dtype),
        _scale(scale),
        _leading_dimensions("scores", scores, scores),
        None if mask is None else _leading_dimensions("mask", mask, scores),
        None if bias is None else _leading_dimensions("bias", bias, scores),
        _rows(scores),
        _columns(scores, is_limited),
        None if bias is None else _bias_gradient(bias, scores),
    )
    return tuple(reason for reason in found if reason is not None)


def _device(scores: Tensor) -> Reason | None:
    return None if scores.is_cuda else Reason("device", str(scores.device), "a CUDA device")


def _compiled_part(scores: Tensor) -> Reason | None:
    status = _extension.load() if scores.is_cuda else _extension.status()
    return None if status.available else Reason("compiled part", f"none: {status.reason}", "one")


def _compute_capability(scores: Tensor) -> Reason | None:
    if not scores.is_cuda:
        return None
    capability = _capability_of(scores.device.index)
    if capability >= MIN_CAPABILITY:
        return None
    return Reason("compute capability", _dotted(capability), f"at least {_dotted(MIN_CAPABILITY)}")


@torch.compiler.assume_constant_result
@functools.cache
def _capability_of(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _dtype(name: str, dtype: torch.dtype) -> Reason | None:
    return None if dtype in DTYPES else Reason(name, str(dtype), "float16, bfloat16 or float32")


def _scale(scale: float) -> Reason | None:
    """Kernels compare raw scores and apply the scale to their differences."""
    return None if scale != 0 else Reason("scale", "0", "a number other than 0")


def _leading_dimensions(name: str, tensor: Tensor, scores: Tensor) -> Reason | None:
    """Kernels see [batches, heads, queries, columns]: what precedes the heads has one stride."""
    if scores.dim() <= 4 or scores.numel() == 0 or _has_one_stride(tensor, scores):
        return None
    actual = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
    return Reason(f"leading dimensions of {name}", actual, "a view that merges all but the last 3")


def _has_one_stride(tensor: Tensor, scores: Tensor) -> bool:
    missing = scores.dim() - tensor.dim()
    sizes = scores.shape[:-3]
    strides = [
        0 if i < missing or tensor.shape[i - missing] == 1 else tensor.stride(i - missing)
        for i in range(len(sizes))
    ]
    steps = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(steps))


def _rows(scores: Tensor) -> Reason | None:
    outer, queries = _count(scores.shape[:-2]), scores.shape[-2] if scores.dim() > 1 else 1
    if outer <= MAX_INDEX and queries <= MAX_INDEX:
        return None
    return Reason("rows", f"{outer} x {queries}", f"at most {MAX_INDEX} x {MAX_INDEX}")


def _columns(scores: Tensor, is_limited: bool) -> Reason | None:
    """With a window its borders count too: up to queries before the row and columns after it."""
    columns = scores.shape[-1]
    borders = columns + scores.shape[-2] if is_limited else 0
    if columns + borders <= MAX_INDEX:
        return None
    return Reason("columns", str(columns), f"at most {MAX_INDEX - borders}")


def _count(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _bias_gradient(bias: Tensor, scores: Tensor) -> Reason | None:
    """Kernels sum the gradient over batches, heads and queries, but not along a row."""
    if not bias.requires_grad or not torch.is_grad_enabled():
        return None
    columns = bias.shape[-1] if bias.dim() > 0 else 1
    if columns == scores.shape[-1]:
        return None
    return Reason("keys of a bias that needs a gradient", str(columns), str(scores.shape[-1]))
