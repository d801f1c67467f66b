"""The types that torch.autocast gives to the factors of matrix products."""

import torch
from torch import Tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type that autocast gives a tensor for matrix products; None where it leaves it alone."""
    if not torch._C._is_any_autocast_enabled() or not isinstance(tensor, Tensor):
        return None
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which refuses "meta"
        return None
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def as_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the types that torch's scaled_dot_product_attention gives them under autocast."""
    if not torch._C._is_any_autocast_enabled():
        return query, key, value
    return one_as_autocast(query), one_as_autocast(key), one_as_autocast(value)


def one_as_autocast(tensor: Tensor) -> Tensor:
    """One tensor in that type."""
    dtype = autocast_dtype(tensor)
    return tensor if dtype is None else tensor.to(dtype)
