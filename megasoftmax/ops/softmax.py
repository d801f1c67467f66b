"""The ops of softmax over the last dimension, torch.ops.megasoftmax.softmax_*."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd import dropout, softmax
from megasoftmax.autograd.function import Implementation, Rules
from megasoftmax.ops.registration import (
    below_autograd,
    define,
    define_differentiable,
    fake,
    implement,
    schema_of,
    trace,
)
from megasoftmax.reference.softmax import (
    BackwardArguments,
    DropoutBackwardArguments,
    ForwardArguments,
    accumulation_dtype,
    as_record,
    keeps_scores,
    plain,
    softmax_backward,
    softmax_dropout_backward,
    softmax_forward,
)

_THREE = "(Tensor, Tensor, Tensor)"
_forward = define_differentiable(schema_of(softmax_forward, "(Tensor, Tensor)"))
# Where only probabilities are wanted, of few arguments: each argument and each result costs the
# host. csrc/host calls it, below autograd, and compiled code that needs no gradient.
forward_alone = define(
    "softmax_forward.alone(Tensor scores, float scale, Tensor? mask, bool causal, "
    "ScalarType dtype) -> Tensor",
)
_backward = define_differentiable(schema_of(softmax_backward, _THREE))
_dropout_backward = define_differentiable(schema_of(softmax_dropout_backward, _THREE))

# Below autograd.
IMPLEMENTATION = Implementation(below_autograd(_forward), below_autograd(_backward))
FROM_SCORES = Implementation(below_autograd(_forward), below_autograd(_dropout_backward))


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    given = ForwardArguments(*args)
    scores = given.scores
    lse_shape = scores.shape[:-1] if given.return_lse else (0,)
    lse_dtype = accumulation_dtype(scores.dtype)
    return (
        scores.new_empty(scores.shape, dtype=given.dtype),
        scores.new_empty(lse_shape, dtype=lse_dtype),
    )


def _alone(
    forward: Callable[..., tuple[Tensor, Tensor]],
    scores: Tensor,
    scale: float,
    mask: Tensor | None,
    causal: bool,
    dtype: torch.dtype,
) -> Tensor:
    options = {"scale": scale, "mask": mask, "causal": causal, "dtype": dtype}
    return forward(*plain(ForwardArguments, scores=scores, **options))[0]


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = BackwardArguments(*args)
    probabilities, bias = given.probabilities, given.bias
    shape = probabilities.shape
    row_dtype = accumulation_dtype(given.dtype)
    if given.bias_gradient:
        d_bias = bias.new_empty(bias.shape)
    else:
        d_bias = probabilities.new_empty(0, dtype=row_dtype)
    return (
        probabilities.new_empty(shape, dtype=given.dtype),
        d_bias,
        probabilities.new_empty(shape[:-1] if given.sink_gradient else (0,), dtype=row_dtype),
    )


def _fake_dropout_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = DropoutBackwardArguments(*args)
    return _fake_backward(*as_record(BackwardArguments, given, probabilities=given.scores))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = ForwardArguments(*inputs)
    ctx.keeps_scores = keeps_scores(given)
    (dropout if ctx.keeps_scores else softmax).save_for_gradients(ctx, inputs, output)


def _gradients(implementation: Implementation, ctx: Any, *grads: Tensor | None) -> Any:
    if ctx.keeps_scores:
        return dropout.gradients(_traced_from_scores, ctx, *grads)
    return softmax.gradients(implementation, ctx, *grads)


_traced = Implementation(_forward, _backward)
_traced_from_scores = Implementation(_forward, _dropout_backward)
_FORWARD = Rules(ForwardArguments._fields, _save, _gradients, softmax.batch_forward)
implement(_forward, softmax_forward)
trace(_forward, _fake_forward, _FORWARD, _traced)
implement(forward_alone, partial(_alone, softmax_forward))
fake(forward_alone, partial(_alone, _fake_forward))
implement(_backward, softmax_backward)
trace(_backward, _fake_backward, softmax.BACKWARD, _traced)
implement(_dropout_backward, softmax_dropout_backward)
trace(_dropout_backward, _fake_dropout_backward, dropout.BACKWARD, _traced_from_scores)
