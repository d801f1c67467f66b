"""Autograd and vmap of softmax of options that keep scores, such as dropout: see `keeps_scores`.

In place of the probabilities the scores are kept. With the log-sum-exp they give the probabilities
again, and the derivative of the logits. The seed gives what is dropped.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd.function import Implementation, Rules, differentiable, one_by_one
from megasoftmax.autograd.softmax import (
    IN_FORWARD_MODE,
    batch_forward,
    gradients_beside,
    wanted_beside,
    with_lse,
)
from megasoftmax.reference.dropout import dropped, kept_of_scores
from megasoftmax.reference.softmax import (
    BackwardArguments,
    DropoutBackwardArguments,
    ForwardArguments,
    as_record,
    curvature_of_scores,
    is_linear,
    probabilities_again,
    slope_of_scores,
    softmax_double_backward,
    softmax_dropout_backward,
    softmax_forward,
    softmax_tangents,
    tensors_of,
)

REFERENCE = Implementation(softmax_forward, softmax_dropout_backward)

_COUNT = len(ForwardArguments._fields)
_TENSORS = tensors_of(softmax_forward)
_BACKWARD_COUNT = len(DropoutBackwardArguments._fields)
_BACKWARD_TENSORS = tensors_of(softmax_dropout_backward)


def save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps for `gradients` what it needs. `inputs` begin with those of `softmax_forward`."""
    given = ForwardArguments(*inputs[:_COUNT])
    ctx.set_materialize_grads(False)
    if any(ctx.needs_input_grad) and not given.return_lse:
        raise ValueError("return_lse: expected True where scores are kept, got False")
    ctx.save_for_backward(output[1], *(getattr(given, name) for name in _TENSORS))
    ctx.given = given._replace(**dict.fromkeys(_TENSORS))


def gradients(
    implementation: Implementation, ctx: Any, gradient: Tensor | None, lse_gradient: Tensor | None
) -> Any:
    """The gradients of the arguments of `softmax_forward`."""
    lse, *tensors = ctx.saved_tensors
    given = ctx.given._replace(**dict(zip(_TENSORS, tensors, strict=True)))
    needs = ForwardArguments(*ctx.needs_input_grad[:_COUNT])
    scores, wanted = given.scores, wanted_beside(given, needs)
    if gradient is None:
        gradient = scores.new_zeros((), dtype=given.dtype).expand(scores.shape)
    elif gradient.dim() > 4:  # kernels see at most 4 dimensions; leading ones must merge
        gradient = gradient.contiguous()
    d_scores, *beside = implementation.backward(
        *(gradient, scores, lse_gradient, lse),
        *given[1:12],  # what is between scores and dtype
        *(scores.dtype, *wanted, given.dropout, given.seed),
    )
    return ForwardArguments(scores=d_scores, **gradients_beside(given, wanted, *beside))


def save_for_double_gradients(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    """Keeps for `double_gradients` what it needs: all of the inputs."""
    given = DropoutBackwardArguments(*inputs[:_BACKWARD_COUNT])
    ctx.save_for_backward(*(getattr(given, name) for name in _BACKWARD_TENSORS))
    ctx.given = given._replace(**dict.fromkeys(_BACKWARD_TENSORS))


def double_gradients(implementation: Implementation, ctx: Any, *cotangents: Tensor) -> Any:
    """The gradients of the arguments of `softmax_dropout_backward`, from those of its results.

    That is `softmax_backward` of a gradient that is dropped and of probabilities p, where
    p = exp(z - lse). The gradient of z becomes that of the scores by `slope_of_scores`.
    """
    tensors = dict(zip(_BACKWARD_TENSORS, ctx.saved_tensors, strict=True))
    given = ctx.given._replace(**tensors)
    p = probabilities_again(given, given.lse)
    slope = slope_of_scores(given.scores, given)
    gradient = _dropped(given.gradient.to(p.dtype), given)
    scores_cotangent, *others = cotangents
    if scores_cotangent is not None:
        scores_cotangent = slope * scores_cotangent.to(p.dtype)
    of_z = as_record(BackwardArguments, given, gradient=gradient, probabilities=p, scale=1.0)
    found = softmax_double_backward(of_z, scores_cotangent, *others)
    d_z = torch.where(p == 0, 0, p * found.probabilities)
    d_scores = slope * d_z
    if not is_linear(given) and cotangents[0] is not None:
        d = (gradient.masked_fill(p == 0, 0) * p).sum(-1, keepdim=True)
        if given.lse_gradient is not None:
            d = d - given.lse_gradient.unsqueeze(-1)
        bent = cotangents[0].to(p.dtype) * curvature_of_scores(given.scores, given)
        d_scores = d_scores + torch.where(p == 0, 0, p * (gradient - d) * bent)
    d_lse = -d_z.sum(-1) if found.lse is None else found.lse - d_z.sum(-1)
    d_bias = None
    if given.bias is not None:
        d_bias = d_z.sum_to_size(given.bias.shape).to(given.bias.dtype)
    return as_record(
        DropoutBackwardArguments,
        found,
        gradient=_dropped(found.gradient, given).to(given.gradient.dtype),
        scores=d_scores.to(given.scores.dtype),
        lse=d_lse,
        bias=d_bias,
    )


def _dropped(weights: Tensor, given: Any) -> Tensor:
    if given.dropout == 0:
        return weights
    return dropped(weights, kept_of_scores(given.seed, given.dropout, given.scores), given.dropout)


def batch_backward(
    backward: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[Any, tuple[int, int, int]]:
    """`backward` under vmap: each example drops what it would drop alone."""
    return one_by_one(backward, info.batch_size, in_dims, args), (0, 0, 0)


def _in_forward_mode(function: Any) -> Callable[..., Any]:
    class InForwardMode(function):
        """Its return_lse must be True."""

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            function.setup_context(ctx, inputs, output)
            given = ForwardArguments(*inputs[:-1])
            ctx.save_for_forward(output[1], *(getattr(given, name) for name in _TENSORS))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            lse, *tensors = ctx.saved_tensors
            given = ctx.given._replace(**dict(zip(_TENSORS, tensors, strict=True)))
            p = probabilities_again(given, lse)
            of_arguments = ForwardArguments(*tangents[:-1])
            if of_arguments.scores is not None:
                of_z = slope_of_scores(given.scores, given) * of_arguments.scores.to(lse.dtype)
                of_arguments = of_arguments._replace(scores=of_z)
            d_p, d_lse = softmax_tangents(of_arguments, p, lse, given._replace(scale=1.0))
            return _dropped(d_p, given).to(given.dtype), d_lse

    return with_lse(InForwardMode)


FORWARD = Rules(ForwardArguments._fields, save_for_gradients, gradients, batch_forward)
BACKWARD = Rules(
    DropoutBackwardArguments._fields, save_for_double_gradients, double_gradients, batch_backward
)

# Where something requires a gradient, return_lse must be True.
call, _ = differentiable("DroppedSoftmax", FORWARD, _in_forward_mode, BACKWARD, IN_FORWARD_MODE)
