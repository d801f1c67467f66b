"""The shortest way of compiled code, which reads little, so that few guards are compared."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megasoftmax import dispatch, ops


def traced_softmax(
    scores: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype | None
) -> Tensor | None:
    """`softmax` of these alone in compiled code, as one op; None where that is not certain.

    What torch.compile reads while it traces it guards at each call of what it compiled. The way
    that checks and decides everything has 280 guards, and this one 75. The level of
    forward mode is read in place, because a function that asks for it would add 5 guards.
    """
    if (
        type(scores) is Tensor
        and not scores.requires_grad
        and dispatch.runs_fused_traced(scores.device, scores.dtype, dtype)
        and forward_ad._current_level < 0
        and (causal is False or causal is True)
        and 1 + causal <= scores.dim() <= 4
        and 0 < scores.numel() < 2**30  # far below the limits of all sizes
        and type(scale) is float
        and 1e-30 < scale < 1e30  # far within theirs
        and (mask is None or _masks(mask, scores))
    ):
        return ops.softmax.forward_alone(scores, scale, mask, causal, dtype or scores.dtype)
    return None


def _masks(mask: Tensor, scores: Tensor) -> bool:
    """Whether it is certainly a mask of these scores, without many guards."""
    if not (
        type(mask) is Tensor
        and mask.dtype == torch.bool
        and mask.device == scores.device
        and mask.dim() <= scores.dim()
    ):
        return False
    for dim in range(-mask.dim(), 0):
        if mask.size(dim) != 1 and mask.size(dim) != scores.size(dim):
            return False
    return True


def traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    causal: bool,
    dropout: float,
    *others: Any,
) -> Tensor | None:
    """The same for `attention` without dropout, and without the others. It has 310 guards."""
    for other in others:
        if other is not None:
            return None
    if not (
        type(dropout) in (int, float)
        and dropout == 0
        and forward_ad._current_level < 0
        and type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
        and not (query.requires_grad or key.requires_grad or value.requires_grad)
        and query.dim() == key.dim() == value.dim() == 4
        and query.device == key.device == value.device
        and query.dtype == key.dtype == value.dtype
        and (causal is False or causal is True)
    ):
        return None
    most = dispatch.head_dim_traced(query.device, query.dtype)
    if (
        key.size(0) == value.size(0) == query.size(0)
        and key.size(1) == value.size(1)
        and key.size(2) == value.size(2)
        and key.size(3) == query.size(3) <= most
        and value.size(3) <= most
        and 0 < query.numel() < 2**30
        and 0 < key.numel() < 2**30
        and value.numel() > 0
        and query.size(1) % key.size(1) == 0
        and (scale is None or (type(scale) is float and 1e-30 < scale < 1))
    ):
        factor = query.size(3) ** -0.5 if scale is None else scale
        return ops.attention.forward_alone(query, key, value, factor, causal)
    return None
