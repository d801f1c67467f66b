"""softmax_topk as the router of mixture-of-experts models of Hugging Face transformers.

    from megasoftmax.integrations.routers import patch_routers

    patched = patch_routers(model)      # until patched.unpatch()
    with patch_routers(model):          # or until the end of the block
        model(input_ids)

The routers of Mixtral, Qwen-MoE and their kin take a softmax over all experts in float32, pick the
K largest and may divide by their sum; that of gpt-oss takes a softmax over the K largest logits.
Either is one `megasoftmax.softmax_topk`. Logits, scores and experts are the model's own, gradients
too, but where two experts have the same probability: softmax_topk then decides by the logits, and
between equal ones by the lower index, where torch.topk leaves it open. Parameters, hooks and what
records router logits see no difference.
"""

from types import MethodType
from typing import Any, NamedTuple, Self

import torch

import megasoftmax


class _Rule(NamedTuple):
    """What a router does after its linear layer."""

    renormalize: bool | None = True
    """Whether the scores of a token sum to 1; None: as the router's `norm_topk_prob` says."""
    dtype: torch.dtype | None = None
    """Of the scores; None: that of the logits."""


_BY_CONFIG = _Rule(renormalize=None)
_RULES = {
    "FlexOlmoTopKRouter": _BY_CONFIG,
    "GptOssTopKRouter": _Rule(),
    "MellumTopKRouter": _BY_CONFIG,
    "MiniMaxTopKRouter": _Rule(dtype=torch.float32),
    "MixtralTopKRouter": _Rule(dtype=torch.float32),
    "OlmoeTopKRouter": _BY_CONFIG,
    "Qwen2MoeTopKRouter": _BY_CONFIG,
    "Qwen3MoeTopKRouter": _BY_CONFIG,
    "Qwen3NextTopKRouter": _BY_CONFIG,
    "Qwen3OmniMoeTalkerTextTopKRouter": _BY_CONFIG,
    "Qwen3OmniMoeTextTopKRouter": _Rule(),
    "Qwen3OmniMoeThinkerTextTopKRouter": _BY_CONFIG,
    "Qwen3VLMoeTextTopKRouter": _Rule(),
    "Qwen3_5MoeTopKRouter": _Rule(),
}


class PatchedRouters:
    """The routers that one call of `patch_routers` has changed; a context manager."""

    def __init__(self, routers: dict[str, torch.nn.Module]) -> None:
        self._routers = routers

    @property
    def names(self) -> tuple[str, ...]:
        """Of the routers, in the model."""
        return tuple(self._routers)

    def unpatch(self) -> None:
        """Give the routers their own forward back; calling it twice is harmless.

        Raises:
            RuntimeError: a forward was replaced since, by offloading for example; nothing was
                restored.
        """
        for name, router in self._routers.items():
            if not is_patched(router):
                raise RuntimeError(
                    f"unpatch: expected {name} with the forward of patch_routers still, got one "
                    "that was replaced; undo first what was done after"
                )
        for own_router in self._routers.values():
            del own_router.forward, own_router.megasoftmax_rule
        self._routers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unpatch()


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
    routers = find_routers(model)
    if not routers:
        raise ValueError(
            f"model: expected a router among {', '.join(_RULES)}, got {type(model).__name__} "
            "without one"
        )
    patched: dict[str, Any] = {}
    for name, router in routers.items():
        if "forward" not in vars(router):
            patched[name] = router
        elif not is_patched(router):
            raise ValueError(
                f"model: expected {name} with the forward of its class, got one that was replaced"
            )
    for own_router in patched.values():
        own_router.megasoftmax_rule = _rule_of(own_router)
        own_router.forward = MethodType(_forward, own_router)
    return PatchedRouters(patched)


def find_routers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The routers whose rule is known, patched or not, by their names in the model."""
    return {name: module for name, module in model.named_modules() if _rule_of(module)}


def is_patched(router: torch.nn.Module) -> bool:
    """Whether a router calls `megasoftmax.softmax_topk`."""
    return getattr(vars(router).get("forward"), "__func__", None) is _forward


def _rule_of(module: torch.nn.Module) -> _Rule | None:
    """That of the class whose forward the module has: subclasses may bring their own."""
    forward: Any = getattr(type(module), "forward", None)
    if not getattr(forward, "__module__", "").startswith("transformers.models."):  # or scripted
        return None
    return _RULES.get(forward.__qualname__.removesuffix(".forward"))


def _forward(
    self: Any, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [tokens, experts], scores and experts [tokens, K], of hidden states [..., width]."""
    rule: _Rule = self.megasoftmax_rule
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    bias = getattr(self, "bias", None)
    logits = torch.nn.functional.linear(hidden_states, self.weight, bias)
    scores, experts = megasoftmax.softmax_topk(
        logits,
        self.top_k,
        renormalize=self.norm_topk_prob if rule.renormalize is None else rule.renormalize,
        dtype=rule.dtype or logits.dtype,
    )
    return logits, scores, experts
