"""megasoftmax in place of what the layers of Megatron-core call."""

from megatron.core.fusions import fused_softmax
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as moe_router

import megasoftmax
from megasoftmax.integrations.megatron.routers import through_softmax_topk
from megasoftmax.integrations.replacing import Change, Replaced


def apply_megasoftmax_to_megatron(*, softmax: bool = True, router: bool = True) -> Replaced:
    """Let the layers of Megatron-core call megasoftmax, until that is undone.

    Models that are built already keep the softmax that they have; routers change at once. What was
    applied before stays as it is and belongs to whoever applied it.

    Args:
        softmax: `megasoftmax.FusedScaleMaskSoftmax` for Megatron's class in `DotProductAttention`
            and in `megatron.core.fusions.fused_softmax`. Where `config.masked_softmax_fusion` is
            False, which is its default, it computes what Megatron's computes, in plain torch.
        router: `topk_routing_with_score_function` through `megasoftmax.softmax_topk`, where the
            score function is a softmax, before top-k or after, and experts are not chosen by
            groups, an own bias, a replay or TransformerEngine: those, and float64, remain
            Megatron's. Of equal logits the first is chosen, where Megatron's leaves it open; and
            where half-precision probabilities are equal after rounding, the logits decide.

    Returns:
        What undoes what this call has done.
    """
    changes = []
    if softmax:
        name, ours = "FusedScaleMaskSoftmax", megasoftmax.FusedScaleMaskSoftmax
        changes += [Change(module, name, ours) for module in (dot_product_attention, fused_softmax)]
    if router:
        name = "topk_routing_with_score_function"
        for module in (moe_utils, moe_router):
            changes.append(Change(module, name, through_softmax_topk(getattr(module, name))))
    return Replaced(changes)
