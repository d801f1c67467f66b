"""Softmax of scores alone on a CPU, by torch's own softmax.

It breaks one rule: where a probability is 0, its gradient is NaN if an incoming gradient of the row
is not finite. It should be 0. The result shows where, and the reference computes it instead.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd.function import is_differentiated
from megasoftmax.autograd.softmax import REFERENCE, call_backward
from megasoftmax.reference.softmax import BackwardArguments, plain
from megasoftmax.tracing import is_of_many_gradients, is_traced


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        probabilities = torch.softmax(scores, -1)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (probabilities,) = ctx.saved_tensors
        dtype = probabilities.dtype
        given = {"gradient": gradient, "probabilities": probabilities, "dtype": dtype}
        arguments = plain(BackwardArguments, **given)
        if is_differentiated():
            assert call_backward is not None
            return call_backward(REFERENCE, *arguments)[0]
        if not (is_traced() or is_of_many_gradients(gradient)):
            d_scores = torch._softmax_backward_data(gradient, probabilities, -1, dtype)
            if math.isfinite(d_scores.sum().item()):
                return d_scores
        return REFERENCE.backward(*arguments)[0]


# Function.apply without what it does for transforms of functions, which take the reference.
_apply = super(torch.autograd.Function, _Softmax).apply


def softmax(scores: Tensor) -> Tensor:
    """The probabilities of `softmax_forward`, in the type of the scores, differentiable.

    Args:
        scores: a plain tensor on a CPU, as `dispatch.is_plain_on_cpu` says.
    """
    if scores.requires_grad and torch.is_grad_enabled():
        return _apply(scores)
    return torch.softmax(scores, -1)
