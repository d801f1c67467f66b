"""Checks of one argument, for every layer of the package.

An error begins with the name of the argument, and says what was expected and what came.
"""

import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megasoftmax.tracing import in_jit_trace, is_traced

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATING_NAMES = "float16, bfloat16, float32 or float64"
_STRIDED = torch.strided


def kind(value: object) -> str:
    """What came, in an error."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    found = type(value)
    return f"numpy.{found.__name__}" if found.__module__ == "numpy" else found.__name__


def as_integer(value: Any) -> Any:
    """The int of a numpy integer, or of another object that stands for one.

    So is a size while torch.jit.trace records, which makes a tensor of it. Other tensors, which a
    device may have to be waited for, ints, bools and what is no integer are returned as they are.
    None returns first: torch.compile of 2.11 cannot trace the TypeError that it would raise.
    """
    if value is None or isinstance(value, (int, torch.SymInt)):
        return value
    if isinstance(value, Tensor):
        is_size = value.dim() == 0 and value.dtype == torch.int64 and in_jit_trace()
        return int(value) if is_size else value
    try:
        return operator.index(value)
    except TypeError:
        return value


def is_integer(value: Any) -> bool:
    """Whether it is an int, or a size that a tracer leaves open, and no bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def checked_integer(name: str, value: Any, least: int | None = None, most: int = 2**63 - 1) -> Any:
    """An int, or a torch.SymInt: of a shape that torch.compile or torch.export leaves open."""
    expected = f"{name}: expected an integer"
    if least is not None:
        expected += f" from {least} on"
    value = as_integer(value)
    if not is_integer(value):
        raise TypeError(f"{expected}, got {kind(value)}")
    if value < (-most if least is None else least):
        raise ValueError(f"{expected}, got {value}")
    if value > most:
        raise ValueError(f"{name}: expected an integer up to {most}, got {value}")
    return value


def check_flag(name: str, flag: bool) -> None:
    if flag is not False and flag is not True:
        raise TypeError(f"{name}: expected a bool, got {kind(flag)}")


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in FLOATING):
        found = dtype if isinstance(dtype, (torch.dtype, str)) else kind(dtype)
        raise TypeError(f"dtype: expected {FLOATING_NAMES}, got {found!r}")


def checked_device(device: Any) -> torch.device | None:
    """None: torch's default."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"device: expected a device of torch, got {device!r}") from None


def check_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATING:
        raise TypeError(f"{name}: expected a tensor of {FLOATING_NAMES}, got {kind(tensor)}")
    if tensor.layout is not _STRIDED or tensor.is_nested:  # a call would cost softmax 1%
        check_layout(name, tensor)


def check_layout(name: str, tensor: Tensor) -> None:
    """Refuses sparse, mkldnn and nested tensors."""
    if tensor.layout is not _STRIDED or tensor.is_nested:
        found = "a nested tensor" if tensor.is_nested else f"one of layout {tensor.layout}"
        raise TypeError(f"{name}: expected a dense, strided tensor, got {found}")


def check_least_rank(name: str, tensor: Tensor, least: int, expected: str) -> None:
    if tensor.dim() < least:
        raise ValueError(f"{name}: expected {expected}, got shape {tuple(tensor.shape)}")


def check_rank(name: str, tensor: Tensor, rank: int, expected: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {kind(tensor)}")
    check_layout(name, tensor)
    if tensor.dim() != rank:
        raise ValueError(f"{name}: expected {expected}, got shape {tuple(tensor.shape)}")


def check_tensors(name: str, tensors: Sequence[Tensor]) -> None:
    """At least one, in a tuple or list, all on one device."""
    if not isinstance(tensors, (tuple, list)):
        raise TypeError(f"{name}: expected a tuple or list of tensors, got {kind(tensors)}")
    if len(tensors) == 0:
        raise ValueError(f"{name}: expected at least one, got none")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}[{i}]: expected a tensor, got {kind(tensor)}")
        check_layout(f"{name}[{i}]", tensor)
        check_device(f"{name}[{i}]", tensor, f"{name}[0]", tensors[0])


def check_device(name: str, tensor: Tensor, other: str, on: Tensor) -> None:
    if tensor.device != on.device:
        raise ValueError(f"{name}: expected device {on.device}, as {other}, got {tensor.device}")


def has_values(tensor: Tensor) -> bool:
    """Whether a host reads them without waiting: not while traced, or for one of many examples."""
    return tensor.is_cpu and type(tensor) is Tensor and not is_traced()


def is_batched(tensor: Tensor) -> bool:
    """Whether torch.vmap lets it stand for the tensors of all examples, so that it has no value."""
    functorch = torch._C._functorch
    if torch.compiler.is_compiling():
        return False
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def renamed(error: TypeError | ValueError, names: Mapping[str, str]) -> TypeError | ValueError:
    """An error of the checks here with other names of arguments, those of the caller's function."""
    message = str(error)
    if re.match(r"[\w.\[\], ]+: ", message) is None:
        return error
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)"
    return type(error)(re.sub(pattern, lambda found: names[found[0]], message))


