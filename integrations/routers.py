"""softmax_topk as the router of mixture-of-experts models of Hugging Face transformers.

    from megasoftmax.integrations.routers import patch_routers

    patched = patch_routers(model)      # until patched.unpatch()
    with patch_routers(model):          # or until the end of the block
        model(input_ids)

The routers of Mixtral, Qwen-MoE and their kin take a softmax over all experts in float32, pick the
K largest and may divide by their sum; that of gpt-oss takes a softmax over the K largest logits.
Those of DeepSeek-V3, GLM-4.5 and their kin take sigmoids, and choose by them and a bias; they stay
as they are where they limit experts to groups. Each is one `megasoftmax.softmax_topk`. Logits,
scores, experts and gradients are those of the model, except where two experts have the same
probability: softmax_topk then decides by the logits, and between equal logits by the lower index,
while torch.topk leaves the choice open. DeepSeek-V3's kind gives the experts of a token in order.
Where all its sigmoids are 0 both give scores of 0. Parameters,
hooks and what records router logits see no difference.
"""

from types import MethodType
from typing import Any, NamedTuple

import torch

import megasoftmax
from megasoftmax.integrations.replacing import Change, Patched


class _Rule(NamedTuple):
    """What a router does after its linear layer."""

    renormalize: bool | None = True
    """Whether the scores of a token sum to 1; None: as the router's `norm_topk_prob` says."""
    dtype: torch.dtype | None = None
    """Of the scores; None: that of the logits."""
    of_deepseek: bool = False
    """Whether scores are sigmoids, chosen with `e_score_correction_bias`, and then scaled."""


_BY_CONFIG = _Rule(renormalize=None)
_DEEPSEEK = _Rule(renormalize=None, dtype=torch.float32, of_deepseek=True)
_RULES = {
    "AXK1TopkRouter": _DEEPSEEK,
    "BailingHybridTopkRouter": _DEEPSEEK,
    "DeepseekV32TopkRouter": _DEEPSEEK,
    "DeepseekV3TopkRouter": _DEEPSEEK,
    "Dots1TopkRouter": _DEEPSEEK,
    "Dots3NoteTextTopkRouter": _DEEPSEEK,
    "ExaoneMoeTopkRouter": _DEEPSEEK,
    "FlexOlmoTopKRouter": _BY_CONFIG,
    "Glm4MoeLiteTopkRouter": _DEEPSEEK,
    "Glm4MoeTopkRouter": _DEEPSEEK,
    "Glm4vMoeTextTopkRouter": _DEEPSEEK,
    "Glm5NextTextTopkRouter": _DEEPSEEK,
    "GlmMoeDsaTopkRouter": _DEEPSEEK,
    "GptOssTopKRouter": _Rule(),
    "HYV4TopkRouter": _DEEPSEEK,
    "HYV4VLTopkRouter": _DEEPSEEK,
    "KimiLinearTopkRouter": _DEEPSEEK,
    "MellumTopKRouter": _BY_CONFIG,
    "MiMoV2FlashTopkRouter": _DEEPSEEK,
    "MiniMaxTopKRouter": _Rule(dtype=torch.float32),
    "MixtralTopKRouter": _Rule(dtype=torch.float32),
    "NemotronHTopkRouter": _DEEPSEEK,
    "OlmoeTopKRouter": _BY_CONFIG,
    "Qwen2MoeTopKRouter": _BY_CONFIG,
    "Qwen3MoeTopKRouter": _BY_CONFIG,
    "Qwen3NextTopKRouter": _BY_CONFIG,
    "Qwen3OmniMoeTalkerTextTopKRouter": _BY_CONFIG,
    "Qwen3OmniMoeTextTopKRouter": _Rule(),
    "Qwen3OmniMoeThinkerTextTopKRouter": _BY_CONFIG,
    "Qwen3VLMoeTextTopKRouter": _Rule(),
    "Qwen3_5MoeTopKRouter": _Rule(),
    "SolarOpenTopkRouter": _DEEPSEEK,
}


class PatchedRouters(Patched):
    """The routers that one call of `patch_routers` has changed; a context manager."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the routers, in the model."""
        return tuple(dict.fromkeys(change.where for change, _ in self._replaced))


