"""How an op is defined and implemented."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megasoftmax.autograd.function import Implementation, Rules
from megasoftmax.build import library

# The name of the package: a copy that is imported under another name has ops of its own.
NAMESPACE = __package__.rpartition(".")[0]
_library = torch.library.Library(NAMESPACE, "DEF")


def define(schema: str) -> Any:
    """The op of a schema, "name(...)" or "name.overload(...)"."""
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    name, _, overload = schema.partition("(")[0].partition(".")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), name), overload or "default")


def implement(op: Any, function: Callable[..., Any]) -> None:
    """Lets a function compute an op on CPUs, and on GPUs where no kernels can be loaded.

    A program that torch.export saved may call an op in a process where no public function has
    loaded the kernels: then this does. Once loaded, they come before this.
    """

    def without_kernels(*args: Any) -> Any:
        if args[0].is_cuda and library.load().available:
            return op(*args)
        return function(*args)

    implement_everywhere(op, without_kernels)


def implement_everywhere(op: Any, function: Callable[..., Any]) -> None:
    """Lets a function compute an op without kernels on every device."""
    _library.impl(op, function, "CompositeExplicitAutograd")


def fake(op: Any, function: Callable[..., Any]) -> None:
    """Lets a function tell what an op returns, without values."""
    torch.library.register_fake(op, function, lib=_library)


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


def below_autograd(op: Callable[..., Any], *args: Any) -> Any:
    """The op without its autograd, which would cost a detour through Python."""
    if torch.compiler.is_compiling():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)
