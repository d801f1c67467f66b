"""The ops of softmax over an earlier dimension, torch.ops.megasoftmax.softmax_columns_*.

With the signatures of the ops over the last dimension, and a further leading dimension under vmap,
they share the autograd and the vmap of those.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from megasoftmax.autograd import softmax
from megasoftmax.autograd.function import Implementation, Rules
from megasoftmax.ops.registration import (
    below_autograd,
    define_differentiable,
    implement,
    schema_of,
    trace,
)
from megasoftmax.reference.softmax import (
    BackwardArguments,
    ForwardArguments,
    accumulation_dtype,
    softmax_columns_backward,
    softmax_columns_forward,
)

_forward = define_differentiable(schema_of(softmax_columns_forward, "(Tensor, Tensor)"))
_backward = define_differentiable(schema_of(softmax_columns_backward, "Tensor"))


def _with_one_outer_dimension(tensor: Tensor, inner: int) -> Tensor:
    """Contiguous, its last `inner` dimensions as they are. (Autograd's vmap knows no flatten.)"""
    outer = math.prod(tensor.shape[:-inner])
    return tensor.contiguous().view(outer, *tensor.shape[-inner:])


def _forward_by(op: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor]:
    given = ForwardArguments(*args)
    shape = given.scores.shape
    scores = _with_one_outer_dimension(given.scores, 2)
    probabilities, lse = op(scores, given.scale, given.dtype, given.return_lse)
    if len(shape) > 3:
        probabilities = probabilities.view(shape)
        lse = lse.view(*shape[:-2], shape[-1]) if given.return_lse else lse
    return probabilities, lse


def _backward_by(op: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = BackwardArguments(*args)
    shape, lse_gradient = given.probabilities.shape, given.lse_gradient
    d_scores = op(
        _with_one_outer_dimension(given.gradient, 2),
        _with_one_outer_dimension(given.probabilities, 2),
        None if lse_gradient is None else _with_one_outer_dimension(lse_gradient, 1),
        given.scale,
        given.dtype,
    )
    if len(shape) > 3:
        d_scores = d_scores.view(shape)
    return d_scores, d_scores.new_empty(0), d_scores.new_empty(0)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    scores, _, dtype, return_lse = args
    outer, _, inner = scores.shape
    lse_dtype = accumulation_dtype(scores.dtype)
    return (
        scores.new_empty(scores.shape, dtype=dtype),
        scores.new_empty((outer, inner) if return_lse else (0,), dtype=lse_dtype),
    )


def _fake_backward(*args: Any) -> Tensor:
    _, probabilities, _, _, dtype = args
    return probabilities.new_empty(probabilities.shape, dtype=dtype)


# Below autograd, for scores [..., outer, length, inner] of any strides.
IMPLEMENTATION = Implementation(
    partial(_forward_by, below_autograd(_forward)),
    partial(_backward_by, below_autograd(_backward)),
    dim=-2,
)


# The arguments of the ops are some of those over the last dimension


def _forward_arguments(scores: Any, scale: Any, dtype: Any, return_lse: Any) -> Any:
    return ForwardArguments(scores, scale, dtype=dtype, return_lse=return_lse)


def _backward_arguments(
    gradient: Any, probabilities: Any, lse_gradient: Any, scale: Any, dtype: Any
) -> Any:
    return BackwardArguments(gradient, probabilities, lse_gradient, scale=scale, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    softmax.save_for_gradients(ctx, _forward_arguments(*inputs), output)


def _gradients(implementation: Implementation, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    return softmax.gradients(implementation, ctx, *grads).scores, None, None, None


def _batch_forward(op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    forward = partial(_forward_by, op)
    dims = _forward_arguments(*in_dims)
    return softmax.batch_forward(forward, info, dims, *_forward_arguments(*args))


def _save_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    softmax.save_for_double_gradients(ctx, _backward_arguments(*inputs), (output,))


def _double_gradients(
    implementation: Implementation, ctx: Any, cotangent: Tensor | None
) -> tuple[Any, ...]:
    found = softmax.double_gradients(implementation, ctx, cotangent, None, None)
    return found.gradient, found.probabilities, found.lse_gradient, None, None


def _batch_backward(op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    backward = partial(_backward_by, op)
    dims = _backward_arguments(*in_dims)
    outputs, out_dims = softmax.batch_backward(backward, info, dims, *_backward_arguments(*args))
    return outputs[0], out_dims[0]


_traced = Implementation(partial(_forward_by, _forward), partial(_backward_by, _backward), dim=-2)
_FORWARD = Rules(("scores", "scale", "dtype", "return_lse"), _save, _gradients, _batch_forward)
_BACKWARD = Rules(
    ("gradient", "probabilities", "lse_gradient", "scale", "dtype"),
    _save_again,
    _double_gradients,
    _batch_backward,
)
implement(_forward, softmax_columns_forward)
trace(_forward, _fake_forward, _FORWARD, _traced)
implement(_backward, softmax_columns_backward)
trace(_backward, _fake_backward, _BACKWARD, _traced)
