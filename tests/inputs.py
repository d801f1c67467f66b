"""Random tensors, and what else the tests of both families share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import megasoftmax

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32]


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def coin(*shape: int, device: str, odds: float = 0.3, seed: int = 1) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(shape, generator=generator, device=device) < odds


def bits_equal(a: Tensor, b: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(integer), b.contiguous().view(integer)
    )


# Attention


def attention_on(device: str, dtype: torch.dtype) -> Callable[..., Any]:
    fused = True if device == "cuda" and dtype in HALVES else None
    return functools.partial(megasoftmax.attention, fused=fused)


def dtypes_on(device: str) -> list[torch.dtype]:
    return HALVES if device == "cuda" else [torch.float32, torch.bfloat16]


def tensors(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (5, 13),
    dims: tuple[int, int] = (8, 8),
) -> tuple[Tensor, Tensor, Tensor]:
    (queries, keys), (all_heads, key_heads) = lengths, heads
    return (
        normal(batch, all_heads, queries, dims[0], device=device, dtype=dtype, seed=1),
        normal(batch, key_heads, keys, dims[0], device=device, dtype=dtype, seed=2),
        normal(batch, key_heads, keys, dims[1], device=device, dtype=dtype, seed=3),
    )