def called(
    names: Mapping[str, str], function: Callable[..., Any], /, *given: Any, **named: Any
) -> Any:
    """What the function returns; its errors have these names of arguments.

    A `try` in place has fewer guards in compiled code.
    """
    try:
        return function(*given, **named)
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None


_MEANT = {
    "attn_mask": "mask=, bool, True = excluded, the opposite of attn_mask, or bias=, which is "
    "added to the scores; megasoftmax.scaled_dot_product_attention takes attn_mask",
    "is_causal": "causal=",
    "dropout_p": "dropout=",
    "temperature": "scale=1 / temperature",
}


def broadcasts(shape: torch.Size, target: tuple[int, ...]) -> bool:
    """Whether a tensor broadcasts to the target."""
    if len(shape) > len(target):
        return False
    for size, wanted in zip(
        reversed(shape), reversed(target), strict=False
    ):  # all() takes twice as long
        if size != 1 and size != wanted:  # not `in`: sizes may be symbolic
            return False
    return True


def hint_at_sharing(
    name: str, shape: tuple[int, ...], target: tuple[int, ...], of_scores: int = 2
) -> str:
    """How to write that several examples, or heads, read one entry, if that may be meant.

    Args:
        name: of the tensor.
        shape: of the tensor.
        target: [..., heads, queries, keys], which it does not broadcast to. Or without the last
            dimension, of ranges, or with one of distances in place of the last two.
        of_scores: dimensions of the target behind the heads.
    """
    missing = len(target) - len(shape)
    wrong = [
        dim
        for dim, (size, whole) in enumerate(zip(shape, target[missing:], strict=False))
        if missing >= 0 and size not in (1, whole)
    ]
    if len(wrong) != 1:
        return ""
    (own,) = wrong
    dim, entries, whole = missing + own, shape[own], target[missing + own]
    if dim > len(target) - of_scores - 1 or entries == 0 or whole % entries != 0:
        return ""
    each = whole // entries
    which = "heads" if dim == len(target) - of_scores - 1 else "examples"
    outer = f"query.unflatten({dim}, ({entries}, {each})) and {name}.unsqueeze({own + 1})"
    inner = f"query.unflatten({dim}, ({each}, {entries}))"
    if own > 0:
        inner += f" and {name}.unsqueeze({own})"
    return (
        f"; {which} share entries only by broadcasting: if number i reads entry i // {each}, pass "
        f"{outer}, if it reads entry i % {entries}, pass {inner}, and key and value likewise"
    )


def misnamed(
    name: str, given: int, unnamed: tuple[Any, ...], others: Mapping[str, Any]
) -> TypeError:
    """The error of a call with options that have no name, or names that a function does not know.

    Args:
        name: of the function.
        given: how many arguments it takes by position.
        unnamed, others: what it was given besides.
    """
    if unnamed:
        example = "dim=-1" if name == "softmax" else "scale=0.5"
        return TypeError(
            f"{name}() takes {given} positional argument{'s' * (given > 1)} but "
            f"{given + len(unnamed)} were given; options are given by name, such as {example}"
        )
    other = next(iter(others))
    hint = f"; use {_MEANT[other]}" if other in _MEANT else ""
    return TypeError(f"{name}() got an unexpected keyword argument {other!r}{hint}")


Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options_by_name(function: Function) -> Function:
    """The function, whose signature does not show `*unnamed` and `**others`, which it refuses."""
    signature = inspect.signature(function)
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    shown = [each for each in signature.parameters.values() if each.kind not in rest]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function
