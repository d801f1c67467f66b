"""One differentiable function of every implementation of an operation.

An operation is a forward and a backward, pure functions with the signatures of its reference. Its
`Rules` say once how autograd and vmap treat them, for the reference and for the ops.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megasoftmax.tracing import in_jit_trace


class Implementation(NamedTuple):
    """Who computes an operation: functions with the signatures of its reference."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    dim: int = -1
    """The dimension of the scores that softmax normalises over; the log-sum-exp lacks it."""


class Rules(NamedTuple):
    """How autograd and vmap treat the forward of an operation, or its backward."""

    arguments: tuple[str, ...]
    save: Callable[..., None]
    """save(ctx, inputs, output) keeps what `gradients` needs; inputs begin with the arguments."""
    gradients: Callable[..., tuple[Any, ...]]
    """gradients(implementation, ctx, *grads) returns the gradient of each argument."""
    batch: Callable[..., Any]
    """batch(function, info, in_dims, *args) is `function` under vmap."""


# Given an autograd function, what calls it as (implementation, *arguments) in forward mode.
InForwardMode = Callable[[Any], Callable[..., Any]]


def differentiable(
    name: str,
    forward: Rules,
    in_forward_mode: InForwardMode,
    backward: Rules | None = None,
    why_no_second: str = "",
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """What calls an implementation, differentiable, by the shortest way that serves.

    Args:
        name: begins those of the autograd functions.
        forward: the rules of the forward.
        in_forward_mode: what a call does in forward mode.
        backward: the rules of the backward. None: autograd and vmap see through it.
        why_no_second: the error of a forward-mode derivative of the backward.

    Returns:
        call(implementation, needs_gradient, *arguments), in which needs_gradient is whether
        autograd records and one of the arguments requires a gradient. And what calls the backward,
        (implementation, *arguments), None without rules for it.
    """

    def call(implementation: Implementation, needs_gradient: bool, *args: Any) -> Any:
        if is_in_forward_mode():
            return call_in_forward_mode(implementation, *args)
        if in_jit_trace():
            return implementation.forward(*args)
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return function.apply(*args, implementation)
        if needs_gradient:
            return apply_eagerly(*args, implementation)
        return implementation.forward(*args)

    def call_batched(implementation: Implementation, *args: Any) -> Any:
        return call(implementation, True, *args)

    call_backward = None
    if backward is not None:
        call_backward = _differentiable_backward(f"{name}BackwardFunction", backward, why_no_second)
    vmap = None if backward is None else call_batched
    function = _function(f"{name}Function", "forward", forward, vmap, call_backward)
    # Function.apply without the binding of the signature, which takes longer than all the rest.
    apply_eagerly = super(torch.autograd.Function, function).apply
    call_in_forward_mode = in_forward_mode(function)
    return call, call_backward


def _differentiable_backward(
    name: str, rules: Rules, why_not_in_forward_mode: str
) -> Callable[..., Any]:
    """What calls the backward of an implementation, differentiable."""

    def call(implementation: Implementation, *args: Any) -> Any:
        return (refusing if is_in_forward_mode() else function).apply(*args, implementation)

    function = _function(name, "backward", rules, call)
    refusing = _without_forward_mode(function, why_not_in_forward_mode)
    return call


def _function(
    name: str,
    which: str,
    rules: Rules,
    call_batched: Callable[..., Any] | None,
    call_backward: Callable[..., Any] | None = None,
) -> Any:
    """The autograd function `apply(*arguments, implementation)`.

    Args:
        name: of the function.
        which: the function of the implementation that it calls.
        rules: of that.
        call_batched: calls that, differentiable, as (implementation, *arguments); for vmap. None:
            vmap sees through it.
        call_backward: calls the backward likewise, where it is differentiated itself. None: the
            backward is differentiable as it is.
    """

    def forward(*args: Any) -> Any:
        return getattr(args[-1], which)(*args[:-1])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.implementation = inputs[-1]
        rules.save(ctx, inputs, output)

    def backward(ctx: Any, *grads: Any) -> Any:
        implementation = ctx.implementation
        if call_backward is not None and is_differentiated():

            def again(*args: Any) -> Any:
                return call_backward(ctx.implementation, *args)

            implementation = Implementation(implementation.forward, again, implementation.dim)
        return *rules.gradients(implementation, ctx, *grads), None

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        def function(*inputs: Any) -> Any:
            assert call_batched is not None
            return call_batched(args[-1], *inputs)

        return rules.batch(function, info, in_dims[:-1], *args[:-1])

    # torch.compile counts the parameters.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = (*rules.arguments, "implementation")
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(each, kind) for each in names]
    )
    members: dict[str, Any] = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
    }
    if call_batched is None:
        members["generate_vmap_rule"] = True
    else:
        members["vmap"] = staticmethod(vmap)
    return type(name, (torch.autograd.Function,), members)


