"""Attention with the arguments and conventions of torch's scaled_dot_product_attention."""

from typing import Any

import torch
from torch import Tensor

from megasoftmax import arguments
from megasoftmax.dispatch import Reasons
from megasoftmax.functions.attention import attention, attention_reasons
from megasoftmax.options import as_number, check_probability


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """`attention` with the arguments and conventions of torch's function of this name.

        from megasoftmax import scaled_dot_product_attention
        output = scaled_dot_product_attention(query, key, value, attn_mask=keep)

    It returns what torch.nn.functional.scaled_dot_product_attention returns, up to rounding, and
    gradients too. What differs:

    * `attn_mask` gets its gradient whatever runs, and may have any floating type.
    * A query for which attn_mask leaves no key has output 0 and gradients 0.
    * Dropout draws a seed from torch's generator, so the same generator drops other entries.
    * The output lies in memory as [..., queries, heads, value_dim]: a `view` that merges heads and
      queries needs `reshape`.
    * Everything else that is said of `attention` holds: when it runs fused, derivatives, autocast.

    Args:
        query: [..., heads, queries, head_dim] or [queries, head_dim], float16, bfloat16, float32 or
            float64. The dimensions before heads are any number of batch dimensions.
        key: [..., heads, keys, head_dim], of the same dtype.
        value: [..., heads, keys, value_dim], of the same dtype. Batch dimensions and heads of all
            three broadcast, without a copy up to 4 dimensions.
        attn_mask: broadcastable to [..., heads, queries, keys]. bool: True = keep. Floating: added
            to the scaled scores.
        dropout_p: from 0 to 1, as `dropout` of `attention`; 0 in evaluation.
        is_causal: query i sees key j where j <= i, counted from the first query and the first key.
            In `attention` the last query stands at the last key. Not beside attn_mask.
        scale: factor of the products; by default head_dim ** -0.5.
        enable_gqa: the heads of key and value may be fewer, and divide those of the query: query
            head i reads key head i // (heads / key_heads). Key and value have as many.
        softcap: as in `attention`. torch's function has no such argument.

    Returns:
        [..., heads, queries, value_dim], in the dtype of the query.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.
        NotImplementedError: as `attention`.

    Source:
        torch.nn.functional.scaled_dot_product_attention in the documentation of torch.
    """
    given = query, key, value, attn_mask, dropout_p, is_causal, enable_gqa
    tensors, limits, shape = _from_torch(*given)
    return attention(*tensors, **limits, scale=scale, softcap=softcap).view(shape)


def _from_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], tuple[int, ...]]:
    """Query, key and value of `attention`, its limits, and the shape of torch's result."""
    dropout = as_number("dropout_p", dropout_p)
    check_probability("dropout_p", dropout)
    batch, heads, key_heads = arguments.check_sdpa(
        query, key, value, attn_mask, is_causal, enable_gqa
    )
    queries, keys = query.shape[-2], key.shape[-2]
    rank = max(query.dim(), key.dim(), value.dim())
    shape = (*batch, heads, queries, value.shape[-1])[-rank:]
    limits: dict[str, Any] = {"dropout": dropout}
    if is_causal and keys > queries:  # no query sees the keys after the last of them
        key, value = key[..., :queries, :], value[..., :queries, :]
    if is_causal and keys < queries:  # j <= i where the last query stands at the last key
        limits["window"] = (-1, queries - keys)
    else:
        limits["causal"] = is_causal
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            limits["mask"] = ~_without_repeats(attn_mask)
        else:
            limits["bias"] = attn_mask
    query = query.expand(*batch, heads, -1, -1)
    key, value = (each.expand(*batch, key_heads, -1, -1) for each in (key, value))
    return (query, key, value), limits, shape


def _without_repeats(tensor: Tensor) -> Tensor:
    """A view that has size 1 where strides are 0."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def sdpa_reasons(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> Reasons:
    given = query, key, value, attn_mask, dropout_p, is_causal, enable_gqa
    tensors, limits, _ = _from_torch(*given)
    return attention_reasons(*tensors, **limits, scale=scale, softcap=softcap)
