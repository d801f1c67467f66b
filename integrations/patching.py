"""Switch a model of Hugging Face transformers to megasoftmax, and back.

    from megasoftmax.integrations.patching import patch_model

    patched = patch_model(model)        # until patched.unpatch()
    print(patched)                      # what runs now, and why
    with patch_model(model):            # or until the end of the block
        model(input_ids)

One call does what there is to do: attention of all the models that the model consists of, also of
those that `set_attn_implementation` passes by (T5's encoder and decoder before transformers 5.20);
layers of the families that have no attention interface (`families`); routers (`routers`).

`report` says of every attention layer and router what it runs. "attention" writes no scores,
"softmax" is matmul and the fused softmax, with the reason; "router" is softmax_topk; "unchanged" is
what the model ran before, with the reason. A class is taken for attention where its forward uses
transformers' attention interface or, as transformers itself guesses, by its name.

What may be switched can be said in the configuration, where `save_pretrained` keeps it:

    configure(model.config, attention=False)    # config.megasoftmax = {"attention": False, ...}

The configuration is shared: another model that was built from the same object is switched as well.
"""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from megasoftmax.integrations.families import FAMILIES, why_not_served
from megasoftmax.integrations.replacing import Change, Patched, Served, in_lines
from megasoftmax.integrations.routers import changes_of_routers, find_routers, is_patched
from megasoftmax.integrations.transformers import (
    NAME,
    SOFTMAX_NAME,
    is_disabled,
    register,
    why_not_attention,
)

_FLAGS = ("softmax", "attention", "router")
_NO_INTERFACE = "computes attention itself, without the attention interface of transformers"

# What layers call the width of a head, their dropout and their softcap, if they have them.
_HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim")
_DROPOUTS = ("attention_dropout", "attn_dropout", "attn_dropout_p", "dropout")
_SOFTCAPS = ("attn_logit_softcapping",)


class _Layer(NamedTuple):
    """A layer that computes attention, or a block that is patched along with it."""

    name: str
    module: torch.nn.Module
    config: PreTrainedConfig
    enclosing: list[PreTrainedConfig]
    """Those of all models around it."""
    why_not: str | None
    """Why it cannot be served by itself."""


class PatchedModel(Patched):
    """What one call of `patch_model` has changed; a context manager."""

    def __init__(
        self, model: torch.nn.Module, changes: list[Change], why_not: dict[str, str]
    ) -> None:
        super().__init__(changes)
        self._model = model
        self._why_not = why_not

    @property
    def report(self) -> dict[str, Served]:
        """What every attention layer and router of the model runs at present, by its name.

        As far as can be told without a call: for calls in the type of the weights, without
        autocast, that do not ask for probabilities.
        """
        found = {
            layer.name: self._served(layer)
            for layer in _layers(self._model)
            if _is_attention(layer.module)
        }
        for name, router in find_routers(self._model).items():
            found[name] = Served("router") if is_patched(router) else self._unchanged(name)
        return found

    def unpatch(self) -> None:
        """Restore what was; calling it twice is harmless.

        Raises:
            RuntimeError: something was changed since, by another `patch_model` for example, which
                has to be unpatched first; nothing was restored.
        """
        super().unpatch()
        self._why_not = {}

    def __str__(self) -> str:
        """The report, a line for neighbours that are served alike."""
        return in_lines(self.report)

    def _served(self, layer: _Layer) -> Served:
        implementation = layer.config._attn_implementation
        if layer.why_not is not None or implementation not in (NAME, SOFTMAX_NAME):
            return self._unchanged(layer.name, f"runs {implementation!r}")
        if is_disabled():
            return self._unchanged(layer.name)
        if implementation == SOFTMAX_NAME:
            return Served("softmax", f"{SOFTMAX_NAME} was asked for")
        reasons = "; ".join(str(reason) for reason in _why_not_attention(layer.module))
        return Served("softmax", reasons) if reasons else Served("attention")

    def _unchanged(self, name: str, otherwise: str = "not patched") -> Served:
        disabled = "MEGASOFTMAX_DISABLE=1" if is_disabled() else otherwise
        return Served("unchanged", self._why_not.get(name, disabled))


