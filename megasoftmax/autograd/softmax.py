"""Autograd and vmap of softmax, by any implementation."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megasoftmax.autograd.function import (
    Implementation,
    Rules,
    all_aligned,
    batch_aligned,
    batch_first,
    differentiable,
    has_no_room,
    one_by_one,
)
from megasoftmax.reference.softmax import (
    BackwardArguments,
    ForwardArguments,
    softmax_backward,
    softmax_double_backward,
    softmax_forward,
    softmax_tangents,
    sum_over_rows,
    tensors_of,
)

REFERENCE = Implementation(softmax_forward, softmax_backward)

_COUNT = len(ForwardArguments._fields)
_BACKWARD_COUNT = len(BackwardArguments._fields)
_KEPT = ("gradient", "probabilities", "lse_gradient", "lse", "sink")  # for double gradients


def wanted_beside(given: Any, needs: Any) -> tuple[bool, bool]:
    """Whether bias and sink are given, and need a gradient."""
    return given.bias is not None and needs.bias, given.sink is not None and needs.sink


def gradients_beside(
    given: Any, wanted: tuple[bool, bool], d_bias: Tensor | None, d_rows: Any
) -> dict[str, Tensor | None]:
    """Those of bias and sink, by name, from what a backward function returns for them."""
    wants_bias, wants_sink = wanted
    return {
        "bias": d_bias if wants_bias else None,
        "sink": sum_over_rows(d_rows, given.sink) if wants_sink else None,
    }


def go_one_by_one(given: Any, dims: Any) -> bool:
    """Whether examples of vmap cannot be one batch: they have sinks of their own, or drop entries.

    Each drops what it would drop alone, from its own seed.
    """
    return dims.sink is not None or bool(getattr(given, "dropout", 0))


def save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps for `gradients` what it needs. `inputs` begin with those of `softmax_forward`."""
    given = ForwardArguments(*inputs[:_COUNT])
    bias, sink = given.bias, given.sink
    wants_bias, wants_sink = wanted_beside(given, ForwardArguments(*ctx.needs_input_grad[:_COUNT]))
    ctx.set_materialize_grads(False)
    if wants_sink and not given.return_lse:
        raise ValueError("return_lse: expected True where the sink requires a gradient, got False")
    probabilities, lse = output
    of_sink = (lse, sink) if wants_sink else (None, None)
    ctx.save_for_backward(probabilities, *of_sink, given.first, given.end)
    # Of the bias only shape and dtype matter: it is not kept, and may change before the backward.
    ctx.bias = (bias.shape, bias.dtype) if wants_bias else None
    limits = (given.causal, given.window_left, given.window_right)
    ctx.parameters = (given.scale, *limits, given.scores.dtype, given.return_lse)


def gradients(
    implementation: Implementation, ctx: Any, gradient: Tensor | None, lse_gradient: Tensor | None
) -> Any:
    """The gradients of the arguments of `softmax_forward`."""
    scale, causal, left, right, dtype, has_lse = ctx.parameters
    probabilities, lse, sink, first, end = ctx.saved_tensors
    if gradient is None:
        gradient = probabilities.new_zeros(()).expand(probabilities.shape)
    elif gradient.dim() > 4:  # kernels see at most 4 dimensions; leading ones must merge
        gradient = gradient.contiguous()
    bias = None
    if ctx.bias is not None:
        shape, bias_dtype = ctx.bias
        bias = probabilities.new_empty((), dtype=bias_dtype).expand(shape)
    wanted = bias is not None, sink is not None
    d_scores, *beside = implementation.backward(
        *(gradient, probabilities, lse_gradient if has_lse else None, lse, scale, bias),
        *(causal, left, right, first, end, sink, None, dtype, *wanted),
    )
    given = ForwardArguments(sink=sink)
    return ForwardArguments(scores=d_scores, **gradients_beside(given, wanted, *beside))


def save_for_double_gradients(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    """Keeps for `double_gradients` what it needs. `inputs` begin like `softmax_backward`'s."""
    given = BackwardArguments(*inputs[:_BACKWARD_COUNT])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(getattr(given, name) for name in _KEPT))
    ctx.given = given._replace(**dict.fromkeys(tensors_of(softmax_backward)))


