"""Attention on a CPU by torch's scaled_dot_product_attention, where that computes the same."""

from torch import Tensor

from megasoftmax import autograd, dispatch
from megasoftmax.biases import RelativeBias
from megasoftmax.dispatch import Reason
from megasoftmax.functions import leading
from megasoftmax.functions.calls import int32_bounds
from megasoftmax.masks import TileMask
from megasoftmax.options import AttentionOptions
from megasoftmax.reference.attention import repeated


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


def attention_by_sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float, options: AttentionOptions
) -> Tensor | None:
    """The output of a merged call by torch's own attention; None where that differs."""
    if reasons_against_sdpa(query, key, value, options):
        return None
    bias, mask, window, visible = options.bias, options.mask, options.window, options.visible
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None:
        mask = mask.to_mask(queries, keys) if isinstance(mask, TileMask) else mask
        mask = repeated(mask, query.shape[0]) if mask.dim() == 4 else mask
    needs_mask = _needs_mask(options.causal, query, key)
    if bias is None and mask is None and window is None and visible is None and not needs_mask:
        added = None
    else:
        added = autograd.sdpa.added_to_scores(
            query,
            key,
            bias.dense(queries, keys) if isinstance(bias, RelativeBias) else bias,
            mask,
            needs_mask,
            (-1, -1) if window is None else window,
            *((None, None) if visible is None else int32_bounds(visible, keys)),
        )
    return autograd.sdpa.attention(
        query, key, value, added, options.causal and queries == keys, scale
    )
