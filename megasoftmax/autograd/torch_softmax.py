"""Softmax of scores alone on a CPU, and its K largest, by torch's own softmax.

It breaks one rule: where a probability is 0, its gradient is NaN if an incoming gradient of the row
is not finite. It should be 0. The result shows where, and the reference computes it instead.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd import topk
from megasoftmax.autograd.function import is_differentiated
from megasoftmax.autograd.softmax import REFERENCE, call_backward
from megasoftmax.reference.softmax import BackwardArguments, plain
from megasoftmax.reference.topk import select_on_cpu, without_options
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


class _SoftmaxTopk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(logits, -1)
        indices = select_on_cpu(logits, k)
        ctx.save_for_backward(logits, probabilities, indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return probabilities.gather(-1, indices), indices

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        if gradient is None:
            return None, None
        logits, probabilities, indices = ctx.saved_tensors
        dtype = logits.dtype
        create_graph = is_differentiated()
        if not (create_graph or is_traced() or is_of_many_gradients(gradient)):
            of_all = torch.zeros_like(probabilities).scatter_(-1, indices, gradient)
            d_logits = torch._softmax_backward_data(of_all, probabilities, -1, dtype)
            if math.isfinite(d_logits.sum().item()):
                return d_logits, None
        given = without_options(logits, indices.shape[-1])
        with torch.enable_grad():
            values = topk.call(topk.REFERENCE, True, *given)[0]
            (d_logits,) = torch.autograd.grad(values, logits, gradient, create_graph=create_graph)
        return d_logits, None


_apply_topk = super(torch.autograd.Function, _SoftmaxTopk).apply


def softmax_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices of `softmax_topk_forward`, in the type of the logits, differentiable.

    Args:
        logits: as scores of `softmax`; float32 or float64 if they need a gradient, because the
            probabilities of all V are kept.
        k: from 1 to V.
    """
    if logits.requires_grad and torch.is_grad_enabled():
        found: tuple[Tensor, Tensor] = _apply_topk(logits, k)
        return found
    indices = select_on_cpu(logits, k)
    probabilities = logits.softmax(-1).gather(-1, indices)
    if probabilities.dtype != logits.dtype:  # autocast to float32
        probabilities = probabilities.to(logits.dtype)
    return probabilities, indices