def patch_model(
    model: torch.nn.Module, *, strict: bool = True, implementation: str = NAME
) -> PatchedModel:
    """Let a model run megasoftmax, until it is unpatched.

    What runs megasoftmax already stays as it is and belongs to whoever patched it. Calls can be
    nested, to compare the two implementations for example; the inner one is unpatched first.

    Args:
        model: a PreTrainedModel, or a module that contains some. `config.megasoftmax` of the
            outermost is honoured, see `configure`.
        strict: raise where an attention layer, or a router, cannot be served. Otherwise it stays
            as it is, with all layers that share its configuration, and `report` says so.
        implementation: "megasoftmax" or "megasoftmax_softmax", see `transformers`.

    Returns:
        What unpatches the model and reports on it. With MEGASOFTMAX_DISABLE=1 in the environment
        nothing was changed.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it contains no PreTrainedModel; `implementation` or `config.megasoftmax` is not
            as above; with `strict`, a layer cannot be served: all are named, with the reasons.
            Nothing was changed.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    if implementation not in (NAME, SOFTMAX_NAME):
        raise ValueError(
            f"implementation: expected {NAME!r} or {SOFTMAX_NAME!r}, got {implementation!r}"
        )
    flags = _flags_of(model)
    if is_disabled():
        return PatchedModel(model, [], {})
    layers = list(_layers(model)) if flags["softmax"] else []
    why_not = _why_not_served(layers)
    if strict and why_not:
        refused = "\n".join(f"  {name}: {reason}" for name, reason in why_not.items())
        raise ValueError(
            f"model: expected attention that megasoftmax can serve, got {len(why_not)} layers "
            f"that it cannot; strict=False leaves them as they are:\n{refused}"
        )
    changes = _changes(layers, why_not, implementation if flags["attention"] else SOFTMAX_NAME)
    if flags["router"]:
        changes_of_those, why_no_router = _changes_of_routers(model, strict)
        changes += changes_of_those
        why_not |= why_no_router
    register()
    return PatchedModel(model, changes, _why_flagged(model, flags) | why_not)


def configure(
    config: PreTrainedConfig, *, softmax: bool = True, attention: bool = True, router: bool = True
) -> None:
    """Write into a configuration what `patch_model` may switch: `config.megasoftmax`.

    Args:
        config: of a model, as a whole.
        softmax: False leaves attention as it is. `attention` must be False as well, for fused
            attention gives way to the softmax.
        attention: False keeps the matrix products of attention: "megasoftmax_softmax".
        router: False leaves routers as they are.

    Raises:
        ValueError: a value is not a bool; `attention` without `softmax`.
    """
    flags = {"softmax": softmax, "attention": attention, "router": router}
    config.megasoftmax = _checked(flags)


def _checked(flags: Any) -> dict[str, bool]:
    """All flags, True where they are not given."""
    expected = f"config.megasoftmax: expected a dict of {', '.join(_FLAGS)} to bool"
    if not isinstance(flags, dict):
        raise ValueError(f"{expected}, got {type(flags).__name__}")
    for name, value in flags.items():
        if name not in _FLAGS or not isinstance(value, bool):
            raise ValueError(f"{expected}, got {name!r}: {value!r}")
    complete = dict.fromkeys(_FLAGS, True) | flags
    if complete["attention"] and not complete["softmax"]:
        raise ValueError("config.megasoftmax: expected attention False where softmax is False")
    return complete


def _flags_of(model: torch.nn.Module) -> dict[str, bool]:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return _checked(getattr(module.config, "megasoftmax", {}))
    raise ValueError(
        f"model: expected a PreTrainedModel or a module with some, got {type(model).__name__}"
    )


def _why_flagged(model: torch.nn.Module, flags: dict[str, bool]) -> dict[str, str]:
    """Why layers and routers that config.megasoftmax excludes are unchanged."""
    excluded: list[str] = []
    if not flags["softmax"]:
        excluded += (layer.name for layer in _layers(model))
    if not flags["router"]:
        excluded += find_routers(model)
    return dict.fromkeys(excluded, "config.megasoftmax says so")


def _layers(model: torch.nn.Module) -> Iterator[_Layer]:
    """Every layer of the model that computes attention, and blocks of FAMILIES."""
    enclosing: dict[str, list[PreTrainedConfig]] = {}
    for name, module in model.named_modules():
        around = enclosing[name.rpartition(".")[0]] if name else []
        if isinstance(module, PreTrainedModel):
            around = [*around, module.config]
        enclosing[name] = around
        if around and (_is_attention(module) or _is_of_families(module)):
            config = getattr(module, "config", None)
            if not isinstance(config, PreTrainedConfig):
                config = around[-1]
            yield _Layer(name, module, config, around, _why_not(module))


def _is_attention(module: torch.nn.Module) -> bool:
    """Whether it computes attention, rather than contains what does."""
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


def _is_of_families(module: torch.nn.Module) -> bool:
    return isinstance(module, tuple(FAMILIES))


def _why_not(module: torch.nn.Module) -> str | None:
    if _uses_interface(module):
        return None
    if not _is_of_families(module):
        return _NO_INTERFACE
    if type(module) not in FAMILIES and not isinstance(module, tuple(FAMILIES.values())):
        return f"its class {type(module).__name__} is a subclass of one that would be replaced"
    return why_not_served(module)


def _why_not_served(layers: list[_Layer]) -> dict[str, str]:
    """Layers that cannot be served, and the reason: their own, or that of one beside them.

    A mask is made for all layers under one configuration, in a form that only ours understand.
    """
    why_not = {layer.name: layer.why_not for layer in layers if layer.why_not is not None}
    blocked = _blocked(layers)
    for layer in layers:
        if id(layer.config) in blocked and layer.name not in why_not:
            why_not[layer.name] = f"shares its configuration with {blocked[id(layer.config)]}"
    return why_not


def _blocked(layers: list[_Layer]) -> dict[int, str]:
    """Configurations that must stay as they are -> the name of a layer that needs it."""
    return {
        id(config): layer.name
        for layer in layers
        if layer.why_not is not None
        for config in (layer.config, *layer.enclosing)
    }


def _changes(layers: list[_Layer], why_not: dict[str, str], implementation: str) -> list[Change]:
    """What there is to set for attention."""
    blocked = _blocked(layers)
    changes: list[Change] = []
    configs: dict[int, PreTrainedConfig] = {}
    for layer in layers:
        if layer.name in why_not:
            continue
        configs |= {id(config): config for config in (layer.config, *layer.enclosing)}
        ours = FAMILIES.get(type(layer.module))
        if ours is not None:
            changes.append(Change(layer.module, "__class__", ours, layer.name))
            if not hasattr(layer.module, "config"):
                changes.append(Change(layer.module, "config", layer.config, layer.name))
    # Not _attn_implementation, which sets that of all configurations within this one too.
    changes += (
        Change(config, "_attn_implementation_internal", implementation)
        for key, config in configs.items()
        if key not in blocked
    )
    return changes


def _changes_of_routers(
    model: torch.nn.Module, strict: bool
) -> tuple[list[Change], dict[str, str]]:
    """What there is to set for routers, and the reason for each that is left as it is."""
    routers = find_routers(model)
    if not routers:
        return [], {}
    try:
        return changes_of_routers(model), {}
    except ValueError as error:
        if strict:
            raise
        return [], dict.fromkeys(routers, str(error))


def _why_not_attention(layer: torch.nn.Module) -> tuple[Any, ...]:
    """Reasons against fused attention, found with tensors like those that the layer would make."""
    weight = next((p for p in layer.parameters() if p.is_floating_point()), torch.empty(0))
    head_dim = next((getattr(layer, name) for name in _HEAD_DIMS if hasattr(layer, name)), 64)
    # Not weight.new_empty: quantised weights do not have every operator.
    like_query = torch.empty(1, 1, 1, head_dim, dtype=weight.dtype, device=weight.device)
    return why_not_attention(
        layer,
        like_query,
        like_query,
        like_query,
        dropout=_number(layer, _DROPOUTS) or 0.0,
        softcap=_number(layer, _SOFTCAPS),
    )


def _number(layer: torch.nn.Module, names: tuple[str, ...]) -> float | None:
    """The first of these attributes, a number or a dropout module."""
    for name in names:
        found = getattr(layer, name, None)
        found = getattr(found, "p", found)
        if isinstance(found, int | float):
            return found
    return None
