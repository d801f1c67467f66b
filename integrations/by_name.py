"""Models that ask for megasoftmax by name: served or refused as a whole, when they are made.

transformers takes the name of an attention implementation from any class, also from one that never
calls it. `watch` extends methods of PreTrainedModel, three for models that ask for megasoftmax:

* `get_correct_attn_implementation`, which runs before layers are made. Falcon, GPT-J and others
  choose the class of their attention from a table by the name; the name gets the class of "eager".
* `post_init`, which runs when a model is complete, and `set_attn_implementation`. Layers of
  `families` get their subclass. A model without a layer that can be served raises ValueError. Where
  only some can, a warning names the others, and their configuration becomes "eager".

And `__call__`, so that what layers share lives as long as one pass of the outermost model.

A part of a model is not looked at before the whole is complete.
"""

import functools
import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from megasoftmax.integrations.names import NAMES, asked_name, is_disabled, with_eager_mask
from megasoftmax.integrations.replacing import Change
from megasoftmax.integrations.serving import (
    Layer,
    changes_for,
    layers_of,
    refused_of,
    why_not_served,
)
from megasoftmax.integrations.sharing import in_a_pass

_LOGGER = logging.getLogger(__name__)
_MARK = "_megasoftmax_watches"
_CALL_OF_MODULE = torch.nn.Module.__call__


def watch() -> None:
    """Extend the methods; calling it twice is harmless."""
    for name, extend in (
        ("get_correct_attn_implementation", _extended_check),
        ("post_init", _extended_post_init),
        ("set_attn_implementation", _extended_setter),
        ("__call__", _extended_call),
    ):
        original = getattr(PreTrainedModel, name)
        if not hasattr(original, _MARK):
            extended = functools.wraps(original)(extend(original))
            setattr(extended, _MARK, True)
            setattr(PreTrainedModel, name, extended)


def _extended_check(original: Callable[..., str]) -> Callable[..., str]:
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if asked_name(requested_attention) is not None:
            _complete_tables(type(self))
        return original(self, requested_attention, *args, **kwargs)

    return get_correct_attn_implementation


def _extended_post_init(original: Callable[..., None]) -> Callable[..., None]:
    def post_init(self: PreTrainedModel) -> None:
        original(self)
        if not _is_part(self):
            _serve(self)

    return post_init


def _extended_setter(original: Callable[..., None]) -> Callable[..., None]:
    def set_attn_implementation(
        self: PreTrainedModel, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if attn_implementation in NAMES and not is_disabled():
            _serve(self, attn_implementation)
        else:
            if attn_implementation in ("eager", {"": "eager"}):
                # transformers' setter refuses every name for a class without its interface.
                for layer in layers_of(self):
                    _let_be_eager(layer)
            original(self, attn_implementation, *args, **kwargs)
            _serve(self)

    return set_attn_implementation


def _extended_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        # Tracers replace that of Module for a while.
        call = torch.nn.Module.__call__ if original is _CALL_OF_MODULE else original
        return in_a_pass(call, self, *args, **kwargs)

    return __call__


def _complete_tables(model_class: type[PreTrainedModel]) -> None:
    """Give the names a class in the tables that the file of a model chooses attention from."""
    for table in vars(sys.modules[model_class.__module__]).values():
        eager = table.get("eager") if isinstance(table, dict) else None
        if isinstance(eager, type) and issubclass(eager, torch.nn.Module):
            for name in NAMES:
                for full_name in (name, with_eager_mask(name)):
                    table.setdefault(full_name, eager)


def _is_part(model: PreTrainedModel) -> bool:
    """Whether a constructor of another model is making this one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            maker = frame.f_locals.get("self")
            if isinstance(maker, PreTrainedModel) and maker is not model:
                return True
        frame = frame.f_back
    return False


def _serve(model: PreTrainedModel, implementation: str | None = None) -> None:
    """Serve what asks for megasoftmax; all of the model, if an implementation is given.

    Raises:
        ValueError: no layer can be served, or one of FAMILIES cannot.
    """
    if is_disabled():
        return

    def name_for(config: PreTrainedConfig) -> str | None:
        return implementation or asked_name(config._attn_implementation)

    layers = [layer for layer in layers_of(model) if name_for(layer.config) is not None]
    why_not = why_not_served(layers)
    if refused := refused_of(layers, why_not):
        first = next(layer for layer in layers if layer.name in refused)
        raise ValueError(
            f"attn_implementation: expected one that {type(model).__name__} can run, got "
            f"{name_for(first.config)!r}; its layer {first.name or 'itself'} "
            f"({type(first.module).__name__}) {refused[first.name]}; use 'eager' for this model"
        )
    for change in changes_for(layers, why_not, name_for):
        change.bind(change.ours)
    left = [layer for layer in layers if layer.name in why_not]
    if left:
        _leave(model, left, layers, why_not)


def _leave(
    model: PreTrainedModel, left: list[Layer], layers: list[Layer], why_not: dict[str, str]
) -> None:
    """Let layers that cannot be served run what they do for "eager", and say so."""
    served = {id(layer.config) for layer in layers if layer.name not in why_not}
    for layer in left:
        if id(layer.config) not in served:
            _let_be_eager(layer)
    _warn(
        type(model).__name__,
        len(layers) - len(left),
        len(layers),
        left[0].name,
        type(left[0].module).__name__,
        why_not[left[0].name],
    )


def _let_be_eager(layer: Layer) -> None:
    if asked_name(layer.config._attn_implementation):
        Change(layer.config, "_attn_implementation_internal", "").bind("eager")


@functools.cache
def _warn(model: str, served: int, layers: int, name: str, layer: str, reason: str) -> None:
    """Once for models that are alike."""
    _LOGGER.warning(
        "%s: %d of %d attention layers run megasoftmax. %s (%s) %s.",
        *(model, served, layers, name, layer, reason),
    )
