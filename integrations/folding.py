"""Attention layers of Boltz, OpenFold-3 and Protenix, switched to megasoftmax and back.

    from megasoftmax.integrations.folding import patch_model

    patched = patch_model(model)        # until patched.unpatch()
    print(patched)                      # what runs now, and why

`patch_model` needs neither cuEquivariance nor DeepSpeed, and serves every flag by which these
layers choose an implementation. It takes the place of

| package | class | computes |
|---|---|---|
| boltz | `attentionv2.AttentionPairBias` | attention of samples that share a bias of pairs |
| boltz | `triangular_attention.primitives.Attention` | triangle attention |
| openfold3 | `primitives.attention.Attention` | all attention but that of `GlobalAttention` |
| protenix | `triangular.layers.Attention` | triangle attention |

The projections, the gate and the weights are those of the layers. What differs:

* A query whose keys are all masked, such as a pair of padding, gets zeros from attention. The
  layers add -1e9 or -1e6 to all its logits, and what rounding leaves of them decides.
* Half precision: logits and probabilities are not rounded between the products.
* In a layer of OpenFold-3 or Protenix the first of two biases is taken for the mask that all their
  modules pass. On a CPU another value is an error, and on a GPU a failed device assertion.

Boltz computes pair bias attention in float32, whatever the type of the model. So does the layer
here, unless `upcast=False`, or Boltz itself is asked for flash attention.
"""

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import megasoftmax
from megasoftmax.integrations.float_masks import bias_and_mask
from megasoftmax.integrations.names import is_disabled
from megasoftmax.integrations.products import like_query
from megasoftmax.integrations.replacing import Change, PatchedParts, Served

_NOT_SERVED = {
    "boltz.model.layers.attention.AttentionPairBias": "Boltz-1's; it computes attention itself",
    "openfold3.core.model.primitives.attention.GlobalAttention": "averages its queries first",
    "protenix.model.modules.primitives.Attention": "calls torch's scaled_dot_product_attention",
}


class _PairBias(nn.Module):
    """Boltz's attention of samples, of which `multiplicity` neighbours share a bias."""

    needs = ("proj_q", "proj_k", "proj_v", "proj_z", "proj_g", "proj_o", "head_dim")
    upcast = True
    num_heads: int
    head_dim: int
    proj_q: Callable[[Tensor], Tensor]
    proj_k: Callable[[Tensor], Tensor]
    proj_v: Callable[[Tensor], Tensor]
    proj_z: Callable[[Tensor], Tensor]
    proj_g: Callable[[Tensor], Tensor]
    proj_o: Callable[[Tensor], Tensor]

    def forward(
        self,
        s: Tensor,
        z: Tensor,
        mask: Tensor,
        k_in: Tensor,
        multiplicity: int = 1,
        use_flash_attn: bool = False,
    ) -> Tensor:
        def heads_of(projected: Tensor) -> Tensor:
            projected = projected.unflatten(0, (-1, multiplicity))
            projected = projected.unflatten(-1, (self.num_heads, self.head_dim))
            projected = projected.transpose(-2, -3)
            return projected.float() if self.upcast and not use_flash_attn else projected

        query, key, value = (
            heads_of(projection(tensor))
            for projection, tensor in ((self.proj_q, s), (self.proj_k, k_in), (self.proj_v, k_in))
        )
        bias = self.proj_z(z)[:, None]
        excluded = (mask < 1).expand(len(s), -1).unflatten(0, (-1, multiplicity))[:, :, None, None]
        with torch.autocast(s.device.type, enabled=False):
            output = megasoftmax.attention(query, key, value, bias=bias, mask=excluded)
        output = output.transpose(-2, -3).flatten(-2).flatten(0, 1)
        gate = self.proj_g(s).sigmoid()
        return self.proj_o(gate * output.to(gate.dtype))


class _OfOpenFold(nn.Module):
    """What OpenFold's attention and its descendants in Boltz and Protenix have in common."""

    needs = ("_prep_qkv", "_wrap_up", "c_hidden")
    c_hidden: int
    _prep_qkv: Callable[..., tuple[Tensor, Tensor, Tensor]]
    _wrap_up: Callable[[Tensor, Tensor], Tensor]

    def attend(
        self,
        q_x: Tensor,
        kv_x: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        in_float32: bool = False,
    ) -> Tensor:
        tensors = self._prep_qkv(q_x, kv_x, apply_scale=False)
        if in_float32:
            with torch.autocast(q_x.device.type, enabled=False):
                upcast = (each.float() for each in tensors)
                output = megasoftmax.attention(*upcast, bias=bias, mask=mask)
        else:
            output = megasoftmax.attention(*tensors, bias=bias, mask=mask)
        return self._wrap_up(output.transpose(-2, -3).to(tensors[0].dtype), q_x)


class _BoltzTriangle(_OfOpenFold):
    def forward(
        self,
        q_x: Tensor,
        kv_x: Tensor,
        tri_bias: Tensor,
        mask_bias: Tensor,
        mask: Tensor,
        use_kernels: bool = False,
        use_sdpa: bool = False,
    ) -> Tensor:
        return self.attend(q_x, kv_x, tri_bias, ~mask.bool())


