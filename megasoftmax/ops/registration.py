"""How an op is defined and implemented."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd.function import Implementation, Rules, one_by_one
from megasoftmax.build import library
from megasoftmax.tracing import is_exporting

# The name of the package: a copy that is imported under another name has ops of its own.
NAMESPACE = __package__.rpartition(".")[0]
BELOW_AUTOGRAD = "_below_autograd"
_library = torch.library.Library(NAMESPACE, "DEF")
_below_autograd: dict[Any, Any] = {}
_EVERYWHERE = "CompositeExplicitAutograd"


def define(schema: str) -> Any:
    """The op of a schema, "name(...)" or "name.overload(...)"."""
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    name, _, overload = schema.partition("(")[0].partition(".")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), name), overload or "default")


_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "int",
    bool: "bool",
    torch.dtype: "ScalarType",
}


def schema_of(function: Callable[..., Any], returns: str, name: str | None = None) -> str:
    """The schema of an op with the arguments, and by default the name, of its reference."""
    parameters = inspect.signature(function).parameters.values()
    arguments = ", ".join(f"{_TYPES[each.annotation]} {each.name}" for each in parameters)
    return f"{name or function.__name__}({arguments}) -> {returns}"


def define_differentiable(schema: str) -> Any:
    """The op of a schema for `trace`, whose rules of autograd are Python and cost a detour.

    Defines another op, without them, for `below_autograd`. It is no overload: torch takes overloads
    of the same arguments for one when it forgets them, and ends the process.
    """
    op = define(schema)
    name, _, rest = schema.partition("(")
    _below_autograd[op] = define(f"{name}{BELOW_AUTOGRAD}({rest}")
    return op


def _with_other(op: Any) -> tuple[Any, ...]:
    """An op, and the one without autograd, if there is one."""
    return (op, _below_autograd[op]) if op in _below_autograd else (op,)


def without_rules(op: Any) -> Any:
    """The op of the same arguments without rules of autograd."""
    return _below_autograd[op]


def implement(op: Any, function: Callable[..., Any]) -> None:
    """Lets a function compute an op on CPUs, and on GPUs where no kernels can be loaded.

    A program that torch.export saved may call an op in a process where no public function has
    loaded the kernels: then this does. Once loaded, they come before this.
    """

    for each in _with_other(op):
        _library.impl(each, partial(_without_kernels, each, function), _EVERYWHERE)


def implement_everywhere(op: Any, function: Callable[..., Any]) -> None:
    """Lets a function compute an op without kernels on every device."""
    for each in _with_other(op):
        _library.impl(each, function, _EVERYWHERE)


def _without_kernels(op: Any, function: Callable[..., Any], *args: Any) -> Any:
    if args[0].is_cuda and library.load().available:
        return op(*args)
    return function(*args)


def fake(op: Any, function: Callable[..., Any]) -> None:
    """Lets a function tell what an op returns, without values."""
    for each in _with_other(op):
        torch.library.register_fake(each, function, lib=_library)


def run_one_by_one(op: Any) -> None:
    """Lets an op with several results run the examples of vmap one by one."""

    def batch(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        results = one_by_one(op, info.batch_size, in_dims, args)
        return results, (0,) * len(results)

    torch.library.register_vmap(op, batch, lib=_library)


def trace(
    op: Any, returned: Callable[..., Any], rules: Rules, implementation: Implementation
) -> None:
    """Tells torch what an op returns, its gradients, which that implementation computes, and vmap.

    Args:
        op: what is traced.
        returned: returns what the op returns, without values.
        rules: of its arguments.
        implementation: whose backward, and dimension, the gradients take.
    """
    fake(op, returned)
    torch.library.register_vmap(op, partial(rules.batch, op), lib=_library)
    torch.library.register_autograd(
        op, partial(rules.gradients, implementation), setup_context=rules.save, lib=_library
    )


def below_autograd(op: Any) -> Callable[..., Any]:
    """The op without its autograd.

    In compiled code this is the other op, because there a call of the op itself would go through
    its rules. A program that is exported has the op, so that it can be trained; code under
    torch.func has it, whose levels may differentiate a backward pass; and so have DTensors, which
    torch.compile may take for tensors that need no gradient.
    """
    other = without_rules(op)

    def call(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args)
        is_plain = type(args[0]) in (torch.Tensor, torch.nn.Parameter)
        keeps_rules = not is_plain or is_exporting() or _is_transformed()
        return (op if keeps_rules else other)(*args)

    return call


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active()


_is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as library.load
