"""megasoftmax in place of what the layers of Megatron-core call."""

import gc
import warnings
from typing import Any

from megatron.core.fusions import fused_softmax
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as moe_router

import megasoftmax
from megasoftmax.integrations.megatron.routers import ROUTED_WHERE, through_softmax_topk
from megasoftmax.integrations.replacing import Change, Replaced, Reports, Served

_SOFTMAX = "FusedScaleMaskSoftmax"
_ROUTING = "topk_routing_with_score_function"
_NOT_FUSED = (
    "masked_softmax_fusion is False, Megatron-core's default: the layer computes in plain torch "
    "what Megatron's softmax computes"
)
_BUILT_BEFORE = "built before apply_megasoftmax_to_megatron, with Megatron's class"
_Megatrons = fused_softmax.FusedScaleMaskSoftmax


class SoftmaxOfLayer(megasoftmax.FusedScaleMaskSoftmax):
    """`megasoftmax.FusedScaleMaskSoftmax` of a layer that Megatron-core has built."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.scaled_masked_softmax_fusion:
            warnings.warn(
                f"apply_megasoftmax_to_megatron: {_NOT_FUSED}. Set "
                "TransformerConfig(masked_softmax_fusion=True), or "
                "apply_megasoftmax_to_megatron(softmax=False)",
                RuntimeWarning,
                stacklevel=2,
            )


class AppliedToMegatron(Reports, Replaced):
    """What one call of `apply_megasoftmax_to_megatron` has changed; a context manager."""

    def __init__(self, changes: list[Change], softmax: bool, router: bool) -> None:
        super().__init__(changes)
        self._is_asked = {_SOFTMAX: softmax, _ROUTING: router}

    @property
    def report(self) -> dict[str, Served]:
        """What Megatron's layers run at present, by the name that they call.

        A layer keeps the class of softmax that it was built with. So the first entry says what
        newly built layers get, and layers that run something else have entries of their own. Layers
        that `gc.freeze` has hidden are not found.
        """
        found = {}
        for name, served in (
            (_SOFTMAX, Served("softmax")),
            (_ROUTING, Served("router", ROUTED_WHERE)),
        ):
            why = "undone" if self._is_asked[name] else f"{served.runs}=False"
            found[name] = served if _is_applied(name) else Served("unchanged", why)
        counts = {_Megatrons: 0, True: 0, False: 0}  # ours by whether they are fused
        for layer in gc.get_objects():
            if type(layer) is SoftmaxOfLayer:
                counts[layer.scaled_masked_softmax_fusion] += 1
            elif type(layer) is _Megatrons:
                counts[_Megatrons] += 1
        others = [("", False, Served("unchanged", _NOT_FUSED))]
        if _is_applied(_SOFTMAX):
            others += [(", built before", _Megatrons, Served("unchanged", _BUILT_BEFORE))]
        else:
            others += [(", built before", True, Served("softmax", "built while it was applied"))]
        for which, kind, served in others:
            if counts[kind]:
                layers = f"{counts[kind]} of {sum(counts.values())} layers"
                found[f"{_SOFTMAX} of {layers}{which}"] = served
        return found


def _is_applied(name: str) -> bool:
    if name == _SOFTMAX:
        return dot_product_attention.FusedScaleMaskSoftmax is SoftmaxOfLayer
    return hasattr(moe_router.topk_routing_with_score_function, "is_megasoftmax")


def apply_megasoftmax_to_megatron(
    *, softmax: bool = True, router: bool = True
) -> AppliedToMegatron:
    """Let the layers of Megatron-core call megasoftmax, until that is undone.

    Models that are built already keep the softmax that they have; routers change at once. What was
    applied before stays as it is and belongs to whoever applied it.

    Args:
        softmax: `megasoftmax.FusedScaleMaskSoftmax` for Megatron's class in `DotProductAttention`
            and in `megatron.core.fusions.fused_softmax`. Where `config.masked_softmax_fusion` is
            False, which is its default, it computes what Megatron's computes, in plain torch, and
            a RuntimeWarning says so when the layer is built.
        router: `topk_routing_with_score_function` through `megasoftmax.softmax_topk`, where the
            score function is a softmax, before top-k or after, and experts are not chosen by
            groups, an own bias, a replay or TransformerEngine: those, and float64, remain
            Megatron's. Of equal logits the first is chosen, while Megatron's leaves the choice
            open. Where half-precision probabilities are equal after rounding, the logits decide.

    Returns:
        What undoes what this call has done, and reports on it: `print(applied)`.
    """
    changes = []
    if softmax:
        changes += [
            Change(module, _SOFTMAX, SoftmaxOfLayer)
            for module in (dot_product_attention, fused_softmax)
        ]
    if router:
        changes += [
            Change(module, _ROUTING, through_softmax_topk(getattr(module, _ROUTING)))
            for module in (moe_utils, moe_router)
        ]
    return AppliedToMegatron(changes, softmax, router)
