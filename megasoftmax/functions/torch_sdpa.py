"""Attention on a CPU by torch's own functions, where they compute the same: by its attention, or
for a bias that learns by its products and softmax.
"""

from torch import Tensor

from megasoftmax import autograd, dispatch
from megasoftmax.biases import RelativeBias
from megasoftmax.dispatch import Reason
from megasoftmax.functions import leading
from megasoftmax.functions.calls import int32_bounds, with_rank
from megasoftmax.masks import TileMask
from megasoftmax.options import AttentionOptions
from megasoftmax.reference.attention import repeated
from megasoftmax.reference.softmax import excluded_by_ranges, excluded_by_window, union

MAX_KEPT = 2**22  # weights of a call, 16 MiB in float32; the backward pass computes more again


def reasons_against_sdpa(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> tuple[Reason, ...]:
    """Why torch's scaled_dot_product_attention does not compute an `attention` that is not fused.

    Takes tensors after autocast. Checks nothing. Off a CPU the device is the only reason.
    """
    device = dispatch.sdpa_device(query)
    if device is not None:
        return (device,)
    bias = options.bias
    table = bias.table if isinstance(bias, RelativeBias) else bias
    added = leading.entries(options, query.shape[:-3])
    if options.window is not None or _needs_mask(options.causal, query, key):
        added.append((1, 1))
    return dispatch.reasons_against_sdpa(query, key, value, table, added, options)


def _needs_mask(causal: bool, query: Tensor, key: Tensor) -> bool:
    """Whether SDPA needs a mask for causality: it aligns top-left, and one query sees all keys."""
    return causal and query.shape[-2] not in (1, key.shape[-2])


def keeps_weights(query: Tensor, key: Tensor, bias: Tensor | RelativeBias | None) -> bool:
    """Whether weights are kept for the gradient of a bias: it has an entry for each pair of a head,
    and there are at most MAX_KEPT weights.
    """
    batches, heads, queries, _ = query.shape
    keys = key.shape[2]
    return (
        isinstance(bias, Tensor)
        and bias.shape[-2:] == (queries, keys)
        and batches * heads * queries * keys <= MAX_KEPT
    )


def attention_by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    options: AttentionOptions,
    keeps: bool,
) -> Tensor | None:
    """The output of a merged call by torch's own attention; None where that differs.

    keeps: `keeps_weights` is True and the bias learns.
    """
    if reasons_against_sdpa(query, key, value, options):
        return None
    bias, mask, visible = options.bias, options.mask, options.visible
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None:
        mask = mask.to_mask(queries, keys) if isinstance(mask, TileMask) else mask
        mask = repeated(mask, query.shape[0]) if mask.dim() == 4 else mask
    # The way that keeps weights has no flag of causality.
    needs_mask = _needs_mask(options.causal, query, key) or (keeps and options.causal)
    window = (-1, -1) if options.window is None else options.window
    bounds = (None, None) if visible is None else int32_bounds(visible, keys)
    excluded = union(
        mask,
        excluded_by_window(queries, keys, needs_mask, *window, query.device),
        excluded_by_ranges(*bounds, keys),
    )
    dense = bias.dense(queries, keys) if isinstance(bias, RelativeBias) else bias
    if keeps:
        assert dense is not None
        pairs = dense[(None,) * (4 - dense.dim())], with_rank(excluded, 4)
        return autograd.sdpa.attention_keeping_weights(query, key, value, *pairs, scale)
    added = autograd.sdpa.added_to_scores(query, dense, excluded)
    return autograd.sdpa.attention(
        query, key, value, added, options.causal and queries == keys, scale
    )
