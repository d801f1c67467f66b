"""The C++ part of the host: a call that runs fused goes through it without Python in between.

The stable ABI, which the kernels' bindings use so that one library serves every torch, has no
autograd. So this part is a module of its own, csrc/host, which ninja compiles for the torch at hand
when a call runs fused. It checks arguments, calls the op and records the backward pass.
What it does not serve it declines, and `functions` goes on in Python, with the same results. It is
optional: without it every call takes that way.
"""

import importlib.util
import os
import threading
from importlib.machinery import ExtensionFileLoader
from typing import Any

import torch
from torch import Tensor

from megasoftmax import autograd, dispatch, ops
from megasoftmax.autograd.function import is_differentiated
from megasoftmax.biases import RelativeBias, ShiftedBias
from megasoftmax.build import library
from megasoftmax.build.extension import BuildError
from megasoftmax.ops.registration import NAMESPACE

_MODULE = "megasoftmax_host"

calls: Any = None
"""The module, once a call has run fused: softmax and attention as csrc/host/calls.h says."""

_why_not: str | None = None
_admitted: set[torch.device] = set()
_loading = threading.Lock()


def _after_fork() -> None:
    """A process that is forked while a thread loads does not have that thread."""
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def status() -> str:
    """Whether this part is there, or why not; builds nothing."""
    if _why_not is not None:
        return f"none: {_why_not}"
    if calls is not None or library.host_is_built():
        return "built"
    if library.host_is_coming():
        return "none: another process compiles it"
    if library.host_is_packed():
        return "none: it is unpacked from the wheel when the first call runs fused"
    return "none: it is built when the first call runs fused"


def admit(scores: Tensor) -> None:
    """Lets later calls on the GPU of these scores, where a call runs fused, go through C++.

    Until that part is compiled, if it is compiled beside the kernels, calls go through Python.
    """
    if torch.compiler.is_compiling() or not scores.is_cuda or scores.device in _admitted:
        return
    if library.host_is_coming():
        return
    _admitted.add(scores.device)
    with _loading:  # threads may serve one GPU each
        if calls is None and _why_not is None:
            _load()
    if calls is not None:
        calls.admit(scores.device, True, dispatch.has_attention(scores))


def _load() -> None:
    global calls, _why_not
    if os.environ.get("MEGASOFTMAX_HOST") == "0":
        _why_not = "MEGASOFTMAX_HOST=0"
        return
    try:
        path = str(library.host())
        loader = ExtensionFileLoader(_MODULE, path)
        spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (BuildError, ImportError, OSError, ValueError) as error:
        _why_not = str(error)
        return
    bind(module)
    calls = module


def bind(module: Any) -> None:
    """Gives the module what it needs of this package, the ops that it calls first of all."""
    module.bind(NAMESPACE, _backward, RelativeBias, ShiftedBias, *dispatch.SCALES)


def _backward(name: str, *args: Any) -> Any:
    """A backward op where it is differentiated or runs under transforms of functions."""
    implementation, call = _BACKWARDS[name]
    if call is not None and is_differentiated():
        found = call(implementation, *args)
    else:
        found = implementation.backward(*args)
    return found if isinstance(found, tuple) else (found,)


# Who computes a backward op, and what calls it where it is differentiated, if not itself.
_BACKWARDS = {
    "softmax_backward": (ops.softmax.IMPLEMENTATION, autograd.softmax.call_backward),
    "softmax_topk_backward": (ops.topk.IMPLEMENTATION, autograd.topk.call_backward),
    "attention_backward": (ops.attention.IMPLEMENTATION, None),
    "attention_backward_packed": (ops.attention.PACKED, None),
}
