"""Which layers of a model of transformers megasoftmax serves, and what to set for that."""

import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from megasoftmax.integrations.families import FAMILIES, why_not_replaced
from megasoftmax.integrations.names import with_eager_mask
from megasoftmax.integrations.replacing import Change

NO_INTERFACE = "computes attention itself, without the attention interface of transformers"


class Layer(NamedTuple):
    """A layer that computes attention, or a block that is patched along with it."""

    name: str
    module: torch.nn.Module
    config: PreTrainedConfig
    models: list[PreTrainedModel]
    """All models around it, the outermost first."""
    why_not: str | None
    """Why the layer cannot be served; None: it can, as far as it alone decides."""

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The configurations of the layer and of the models around it."""
        return [self.config, *(model.config for model in self.models)]

    @property
    def is_of_families(self) -> bool:
        return isinstance(self.module, tuple(FAMILIES))


def layers_of(model: torch.nn.Module) -> Iterator[Layer]:
    """Every layer of the model that computes attention, and blocks of FAMILIES."""
    enclosing: dict[str, list[PreTrainedModel]] = {}
    for name, module in model.named_modules():
        around = enclosing[name.rpartition(".")[0]] if name else []
        if isinstance(module, PreTrainedModel):
            around = [*around, module]
        enclosing[name] = around
        if around and (is_attention(module) or isinstance(module, tuple(FAMILIES))):
            config = getattr(module, "config", None)
            if not isinstance(config, PreTrainedConfig):
                config = around[-1].config
            yield Layer(name, module, config, around, _why_not(module))


def is_attention(module: torch.nn.Module) -> bool:
    """Whether the module itself computes attention, and not a module inside of it."""
    if _uses_interface(module):
        return True
    return _is_named_attention(module) and not any(
        _uses_interface(inner) or _is_named_attention(inner)
        for inner in module.modules()
        if inner is not module
    )


def _is_named_attention(module: torch.nn.Module) -> bool:
    return "Attention" in type(module).__name__ and not isinstance(module, PreTrainedModel)


def _uses_interface(module: torch.nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _why_not(module: torch.nn.Module) -> str | None:
    if _uses_interface(module):
        return None
    if not isinstance(module, tuple(FAMILIES)):
        return NO_INTERFACE
    if type(module) not in FAMILIES and not isinstance(module, tuple(FAMILIES.values())):
        return f"its class {type(module).__name__} is a subclass of one that would be replaced"
    return why_not_replaced(module)


def why_not_served(layers: list[Layer]) -> dict[str, str]:
    """Layers that cannot be served, and the reason: their own, or that of a layer beside them.

    All layers of one of the FAMILIES that share a configuration get the same mask, which their own
    code does not know. Elsewhere a layer is served by itself.
    """
    why_not = {layer.name: layer.why_not for layer in layers if layer.why_not is not None}
    blocked = _blocked(layers)
    for layer in layers:
        if id(layer.config) in blocked and layer.name not in why_not:
            why_not[layer.name] = f"shares its configuration with {blocked[id(layer.config)]}"
    return why_not


def refused_of(layers: list[Layer], why_not: dict[str, str]) -> dict[str, str]:
    """The layers of `why_not` for which a model is refused, and the reasons.

    Those of models without a served layer, and those of FAMILIES.
    """
    served = {id(layer.models[0]) for layer in layers if layer.name not in why_not}
    return {
        layer.name: why_not[layer.name]
        for layer in layers
        if layer.name in why_not and (layer.is_of_families or id(layer.models[0]) not in served)
    }


def _blocked(layers: list[Layer]) -> dict[int, str]:
    """Configurations of FAMILIES that stay as they are -> the name of a layer that needs it."""
    return {
        id(config): layer.name
        for layer in layers
        if layer.why_not is not None and layer.is_of_families
        for config in layer.configs
    }


def changes_for(
    layers: list[Layer], why_not: dict[str, str], name_for: Callable[[PreTrainedConfig], str | None]
) -> list[Change]:
    """The changes that make layers run megasoftmax's attention.

    Args:
        layers, why_not: from `layers_of` and `why_not_served`.
        name_for: the implementation that a configuration is to have; None: the one that it has.
    """
    served = [layer for layer in layers if layer.name not in why_not]
    left = _blocked(layers).keys() | (
        {id(layer.config) for layer in layers if layer.name in why_not}
        - {id(layer.config) for layer in served}
    )
    changes: list[Change] = []
    configs: dict[int, PreTrainedConfig] = {}
    only_eager: set[int] = set()
    for layer in served:
        configs |= {id(config): config for config in layer.configs if id(config) not in left}
        if _knows_only_eager_masks(layer):
            only_eager |= {id(layer.config), id(layer.models[-1].config)}
        ours = FAMILIES.get(type(layer.module))
        if ours is not None:
            changes.append(Change(layer.module, "__class__", ours, layer.name))
            if not hasattr(layer.module, "config"):
                changes.append(Change(layer.module, "config", layer.config, layer.name))
    # Not _attn_implementation, which sets that of all configurations within this one too.
    for key, config in configs.items():
        name = name_for(config)
        if name is not None:
            name = with_eager_mask(name) if key in only_eager else name
            changes.append(Change(config, "_attn_implementation_internal", name))
    return changes


def _knows_only_eager_masks(layer: Layer) -> bool:
    """Whether its class promises no implementation but "eager", and may read the mask itself.

    DeepSeek V4 extends the mask inside of its layers, and the encoder of BigBirdPegasus adds it.
    """
    model = layer.models[-1]
    return not layer.is_of_families and not (
        model._supports_sdpa or model._supports_flash_attn or model._supports_flex_attn
    )
