"""The semantics of megasoftmax in plain torch: the oracle of every test and the fallback of every op.

    z = scale * scores + bias                       in float32 (float64 for float64 scores)
    p = exp(z - max z) / (sum exp(z - max z) + exp(sink - max z)),   excluded entries exactly 0

`softmax_forward` and `softmax_backward` are the two halves that the kernels compute as well, as pure
functions; `softmax` joins them into one differentiable function.
"""

from typing import Any

import torch
from torch import Tensor

Window = tuple[int, int]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums and exponentials are computed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def excluded_by_window(
    queries: int, keys: int, causal: bool, window: Window | None, device: torch.device
) -> Tensor | None:
    """Bool [queries, keys], True = excluded by causality or window; None when neither is given.

    Query i and key j meet on the bottom-right aligned diagonal j = i + keys - queries.
    """
    left, right = window if window is not None else (-1, -1)
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return None
    query = torch.arange(queries, device=device).unsqueeze(-1)
    distance = torch.arange(keys, device=device) - query - (keys - queries)
    if left < 0:
        return distance > right
    if right < 0:
        return distance < -left
    return (distance > right) | (distance < -left)


def excluded_entries(
    scores: Tensor, mask: Tensor | None, causal: bool, window: Window | None
) -> Tensor | None:
    """Bool, broadcastable to `scores`, True = excluded by mask, causality or window; or None."""
    queries = scores.shape[-2] if scores.dim() > 1 else 1
    outside = excluded_by_window(queries, scores.shape[-1], causal, window, scores.device)
    if mask is None or outside is None:
        return mask if outside is None else outside
    return mask | outside


def per_row(sink: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """A sink as something that broadcasts against [..., heads, queries, 1]."""
    if not isinstance(sink, Tensor):
        return sink
    return sink.to(dtype).reshape(-1, 1, 1) if sink.numel() > 1 else sink.to(dtype).reshape(())


def softmax_forward(
    scores: Tensor,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: Window | None,
    sink: Tensor | float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Probabilities [..., queries, keys] in `dtype` and the log-sum-exp [..., queries], float32."""
    compute = accumulation_dtype(scores.dtype)
    excluded = excluded_entries(scores, mask, causal, window)
    can_exclude = excluded is not None or bias is not None
    if scores.shape[-1] == 0:
        return scores.to(dtype, copy=True), _log_sum_exp_of_nothing(scores, sink, compute)

    z = scores.to(compute)
    z = z * scale if z is scores else z.mul_(scale)  # from here on z is ours to change in place
    if bias is not None:
        z += bias
    if excluded is not None:
        z.masked_fill_(excluded, -torch.inf)

    largest = z.amax(-1, keepdim=True)
    if sink is None:
        probabilities = z.softmax(-1)
        shifted_sum = None
    else:
        logit = per_row(sink, compute)
        largest = torch.maximum(largest, torch.as_tensor(logit, dtype=compute, device=z.device))
    del logit
    raise NotImplementedError
