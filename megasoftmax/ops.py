"""The ops torch.ops.megasoftmax.*: schemas, and all their implementations but CUDA's.

The compiled part adds those when it is loaded (see `_extension`). Arguments and results are
explained in `reference`, whose functions are the CPU implementations.
"""

from typing import Any

import torch
from torch import Tensor

from megasoftmax import reference

_library = torch.library.Library("megasoftmax", "DEF")
_library.define(
    "softmax_forward(Tensor scores, float scale, Tensor? mask, Tensor? bias, bool causal, "
    "int window_left, int window_right, Tensor? sink, float? sink_value, ScalarType dtype, "
    "bool return_lse) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "softmax_backward(Tensor gradient, Tensor probabilities, Tensor? lse_gradient, Tensor? lse, "
    "float scale, Tensor? bias, bool causal, int window_left, int window_right, Tensor? sink, "
    "float? sink_value, ScalarType dtype, bool bias_gradient, bool sink_gradient) "
    "-> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_forward = torch.ops.megasoftmax.softmax_forward.default
_backward = torch.ops.megasoftmax.softmax_backward.default


def softmax_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """The op without its autograd, which would cost a detour through Python."""
    if torch.compiler.is_compiling():
        return _forward(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward(*args)


def softmax_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The op without its autograd."""
    if torch.compiler.is_compiling():
        return _backward(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(*args)


HALVES = reference.Halves(softmax_forward, softmax_backward)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    given = reference.ForwardSlots(*args)
    scores = given.scores
    lse_shape = scores.shape[:-1] if given.return_lse else (0,)
    lse_dtype = reference.accumulation_dtype(scores.dtype)
    return (
        scores.new_empty(scores.shape, dtype=given.dtype),
        scores.new_empty(lse_shape, dtype=lse_dtype),
    )


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = reference.BackwardSlots(*args)
    probabilities, bias = given.probabilities, given.bias
    shape = probabilities.shape
    row_dtype = reference.accumulation_dtype(given.dtype)
    if given.bias_gradient:
        d_bias = bias.new_empty(bias.shape)
    else:
        d_bias = probabilities.new_empty(0, dtype=row_dtype)
    return (
        probabilities.new_empty(shape, dtype=given.dtype),
        d_bias,
        probabilities.new_empty(shape[:-1] if given.sink_gradient else (0,), dtype=row_dtype),
    )


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return reference.gradients(ctx, _backward, *grads)


def _batch_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return reference.batch_forward(_forward, info, in_dims, *args)


def _batch_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return reference.batch_backward(_backward, info, in_dims, *args)


_library.impl("softmax_forward", reference.softmax_forward, "CPU")
torch.library.register_fake(_forward, _fake_forward, lib=_library)
torch.library.register_vmap(_forward, _batch_forward, lib=_library)
torch.library.register_autograd(
    _forward, _gradients, setup_context=reference.save_for_gradients, lib=_library
)

_library.impl("softmax_backward", reference.softmax_backward, "CPU")
torch.library.register_fake(_backward, _fake_backward, lib=_library)
torch.library.register_vmap(_backward, _batch_backward, lib=_library)
torch.library.register_autograd(
    _backward,
    reference.double_gradients,
    setup_context=reference.save_for_double_gradients,
    lib=_library,
)
