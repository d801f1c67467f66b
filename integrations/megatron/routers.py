"""The softmax and top-k of Megatron-core's routers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import megasoftmax

# The arguments of the routing function that softmax_topk computes.
_ROUTED = ("logits", "topk", "use_pre_softmax", "scaling_factor", "score_function", "expert_bias")
# What a report says of it.
ROUTED_WHERE = (
    "where scores are a softmax that alone chooses the experts, or sigmoids, with a bias or "
    "without; else Megatron's own, such as experts limited to groups"
)


def through_softmax_topk(original: Callable[..., Any]) -> Callable[..., Any]:
    """The routing function; it calls the original for options that softmax_topk lacks."""
    if hasattr(original, "is_megasoftmax"):
        return original
    signature = inspect.signature(original)

    @functools.wraps(original)
    def routing(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        is_plain = all(
            value is signature.parameters[name].default
            for name, value in given.items()
            if name not in _ROUTED
        )
        logits, score, bias = given["logits"], given["score_function"], given.get("expert_bias")
        is_known = score == "sigmoid" or (score == "softmax" and bias is None)
        if not is_plain or not is_known or logits.dtype == torch.float64:
            return original(*args, **kwargs)
        k, is_sigmoid = given["topk"], score == "sigmoid"
        scores, experts = megasoftmax.softmax_topk(
            logits,
            k,
            score=score,
            selection_bias=None if bias is None else bias.detach(),
            renormalize=k > 1 if is_sigmoid else not given["use_pre_softmax"],
            dtype=logits.dtype,
        )
        if given["scaling_factor"]:
            scores = scores * given["scaling_factor"]
        probabilities = torch.zeros_like(logits).scatter(1, experts, scores)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return probabilities, routing_map

    routing.is_megasoftmax = True  # type: ignore[attr-defined]
    return routing
