"""Switch a model of Hugging Face transformers to megasoftmax, and back.

    from megasoftmax.integrations.patching import patch_model

    patched = patch_model(model)        # until patched.unpatch()
    print(patched)                      # what runs now, and why
    with patch_model(model):            # or until the end of the block
        model(input_ids)

One call switches the attention of all the models that the model consists of, also of those that
`set_attn_implementation` skips (T5's encoder and decoder before transformers 5.20); layers of the
families that have no attention interface (`families`); and routers (`routers`).

`report` says of every attention layer and router what it runs. "attention" is fused and writes no
scores; "SDPA" is `megasoftmax.attention` too, which takes torch's scaled_dot_product_attention on a
CPU; "softmax" is matmul and the fused softmax; "router" is softmax_topk; "unchanged" is what the
model ran before. "SDPA", "softmax" and "unchanged" come with the reason. A class is taken for
attention where its forward uses transformers' attention interface or, as transformers itself
guesses, by its name.

What may be switched can be said in the configuration, where `save_pretrained` keeps it:

    configure(model.config, attention=False)    # config.megasoftmax = {"attention": False, ...}

The configuration is shared: another model that was built from the same object is switched as well.
"""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

import megasoftmax
from megasoftmax.integrations.names import NAME, NAMES, SOFTMAX_NAME, asked_name, is_disabled
from megasoftmax.integrations.products import like_query
from megasoftmax.integrations.replacing import Change, PatchedParts, Served
from megasoftmax.integrations.routers import (
    changes_of_routers,
    find_routers,
    is_patched,
    routers_left,
)
from megasoftmax.integrations.serving import (
    Layer,
    changes_for,
    is_attention,
    layers_of,
    refused_of,
    why_not_served,
)
from megasoftmax.integrations.transformers import register, why_not_attention

_FLAGS = ("softmax", "attention", "router")

# What layers call the width of a head.
_HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim")


class PatchedModel(PatchedParts):
    """What one call of `patch_model` has changed; a context manager."""

    @property
    def report(self) -> dict[str, Served]:
        """What every attention layer and router of the model runs at present, by its name.

        Found without a call. It holds for calls in the type of the weights, or under the autocast
        that is on now, without dropout or a bias that learns, that do not ask for probabilities.
        """
        found = {
            layer.name: self._served(layer)
            for layer in layers_of(self._model)
            if is_attention(layer.module)
        }
        for name, router in find_routers(self._model).items():
            found[name] = Served("router") if is_patched(router) else self._unchanged(name)
        for name, why in routers_left(self._model).items():
            found[name] = Served("unchanged", why)
        return found

    def undo(self) -> None:
        super().undo()
        self._why_not = {}

    def _served(self, layer: Layer) -> Served:
        implementation = layer.config._attn_implementation
        name = asked_name(implementation)
        if layer.why_not is not None:
            return self._unchanged(layer.name, layer.why_not)
        if name is None:
            return self._unchanged(layer.name, f"runs {implementation!r}")
        if is_disabled():
            return self._unchanged(layer.name)
        if name == SOFTMAX_NAME:
            return Served("softmax", f"{SOFTMAX_NAME} was asked for")
        reasons = _why_not_attention(layer.module)
        return Served.by(reasons, otherwise="softmax")

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
        strict: raise where no attention layer of a model can be served, or one of a family that
            is served otherwise, or a router. Otherwise it stays as it is, and `report` says so. A
            layer without the attention interface beside others that have it, as the pooling head
            of SigLIP, stays as it is in any case, as it does for every attention implementation.
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
    if implementation not in NAMES:
        raise ValueError(
            f"implementation: expected {NAME!r} or {SOFTMAX_NAME!r}, got {implementation!r}"
        )
    flags = _flags_of(model)
    if is_disabled():
        return PatchedModel(model, [], {})
    layers = list(layers_of(model)) if flags["softmax"] else []
    why_not = why_not_served(layers)
    if strict and (refused := refused_of(layers, why_not)):
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in refused.items())
        raise ValueError(
            f"model: expected attention that megasoftmax can serve, got {type(model).__name__}; "
            f"strict=False leaves the layers that it cannot serve as they are ({len(refused)}):\n"
            f"{reasons}"
        )
    name = implementation if flags["attention"] else SOFTMAX_NAME
    changes = changes_for(layers, why_not, lambda config: name)
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
        "model: expected a PreTrainedModel or a module that contains one, got "
        f"{type(model).__name__}; megasoftmax.integrations.folding has patch_model for Boltz, "
        "OpenFold-3 and Protenix, and a layer of your own can call megasoftmax.attention"
    )


def _why_flagged(model: torch.nn.Module, flags: dict[str, bool]) -> dict[str, str]:
    """Why layers and routers that config.megasoftmax excludes are unchanged."""
    excluded: list[str] = []
    if not flags["softmax"]:
        excluded += (layer.name for layer in layers_of(model))
    if not flags["router"]:
        excluded += find_routers(model)
    return dict.fromkeys(excluded, "config.megasoftmax says so")


def _changes_of_routers(
    model: torch.nn.Module, strict: bool
) -> tuple[list[Change], dict[str, str]]:
    """Changes of routers, and the reason for each router that is left as it is."""
    routers = find_routers(model)
    if not routers:
        return [], {}
    try:
        return changes_of_routers(model), {}
    except ValueError as error:
        if strict:
            raise
        return [], dict.fromkeys(routers, str(error))


def _why_not_attention(layer: torch.nn.Module) -> megasoftmax.Reasons:
    """Reasons against fused attention, found with tensors like those that the layer would make."""
    head_dim = next((getattr(layer, name) for name in _HEAD_DIMS if hasattr(layer, name)), 64)
    query = like_query(layer, head_dim)
    has_sinks = getattr(layer, "sinks", None) is not None
    return why_not_attention(
        layer,
        query,
        query,
        query,
        softcap=getattr(layer, "attn_logit_softcapping", None),
        s_aux=query.new_empty(1) if has_sinks else None,
    )