def double_gradients(
    implementation: Implementation,
    ctx: Any,
    scores: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
) -> Any:
    """The gradients of the arguments of `softmax_backward`, from those of its results."""
    given = ctx.given._replace(**dict(zip(_KEPT, ctx.saved_tensors, strict=True)))
    return softmax_double_backward(given, scores, bias, sink, dim=implementation.dim)


def batch_forward(
    forward: Callable[..., tuple[Tensor, Tensor]], info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int | None, int | None]]:
    """`forward` under vmap: batches become the first dimension of the scores."""
    given, dims = ForwardArguments(*args), ForwardArguments(*in_dims)
    if go_one_by_one(given, dims) or has_no_room(given.scores, dims.scores):
        return one_by_one(forward, info.batch_size, in_dims, args), (0, 0)
    scores = batch_first(given.scores, dims.scores, info.batch_size)
    batched = given._replace(
        scores=scores,
        **all_aligned(given, dims, ("mask", "bias"), scores.dim()),
        **all_aligned(given, dims, ("first", "end"), scores.dim() - 1),
    )
    return forward(*batched), (0, 0 if given.return_lse else None)


def batch_backward(
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    info: Any,
    in_dims: tuple[Any, ...],
    *args: Any,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int | None, ...]]:
    """`backward` under vmap."""
    given, dims = BackwardArguments(*args), BackwardArguments(*in_dims)
    if go_one_by_one(given, dims) or has_no_room(given.probabilities, dims.probabilities):
        return one_by_one(backward, info.batch_size, in_dims, args), (0, 0, 0)
    probabilities = batch_first(given.probabilities, dims.probabilities, info.batch_size)
    bias = None
    if given.bias_gradient:  # one for each example, whether or not they share the bias
        bias = batch_first(given.bias, dims.bias, info.batch_size)
    firsts = {
        name: batch_first(getattr(given, name), getattr(dims, name), info.batch_size)
        for name in ("gradient", "lse_gradient", "lse")
    }
    batched = given._replace(
        probabilities=probabilities,
        bias=batch_aligned(bias, 0, probabilities.dim()),
        **firsts | all_aligned(given, dims, ("first", "end"), probabilities.dim() - 1),
    )
    d_scores, d_bias, d_rows = backward(*batched)
    if bias is not None:
        d_bias = d_bias.reshape(bias.shape)
    asked_for = (True, given.bias_gradient, given.sink_gradient)
    return (d_scores, d_bias, d_rows), tuple(0 if asked else None for asked in asked_for)


def _in_forward_mode(function: Any) -> Callable[..., Any]:
    class InForwardMode(function):
        """Its return_lse must be True."""

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            function.setup_context(ctx, inputs, output)
            ctx.save_for_forward(*output, ForwardArguments(*inputs[:-1]).sink)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            probabilities, lse, sink = ctx.saved_tensors
            scale, *_ = ctx.parameters
            given = ForwardArguments(scale=scale, sink=sink)
            of_arguments = ForwardArguments(*tangents[:-1])
            return softmax_tangents(of_arguments, probabilities, lse, given, ctx.implementation.dim)

    return with_lse(InForwardMode)


def with_lse(function: Any) -> Callable[..., Any]:
    """What calls an autograd function that needs the log-sum-exp."""

    def call(implementation: Implementation, *args: Any) -> Any:
        given = ForwardArguments(*args)._replace(return_lse=True)
        return function.apply(*given, implementation)

    return call


FORWARD = Rules(ForwardArguments._fields, save_for_gradients, gradients, batch_forward)
BACKWARD = Rules(
    BackwardArguments._fields, save_for_double_gradients, double_gradients, batch_backward
)

IN_FORWARD_MODE = (
    "softmax: expected a backward pass that is differentiated in reverse mode, got forward mode "
    "(torch.func.jvp, jacfwd or hessian); torch.func.jacrev of jacrev is supported"
)

# Where the sink requires a gradient, return_lse must be True.
call, call_backward = differentiable(
    "Softmax", FORWARD, _in_forward_mode, BACKWARD, IN_FORWARD_MODE
)