def patch_routers(model: torch.nn.Module) -> PatchedRouters:
    """Let the routers of `model` call `megasoftmax.softmax_topk`, until they are unpatched.

    Routers that are patched already stay as they are and belong to whoever patched them.

    Args:
        model: has routers of transformers 5 among its submodules.

    Returns:
        What unpatches those that this call has patched.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it has no router whose rule is known, or another forward than that of its class
            was given to one (kernels from the hub and offloading do that); nothing was changed.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    return PatchedRouters(changes_of_routers(model))


def changes_of_routers(model: torch.nn.Module) -> list[Change]:
    """What `patch_routers` changes, or the ValueError that it raises."""
    routers = find_routers(model)
    if not routers:
        raise ValueError(
            f"model: expected a router among {', '.join(_RULES)}, got {type(model).__name__} "
            "without one"
        )
    changes = []
    for name, router in routers.items():
        if is_patched(router):
            continue
        if "forward" in vars(router):
            raise ValueError(
                f"model: expected {name} with the forward of its class, got one that was replaced"
            )
        changes += [
            Change(router, "megasoftmax_rule", _rule_of(router), name),
            Change(router, "forward", MethodType(_forward, router), name),
        ]
    return changes


def find_routers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The routers whose rule is known, patched or not, by their names in the model."""
    return {name: module for name, module in model.named_modules() if _rule_of(module)}


def routers_left(model: torch.nn.Module) -> dict[str, str]:
    """Why each router of transformers whose rule is not known stays as it is, by its name."""
    left = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if not kind.endswith("Router") or _rule_of(module) or not _is_of_transformers(module):
            continue
        if _has_groups(module):
            groups = f"{module.topk_group} of {module.num_group} groups"
            left[name] = f"{kind} chooses among the experts of {groups}"
        elif hasattr(module, "e_score_correction_bias"):
            left[name] = f"{kind} chooses experts with a bias that their scores do not have"
        else:
            left[name] = f"{kind} has another rule than softmax_topk, or one that is not known"
    return left


def is_patched(router: torch.nn.Module) -> bool:
    """Whether a router calls `megasoftmax.softmax_topk`."""
    return getattr(vars(router).get("forward"), "__func__", None) is _forward


def _rule_of(module: torch.nn.Module) -> _Rule | None:
    """The rule of the class whose forward the module has: subclasses may have their own."""
    if not _is_of_transformers(module):
        return None
    forward: Any = type(module).forward
    rule = _RULES.get(forward.__qualname__.removesuffix(".forward"))
    return None if rule is not None and rule.of_deepseek and _has_groups(module) else rule


def _has_groups(router: Any) -> bool:
    """Whether a router of DeepSeek-V3's kind takes experts of some groups alone."""
    return getattr(router, "topk_group", 1) != getattr(router, "num_group", 1)


def _is_of_transformers(module: torch.nn.Module) -> bool:
    """Whether its class has a forward of transformers; that of a scripted module has none."""
    forward = getattr(type(module), "forward", None)
    return getattr(forward, "__module__", "").startswith("transformers.models.")


def _forward(
    self: Any, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [tokens, experts], scores and experts [tokens, K], of hidden states [..., width]."""
    rule: _Rule = self.megasoftmax_rule
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    if rule.of_deepseek:
        logits = torch.nn.functional.linear(hidden_states.float(), self.weight.float())
        scores, experts = megasoftmax.softmax_topk(
            logits,
            self.top_k,
            score="sigmoid",
            selection_bias=self.e_score_correction_bias.detach(),
            renormalize=self.norm_topk_prob,
            dtype=rule.dtype,
        )
        return logits, scores * self.routed_scaling_factor, experts
    bias = getattr(self, "bias", None)
    logits = torch.nn.functional.linear(hidden_states, self.weight, bias)
    scores, experts = megasoftmax.softmax_topk(
        logits,
        self.top_k,
        renormalize=self.norm_topk_prob if rule.renormalize is None else rule.renormalize,
        dtype=rule.dtype or logits.dtype,
    )
    return logits, scores, experts
