"""Tensors that the layers of a model derive from one that they share, made once a forward pass.

It is kept by the pass, never on the tensor: whoever owns that may change it between two passes in
ways that leave no trace, such as `.data`, numpy, torch.distributed or a CUDA graph.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megasoftmax
from megasoftmax.tracing import is_traced, may_keep

_MOST = 4  # tensors at a time: models alternate between few kinds of masks


class _Made(NamedTuple):
    source: Tensor
    """Kept, so that its id stays its own."""
    state: Any
    result: Any


class _Pass(threading.local):
    made: dict[tuple[int, str], _Made] | None = None
    """By the id of a tensor and the name of what is made of it. None: no model runs."""


_pass = _Pass()


def in_a_pass(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a model. What its layers share lives until the outermost model returns."""
    if torch.compiler.is_compiling() or _pass.made is not None:
        return call(*args, **kwargs)
    _pass.made = {}
    try:
        return call(*args, **kwargs)
    finally:
        _pass.made = None


def made_once(tensor: Tensor, name: str, make: Callable[[Tensor], Any]) -> Any:
    """What `make` returns of the tensor, once while `can_share`.

    Made anew where the tensor was changed in place, or gradients were switched on or off.
    """
    if not can_share(tensor):
        return make(tensor)
    made = _pass.made
    assert made is not None
    key, state = (id(tensor), name), (tensor._version, torch.is_grad_enabled())
    found = made.get(key)
    if found is None or found.state != state:
        if len(made) == _MOST:
            del made[next(iter(made))]
        found = made[key] = _Made(tensor, state, make(tensor))
    return found.result


def can_share(tensor: Tensor) -> bool:
    """Whether what is made of it may serve other layers, in the pass of a model.

    Not while calls are traced or captured. Not in inference mode, where what is made cannot be
    saved for a backward pass.
    """
    # First, because torch.compile traces none of the others.
    if is_traced() or _pass.made is None:
        return False
    if torch.is_inference_mode_enabled() or tensor.is_inference():
        return False
    return may_keep(tensor.device)


def with_tiles(mask: Tensor, excluded: Callable[[Tensor], Tensor]) -> Tensor | megasoftmax.TileMask:
    """A mask for attention, with one block mask for all layers that share it.

    Outside of a pass each layer has its own. Layers that are computed again for the backward pass,
    when the pass is over, must save as many tensors as they did.

    Args:
        mask: bool, as the layers get it.
        excluded: makes another tensor of it, True = excluded.

    Returns:
        A TileMask; a tensor while calls are traced.
    """
    if is_traced():
        return excluded(mask)
    return made_once(mask, "tiles", lambda mask: megasoftmax.TileMask(excluded(mask)))