class _OpenFold3(_OfOpenFold):
    def forward(
        self,
        q_x: Tensor,
        kv_x: Tensor,
        biases: list[Tensor] | None = None,
        use_deepspeed_evo_attention: bool = False,
        use_cueq_triangle_kernels: bool = False,
        use_triton_triangle_kernels: bool = False,
        use_lma: bool = False,
        lma_q_chunk_size: int = 0,
        lma_kv_chunk_size: int = 0,
        use_high_precision: bool = False,
    ) -> Tensor:
        bias, mask = bias_and_mask(biases or [], first_is_mask=True)
        return self.attend(q_x, kv_x, bias, mask, use_high_precision)


class _Protenix(_OfOpenFold):
    def forward(
        self,
        q_x: Tensor,
        kv_x: Tensor,
        biases: list[Tensor] | None = None,
        triangle_attention: str = "torch",
    ) -> Tensor:
        return self.attend(q_x, kv_x, *bias_and_mask(biases or [], first_is_mask=True))


_Ours = _PairBias | _OfOpenFold  # `needs` names what a layer must have
_SERVED: dict[str, type[_Ours]] = {
    "boltz.model.layers.attentionv2.AttentionPairBias": _PairBias,
    "boltz.model.layers.triangular_attention.primitives.Attention": _BoltzTriangle,
    "openfold3.core.model.primitives.attention.Attention": _OpenFold3,
    "protenix.model.triangular.layers.Attention": _Protenix,
}


class PatchedModel(PatchedParts):
    """What one call of `patch_model` has changed; a context manager."""

    @property
    def report(self) -> dict[str, Served]:
        """What every attention layer of these packages in the model runs at present, by its name.

        It holds for calls in the type of the weights, or under the autocast that is on now, if no
        bias needs a gradient. "SDPA" is torch's scaled_dot_product_attention, which
        `megasoftmax.attention` takes on a CPU.
        """
        return {
            name: _served(layer, self._why_not.get(name, "not patched"))
            for name, layer in _layers_of(self._model)
        }


def patch_model(model: nn.Module, *, strict: bool = True, upcast: bool = True) -> PatchedModel:
    """Let the attention layers of the table above run megasoftmax, until they are unpatched.

    Layers that are patched already stay as they are and belong to whoever patched them.

    Args:
        model: a module that contains such layers.
        strict: raise where one of them cannot be served. Otherwise it stays as it is, and `report`
            says so. Attention layers of these packages that are not in the table stay in any case.
        upcast: compute Boltz's pair bias attention in float32, as Boltz does; False: in the type
            of its projections.

    Returns:
        What unpatches the model and reports on it. With MEGASOFTMAX_DISABLE=1 in the environment
        nothing was changed.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it has none of these layers; with `strict`, one of them cannot be served: all
            are named, with the reasons. Nothing was changed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    if is_disabled():
        return PatchedModel(model, [], {})
    changes = []
    refused = {}
    for name, layer in _layers_of(model):
        ours = _SERVED.get(_name_of(type(layer)))
        if ours is None:
            continue
        if reason := _why_not(layer, ours):
            refused[name] = reason
            continue
        changes.append(Change(layer, "__class__", _subclass(ours, type(layer)), name))
        if ours is _PairBias and not upcast:
            changes.append(Change(layer, "upcast", False, name))
    if strict and refused:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in refused.items())
        raise ValueError(
            f"model: expected layers that can be served, got {type(model).__name__}; strict=False "
            f"leaves those that cannot as they are:\n{reasons}"
        )
    if not any(isinstance(layer, _Ours) for layer in model.modules()) and not changes:
        raise ValueError(
            f"model: expected one with {', '.join(_SERVED)}, got {type(model).__name__}"
        )
    return PatchedModel(model, changes, refused)


# One class for all patches, so that compiled code stays valid.
_subclasses: dict[tuple[type, type], type] = {}


def _subclass(ours: type, layer_class: type) -> type:
    key = ours, layer_class
    if key not in _subclasses:
        _subclasses[key] = type(f"Megasoftmax{layer_class.__name__}", key, {})
    return _subclasses[key]


def _name_of(layer_class: type) -> str:
    return f"{layer_class.__module__}.{layer_class.__qualname__}"


def _layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every layer of one of the known classes, or of a subclass, ours included."""
    for name, module in model.named_modules():
        names = {_name_of(each) for each in type(module).__mro__}
        if names & (_SERVED.keys() | _NOT_SERVED.keys()):
            yield name, module


def _why_not(layer: nn.Module, ours: type[_Ours]) -> str | None:
    if "forward" in vars(layer):
        return "its forward was replaced"
    for name in ours.needs:
        if not hasattr(layer, name):
            return f"it has no {name}, which versions that are known have"
    known = inspect.signature(ours.forward).parameters
    for name in inspect.signature(type(layer).forward).parameters:
        if name not in known:
            return f"its forward takes {name}, which versions that are known do not"
    return None


def _served(layer: nn.Module, why_not: str) -> Served:
    if not isinstance(layer, _Ours):
        why_not = "MEGASOFTMAX_DISABLE=1" if is_disabled() else why_not
        return Served("unchanged", _NOT_SERVED.get(_name_of(type(layer)), why_not))
    if isinstance(layer, _PairBias):
        query = like_query(layer, layer.head_dim, torch.float32 if layer.upcast else None)
    else:
        query = like_query(layer, layer.c_hidden)
    reasons = megasoftmax.why_not_fused(megasoftmax.attention, query, query, query)
    return Served.by(reasons, otherwise="reference")
