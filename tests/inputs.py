"""Random tensors, and what else the tests of both families share."""

import torch
from torch import Tensor

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
