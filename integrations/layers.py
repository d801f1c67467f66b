"""Layers of libraries that know no attention implementations: timm, torchvision, NeMo.

Each library has a file that names its layers and their subclasses in `LAYERS`. Its `patch_model`,
made by `model_patcher`, needs that library alone. Layers run `megasoftmax.attention` on a GPU, and
on a CPU where torch's own attention computes the same. Elsewhere they run matmul, the fused
softmax, matmul.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

import megasoftmax
from megasoftmax.integrations.names import is_disabled
from megasoftmax.integrations.products import like_query
from megasoftmax.integrations.replacing import Change, Patched, Reports, Served

Classes = Mapping[type[Any], type[Any]]
"""A class of the library -> the subclass that takes its place."""


class PatchedLayers(Reports, Patched):
    """What one call of a `patch_model` has changed; a context manager."""

    def __init__(
        self,
        model: torch.nn.Module,
        classes: Classes,
        head_dim: Callable[[Any], int],
        around: Classes,
    ) -> None:
        kinds: tuple[type[torch.nn.Module], ...] = tuple(classes)
        self._layers = {
            name: module for name, module in model.named_modules() if isinstance(module, kinds)
        }
        self._classes = classes
        self._head_dim = head_dim
        changed = {**classes, **around}
        super().__init__(
            Change(module, "__class__", changed[type(module)], name)
            for name, module in model.named_modules()
            if type(module) in changed and not _why_left(module, changed)
        )

    @property
    def report(self) -> dict[str, Served]:
        """What each of these layers runs at present, by its name.

        Found without a call. It holds for calls in the type of the weights, or under the autocast
        that is on now, without dropout, if no bias needs a gradient.
        """
        return {name: self._served(layer) for name, layer in self._layers.items()}

    def _served(self, layer: torch.nn.Module) -> Served:
        if why := _why_left(layer, self._classes):
            return Served("unchanged", why)
        if type(layer) in self._classes:
            return Served("unchanged", "not patched")
        query = like_query(layer, self._head_dim(layer))
        reasons = megasoftmax.why_not_fused(megasoftmax.attention, query, query, query)
        return Served.by(reasons, otherwise="softmax")


def _why_left(layer: torch.nn.Module, classes: Classes) -> str:
    """Why a layer cannot be patched; empty: it can."""
    if is_disabled():
        return "MEGASOFTMAX_DISABLE=1"
    if type(layer) not in (*classes, *classes.values()):
        return f"its class {type(layer).__name__} is a subclass of one that would be replaced"
    return "its forward was replaced" if "forward" in vars(layer) else ""


def model_patcher(
    classes: Classes, head_dim: Callable[[Any], int], around: Classes = MappingProxyType({})
) -> Callable[[torch.nn.Module], PatchedLayers]:
    """The `patch_model` of a library.

    Args:
        classes: see `Classes`.
        head_dim: of a layer.
        around: classes of blocks around such layers, replaced too. Reports do not list them. FSDP2
            changes the class of a block that it shards: `fully_shard` after patching makes undo
            fail. Patching after `fully_shard` leaves such blocks as they are.
    """

    def patch_model(model: torch.nn.Module) -> PatchedLayers:
        """Let the layers of `LAYERS` in a model run megasoftmax, until they are unpatched.

        Args:
            model: any module that contains such layers, or is one.

        Returns:
            A context manager with `unpatch()` and `report`. With MEGASOFTMAX_DISABLE=1 in the
            environment nothing is changed.

        Raises:
            TypeError: the model is not a module.
            ValueError: it has no such layer.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: expected a module, got {type(model).__name__}")
        patched = PatchedLayers(model, classes, head_dim, around)
        if not patched.report:
            names = ", ".join(f"{each.__module__}.{each.__qualname__}" for each in classes)
            raise ValueError(
                f"model: expected layers of {names}; got {type(model).__name__}, which has none"
            )
        return patched

    return patch_model
