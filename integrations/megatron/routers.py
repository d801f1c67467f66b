"""The softmax and top-k of Megatron-core's routers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import megasoftmax

# The arguments of the routing function that softmax_topk computes.
_ROUTED = ("logits", "topk", "use_pre_softmax", "scaling_factor", "score_function")
# What a report says of it.
ROUTED_WHERE = "where scores are a softmax and they alone choose the experts; else Megatron's own"


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
        logits = given["logits"]
        if not is_plain or given["score_function"] != "softmax" or logits.dtype == torch.float64:
            return original(*args, **kwargs)
        scores, experts = megasoftmax.softmax_topk(
            logits,
            given["topk"],
            renormalize=not given["use_pre_softmax"],
            dtype=logits.dtype,
        )
        if given["scaling_factor"]:
            scores = scores * given["scaling_factor"]
        probabilities = torch.zeros_like(logits).scatter(1, experts, scores)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return probabilities, routing_map

    routing.is_megasoftmax = True  # type: ignore[attr-defined]
    return routing
