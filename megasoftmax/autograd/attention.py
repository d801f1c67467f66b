"""Autograd and vmap of attention, by any implementation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd import function
from megasoftmax.autograd.softmax import go_one_by_one, gradients_beside, wanted_beside
from megasoftmax.reference.attention import (
    BackwardArguments,
    ForwardArguments,
    attention_backward,
    attention_forward,
)
from megasoftmax.reference.softmax import tensors_of

REFERENCE = function.Implementation(attention_forward, attention_backward)

_COUNT = len(ForwardArguments._fields)
_TENSORS = tensors_of(attention_forward)


def save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps for `gradients` what it needs. `inputs` begin with those of `attention_forward`."""
    given = ForwardArguments(*inputs[:_COUNT])
    tensors = {name: getattr(given, name) for name in _TENSORS}
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors.values())
    ctx.given = given._replace(**dict.fromkeys(tensors))


def gradients(
    implementation: function.Implementation,
    ctx: Any,
    d_output: Tensor | None,
    d_statistics: Tensor | None,
) -> Any:
    """The gradients of the arguments of `attention_forward`.

    Of the statistics the log-sum-exp has one; the others are constants.
    """
    output, statistics, *tensors = ctx.saved_tensors
    given = ctx.given._replace(**dict(zip(_TENSORS, tensors, strict=True)))
    needs = ForwardArguments(*ctx.needs_input_grad[:_COUNT])
    wanted = wanted_beside(given, needs)
    d_query, d_key, d_value, *beside = implementation.backward(
        output.new_zeros(()).expand(output.shape) if d_output is None else d_output,
        None if d_statistics is None else d_statistics[2],
        *given[:3],
        output,
        statistics,
        *given[3:],
        *wanted,
        torch.are_deterministic_algorithms_enabled(),
    )
    return ForwardArguments(
        query=d_query if needs.query else None,
        key=d_key if needs.key else None,
        value=d_value if needs.value else None,
        **gradients_beside(given, wanted, *beside),
    )


def batch_forward(
    forward: Callable[..., tuple[Tensor, Tensor]], info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """`forward` under vmap: examples join the batches."""
    given, dims = ForwardArguments(*args), ForwardArguments(*in_dims)
    count = info.batch_size
    if go_one_by_one(given, dims):
        return function.one_by_one(forward, count, in_dims, args), (0, 0)
    output, statistics = forward(*_examples_as_batches(given, dims, count))
    return (output.unflatten(0, (count, -1)), statistics.unflatten(1, (count, -1))), (0, 1)


def batch_backward(
    backward: Callable[..., tuple[Tensor, ...]], info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """`backward` under vmap."""
    given, dims = BackwardArguments(*args), BackwardArguments(*in_dims)
    count = info.batch_size
    if go_one_by_one(given, dims):
        return function.one_by_one(backward, count, in_dims, args), (0, 0, 0, 0, 0)
    outputs = backward(*_examples_as_batches(given, dims, count))
    asked_for = (True, True, True, given.bias_gradient, given.sink_gradient)
    return (
        tuple(
            each.unflatten(0, (count, -1)) if asked else each
            for each, asked in zip(outputs, asked_for, strict=True)
        ),
        tuple(0 if asked else None for asked in asked_for),
    )


def _examples_as_batches(given: Any, dims: Any, count: int) -> Any:
    """Arguments with `count` times the batches.

    A mask that all examples share stays, and so does a range of one batch for all. Kernels make
    the note of the new mask.
    """
    broadcast = ("mask", "first", "end")

    def joined(name: str) -> Any:
        tensor, dim = getattr(given, name), getattr(dims, name)
        if tensor is None or (
            dim is None and (name == "mask" or (name in broadcast and tensor.shape[0] == 1))
        ):
            return tensor
        tensor = function.batch_first(tensor, dim, count)
        if name == "statistics":
            return tensor.movedim(1, 0).flatten(1, 2)
        if name in broadcast:
            batches = given.query.shape[1 if dims.query == 0 else 0]
            if tensor.shape[1] != batches:
                tensor = tensor.repeat(1, batches // tensor.shape[1], *(1,) * (tensor.dim() - 2))
        return tensor.flatten(0, 1)

    names = ("d_output", "d_lse", "query", "key", "value", "output", "statistics", "bias")
    changed = {name: joined(name) for name in (*names, *broadcast) if name in given._fields}
    return given._replace(**changed, note=None)


FORWARD = function.Rules(ForwardArguments._fields, save_for_gradients, gradients, batch_forward)
IN_FORWARD_MODE = function.why_only_without_kernels("attention")

# The reference's backward is function.differentiable by itself; that of the ops refuses.
call, _ = function.differentiable(
    "Attention", FORWARD, function.plain_torch_only(REFERENCE, IN_FORWARD_MODE)
)


def reference_after(output: Tensor) -> function.Implementation:
    """The reference, for one call without a log-sum-exp whose output is known.

    Statistics are (0,), because the backward pass of the reference does not read them.
    """
    results = [(output, output.new_empty(0))]
    # Taken out, because the autograd node keeps the implementation: output and node would keep each
    # other.
    return function.Implementation(lambda *args: results.pop(), attention_backward)
