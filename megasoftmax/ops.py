"""The ops torch.ops.megasoftmax.*: schemas, and all their implementations but CUDA's.

The compiled part adds those when it is loaded, for the first CUDA tensor (see `_extension`).
Arguments and results are explained in `reference`, whose functions are the other implementations.
The namespace is the name of the package: a copy that is imported under another name has ops of its
own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasoftmax import _extension, reference

NAMESPACE = __package__
_library = torch.library.Library(NAMESPACE, "DEF")
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
_library.define(
    "softmax_columns_forward(Tensor scores, float scale, ScalarType dtype, bool return_lse) "
    "-> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "softmax_columns_backward(Tensor gradient, Tensor probabilities, Tensor? lse_gradient, "
    "float scale, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_ops = getattr(torch.ops, __package__)
_forward = _ops.softmax_forward.default
_backward = _ops.softmax_backward.default
_columns_forward = _ops.softmax_columns_forward.default
_columns_backward = _ops.softmax_columns_backward.default


def implement(library: torch.library.Library, op: Any, function: Callable[..., Any]) -> None:
    """Lets a function compute an op on CPUs, and on GPUs where no kernels can be loaded.

    A program that torch.export saved may call an op in a process where no public function has
    loaded the kernels: then this does. Once loaded, they come before this.
    """

    def without_kernels(*args: Any) -> Any:
        if args[0].is_cuda and _extension.load().available:
            return op(*args)
        return function(*args)

    library.impl(op, without_kernels, "CompositeExplicitAutograd")


def below_autograd(op: Callable[..., Any], *args: Any) -> Any:
    """The op without its autograd, which would cost a detour through Python."""
    if torch.compiler.is_compiling():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


# Rows: softmax over the last dimension


def softmax_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """The op without its autograd."""
    return below_autograd(_forward, *args)


def softmax_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The op without its autograd."""
    return below_autograd(_backward, *args)


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


implement(_library, _forward, reference.softmax_forward)
torch.library.register_fake(_forward, _fake_forward, lib=_library)
torch.library.register_vmap(_forward, _batch_forward, lib=_library)
torch.library.register_autograd(
    _forward, _gradients, setup_context=reference.save_for_gradients, lib=_library
)

implement(_library, _backward, reference.softmax_backward)
torch.library.register_fake(_backward, _fake_backward, lib=_library)
torch.library.register_vmap(_backward, _batch_backward, lib=_library)
torch.library.register_autograd(
    _backward,
    reference.double_gradients,
    setup_context=reference.save_for_double_gradients,
    lib=_library,
)


# Columns: softmax over a dimension that others follow. With the signatures of rows, of which they
# take what the ops know, and a further leading dimension under vmap, they share all that rows have.


def _forward_by(op: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor]:
    given = reference.ForwardSlots(*args)
    shape = given.scores.shape
    probabilities, lse = op(
        given.scores.contiguous().flatten(0, -3), given.scale, given.dtype, given.return_lse
    )
    if len(shape) > 3:
        probabilities = probabilities.view(shape)
        lse = lse.view(*shape[:-2], shape[-1]) if given.return_lse else lse
    return probabilities, lse


def _backward_by(op: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = reference.BackwardSlots(*args)
    shape, lse_gradient = given.probabilities.shape, given.lse_gradient
    d_scores = op(
        given.gradient.contiguous().flatten(0, -3),
        given.probabilities.contiguous().flatten(0, -3),
        None if lse_gradient is None else lse_gradient.contiguous().flatten(0, -2),
        given.scale,
        given.dtype,
    )
    if len(shape) > 3:
        d_scores = d_scores.view(shape)
    return d_scores, d_scores.new_empty(0), d_scores.new_empty(0)


def softmax_columns_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """The op without its autograd, for scores [..., outer, length, inner] of any strides."""
    return below_autograd(_forward_by, _columns_forward, *args)


def softmax_columns_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The op without its autograd, for tensors of any strides."""
    return below_autograd(_backward_by, _columns_backward, *args)


COLUMN_HALVES = reference.Halves(softmax_columns_forward, softmax_columns_backward, dim=-2)


def _forward_slots(scores: Any, scale: Any, dtype: Any, return_lse: Any) -> reference.ForwardSlots:
    return reference.ForwardSlots(scores, scale, dtype=dtype, return_lse=return_lse)


def _backward_slots(
    gradient: Any, probabilities: Any, lse_gradient: Any, scale: Any, dtype: Any
) -> reference.BackwardSlots:
    return reference.BackwardSlots(gradient, probabilities, lse_gradient, scale=scale, dtype=dtype)


def _fake_columns_forward(*args: Any) -> tuple[Tensor, Tensor]:
    scores, _, dtype, return_lse = args
    outer, _, inner = scores.shape
    lse_dtype = reference.accumulation_dtype(scores.dtype)
    return (
        scores.new_empty(scores.shape, dtype=dtype),
        scores.new_empty((outer, inner) if return_lse else (0,), dtype=lse_dtype),
    )


def _fake_columns_backward(*args: Any) -> Tensor:
    _, probabilities, _, _, dtype = args
    return probabilities.new_empty(probabilities.shape, dtype=dtype)


def _save_columns(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    reference.save_for_gradients(ctx, _forward_slots(*inputs), output)


def _columns_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    d_scores, *_ = reference.gradients(ctx, partial(_backward_by, _columns_backward), *grads)
    return d_scores, None, None, None


def _save_columns_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    reference.save_for_double_gradients(ctx, _backward_slots(*inputs), (output,))


def _columns_double_gradients(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, ...]:
    found = reference.double_gradients(ctx, cotangent, None, None, dim=-2)
    return found.gradient, found.probabilities, found.lse_gradient, None, None


def _batch_columns_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    forward = partial(_forward_by, _columns_forward)
    return reference.batch_forward(forward, info, _forward_slots(*in_dims), *_forward_slots(*args))


def _batch_columns_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    backward = partial(_backward_by, _columns_backward)
    outputs, dims = reference.batch_backward(
        backward, info, _backward_slots(*in_dims), *_backward_slots(*args)
    )
    return outputs[0], dims[0]


implement(_library, _columns_forward, reference.softmax_columns_forward)
torch.library.register_fake(_columns_forward, _fake_columns_forward, lib=_library)
torch.library.register_vmap(_columns_forward, _batch_columns_forward, lib=_library)
torch.library.register_autograd(
    _columns_forward, _columns_gradients, setup_context=_save_columns, lib=_library
)

implement(_library, _columns_backward, reference.softmax_columns_backward)
torch.library.register_fake(_columns_backward, _fake_columns_backward, lib=_library)
torch.library.register_vmap(_columns_backward, _batch_columns_backward, lib=_library)
torch.library.register_autograd(
    _columns_backward,
    _columns_double_gradients,
    setup_context=_save_columns_again,
    lib=_library,
)
