"""The ops of attention, torch.ops.megasoftmax.attention_*, as `ops` has the others.

Arguments and results are explained in `reference_attention`, whose functions compute without
kernels. Of the results of an op the strides are known too: those of a contiguous output
[b, m, h, dv], and those that torch.empty_like gives the gradients of query, key and value.

torch.ops.megasoftmax.attention_in_blocks_* are the reference on any device. Compiled code calls
them: traced, the loops over blocks would be unrolled, which takes a compiler minutes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasoftmax import ops, reference, reference_attention

_library = torch.library.Library(__package__, "FRAGMENT")
_ops = getattr(torch.ops, __package__)


def _call_backward(op: Callable[..., Any], *args: Any) -> Any:
    """The op; where it is to be differentiated, one that refuses."""
    if reference.is_differentiated() and not torch.compiler.is_compiling():
        return _BackwardFunction.apply(op, *args)
    return ops.below_autograd(op, *args)


def _refuse(ctx: Any, *grads: Tensor | None) -> Any:
    raise NotImplementedError(
        "fused attention: expected to be differentiated once, got a second derivative; "
        "fused=False can be differentiated as often as wanted"
    )


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(reference_attention.IN_FORWARD_MODE)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


class _BackwardFunction(torch.autograd.Function):
    """What autograd makes of an op, for transforms of functions too, which ops do not support."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Callable[..., Any], *args: Any) -> Any:
        return ops.below_autograd(op, *args)

    setup_context = staticmethod(_save_nothing)
    backward = staticmethod(_refuse)
    jvp = staticmethod(_refuse_forward_mode)


def _backward_in_its_layout(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = reference_attention.BackwardSlots(*args)
    d_query, d_key, d_value, d_bias, d_sink = reference_attention.attention_backward(*args)
    return (
        torch.empty_like(given.query).copy_(d_query),
        torch.empty_like(given.key).copy_(d_key),
        torch.empty_like(given.value).copy_(d_value),
        d_bias.contiguous(),
        d_sink.contiguous(),
    )


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    given = reference_attention.ForwardSlots(*args)
    query = given.query
    batches, heads, queries, _ = query.shape
    output = query.new_empty((batches, queries, heads, given.value.shape[-1]))
    statistics_dtype = reference.accumulation_dtype(query.dtype)
    return (
        output.transpose(1, 2),
        query.new_empty((3, batches, heads, queries), dtype=statistics_dtype),
    )


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = reference_attention.BackwardSlots(*args)
    query, bias = given.query, given.bias
    nothing = query.new_empty(0, dtype=reference.accumulation_dtype(query.dtype))
    return (
        torch.empty_like(query),
        torch.empty_like(given.key),
        torch.empty_like(given.value),
        bias.new_empty(bias.shape) if given.bias_gradient else nothing,
        nothing.new_empty(query.shape[:-1]) if given.sink_gradient else nothing.new_empty(0),
    )


def _defined(name: str, *, has_kernels: bool) -> reference_attention.Halves:
    """Defines a pair of ops, which the reference computes where there are no kernels."""
    _library.define(
        f"{name}_forward(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? mask, "
        "float scale, bool causal, int window_left, int window_right, Tensor? sink, "
        "float? sink_value, bool relative) -> (Tensor output, Tensor statistics)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    _library.define(
        f"{name}_backward(Tensor d_output, Tensor? d_lse, Tensor query, Tensor key, Tensor value, "
        "Tensor output, Tensor statistics, Tensor? bias, Tensor? mask, float scale, bool causal, "
        "int window_left, int window_right, Tensor? sink, float? sink_value, bool relative, "
        "bool bias_gradient, bool sink_gradient, bool deterministic) -> (Tensor d_query, "
        "Tensor d_key, Tensor d_value, Tensor d_bias, Tensor d_sink)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    forward = getattr(_ops, f"{name}_forward").default
    backward = getattr(_ops, f"{name}_backward").default

    def gradients(ctx: Any, *grads: Tensor | None) -> Any:
        return reference_attention.gradients(ctx, backward, *grads)

    functions: dict[Any, Callable[..., Any]] = {
        forward: reference_attention.attention_forward,
        backward: _backward_in_its_layout,
    }
    for op, function in functions.items():
        if has_kernels:
            ops.implement(_library, op, function)
        else:
            _library.impl(op, function, "CompositeExplicitAutograd")

    save = reference_attention.save_for_gradients
    torch.library.register_fake(forward, _fake_forward, lib=_library)
    torch.library.register_vmap(
        forward, partial(reference_attention.batch_forward, forward), lib=_library
    )
    torch.library.register_autograd(forward, gradients, setup_context=save, lib=_library)

    torch.library.register_fake(backward, _fake_backward, lib=_library)
    torch.library.register_vmap(
        backward, partial(reference_attention.batch_backward, backward), lib=_library
    )
    torch.library.register_autograd(backward, _refuse, setup_context=_save_nothing, lib=_library)
    return reference_attention.Halves(
        partial(ops.below_autograd, forward), partial(_call_backward, backward)
    )


HALVES = _defined("attention", has_kernels=True)
HALVES_IN_BLOCKS = _defined("attention_in_blocks", has_kernels=False)