# Derivatives in forward mode


def is_in_forward_mode() -> bool:
    """Whether they are computed, by torch.func.jvp or in a dual level; no compiled code does."""
    level: int = torch.autograd.forward_ad._current_level
    return level >= 0 and not torch.compiler.is_compiling()


def is_differentiated() -> bool:
    """Whether what a backward pass computes is to be differentiated."""
    return torch.is_grad_enabled() or is_in_forward_mode()


def why_only_without_kernels(function: str) -> str:
    """Why `function` refuses a forward-mode derivative that plain torch has."""
    return (
        f"{function}: expected no forward-mode derivative of kernels or compiled code, got "
        "torch.func.jvp or a dual level; plain torch has it, fused=False"
    )


def plain_torch_only(reference: Implementation, why_not: str) -> InForwardMode:
    """In forward mode the reference, which autograd differentiates by itself, and no other."""

    def in_forward_mode(function: Any) -> Callable[..., Any]:
        def call(implementation: Implementation, *args: Any) -> Any:
            if implementation is reference:
                return implementation.forward(*args)
            return refusing.apply(*args, implementation)

        refusing = _without_forward_mode(function, why_not)
        return call

    return in_forward_mode


def _without_forward_mode(function: Any, message: str) -> Any:
    """The autograd function for forward mode, which it refuses.

    A subclass, because torch.compile traces no autograd function with a jvp.
    """

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(message)

    return type(function.__name__, (function,), {"jvp": staticmethod(jvp)})


# vmap


def has_no_room(tensor: torch.Tensor, dim: int | None) -> bool:
    """Kernels see one dimension before the heads: an example that has it already goes alone."""
    return tensor.is_cuda and tensor.dim() - (dim is not None) > 3


def one_by_one(
    function: Callable[..., Any], count: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> Any:
    if count == 0:
        raise ValueError(
            "torch.vmap: expected an example, got none for a call that takes one by one"
        )

    def example(i: int) -> list[Any]:
        pairs = zip(args, in_dims, strict=True)
        return [arg if dim is None else arg.select(dim, i) for arg, dim in pairs]

    outputs = [function(*example(i)) for i in range(count)]
    return tuple(torch.stack(parts) for parts in zip(*outputs, strict=True))


def batch_first(tensor: Any, dim: int | None, count: int) -> Any:
    if tensor is None:
        return None
    return tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def batch_aligned(tensor: Any, dim: int | None, rank: int) -> Any:
    """[batch, 1, ..., 1, *shape] of `rank` dimensions; as it is when not batched."""
    if tensor is None or dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    return tensor[(slice(None), *[None] * (rank - tensor.dim()))]


def all_aligned(given: Any, dims: Any, names: tuple[str, ...], rank: int) -> dict[str, Any]:
    """`batch_aligned` of those arguments, by name."""
    return {name: batch_aligned(getattr(given, name), getattr(dims, name), rank) for name in names}
