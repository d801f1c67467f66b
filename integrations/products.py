"""Attention that writes its scores, for adapters: matmul, fused softmax, matmul."""

from collections.abc import Callable

import torch
from torch import Tensor

import megasoftmax
from megasoftmax.autocast import as_autocast, one_as_autocast
from megasoftmax.biases import RelativeBias
from megasoftmax.functions.attention import (
    AttentionCall,
    served_attention,
    served_packed_attention,
    serves_attention,
)
from megasoftmax.functions.torch_sdpa import reasons_against_sdpa
from megasoftmax.options import AttentionOptions


def runs_fused(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """Whether `megasoftmax.attention` runs in kernels."""
    if serves_attention(query, key, value, options):
        return True
    if not query.dtype == key.dtype == value.dtype:
        return False
    options.check(query, key, value)
    reasons = AttentionCall(query, key, value, options).reasons()
    return len(reasons) == 0  # torch.compile cannot trace `not reasons`


def takes_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """Whether `megasoftmax.attention` is quicker than `between_products`.

    It is where it runs fused, or on a CPU by torch's own attention. Its reference is slower.
    """
    if query.is_cuda:
        return runs_fused(query, key, value, options)
    if not query.dtype == key.dtype == value.dtype:
        return False
    return len(reasons_against_sdpa(query, key, value, options)) == 0


def like_query(layer: torch.nn.Module, head_dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A query [1, 1, 1, head_dim] like that of a layer, by default of the type of its weights.

    Quantised weights, which are integers, say nothing of it.
    """
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    weight = next((each for each in layer.parameters() if each.is_floating_point()), nothing)
    # Not weight.new_empty: quantised weights do not have every operator.
    return torch.empty(1, 1, 1, head_dim, dtype=dtype or weight.dtype, device=weight.device)


def attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attention for layers that need no probabilities, [..., queries, heads, value_dim].

    `megasoftmax.attention` where `takes_attention`, else `through_softmax`. Under autocast in its
    type, whatever the types of query, key and value.
    """
    tensors = as_autocast(query, key, value)
    served = served_attention(*tensors, options)
    if served is not None:
        return served
    if takes_attention(*tensors, options):
        output = megasoftmax.attention(*tensors, **options._asdict())
    else:
        output, _ = through_softmax(query, key, value, options)
    return output.transpose(-3, -2)


def attend_packed(packed: Tensor, options: AttentionOptions) -> Tensor:
    """`attend` of query, key and value in one tensor [batch, tokens, 3, heads, head_dim]."""
    served = served_packed_attention(one_as_autocast(packed), options)
    return attend(*unpacked(packed), options) if served is None else served


def unpacked(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as views [batch, heads, tokens, head_dim]."""
    query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def through_softmax(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, upcast: bool = False
) -> tuple[Tensor, Tensor]:
    """`between_products` with the fused softmax, options of attention and torch's dropout.

    That drops what it would drop in the model at the same seed of the generator, which dropout of
    `megasoftmax.softmax` would not. With `upcast` scores are products in float32.
    """
    bias, mask, dropout = options.bias, options.mask, options.dropout
    if isinstance(bias, RelativeBias):
        bias = bias.dense(query.shape[-2], key.shape[-2])
    mask = mask.tensor if isinstance(mask, megasoftmax.TileMask) else mask
    changed = {"bias": bias, "mask": mask, "dropout": 0.0, "dtype": value.dtype}
    given = options.of_softmax() | changed

    def normalize(scores: Tensor) -> Tensor:
        found = megasoftmax.softmax(scores, **given)
        return torch.nn.functional.dropout(found, dropout) if dropout > 0 else found

    return between_products(query, key, value, _float_scores if upcast else _scores, normalize)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return torch.matmul(query, key.transpose(-1, -2))


def _float_scores(query: Tensor, key: Tensor) -> Tensor:
    with torch.autocast(query.device.type, enabled=False):
        return _scores(query.float(), key.float())


def between_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    multiply: Callable[[Tensor, Tensor], Tensor],
    normalize: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Attention as two products with a softmax between them.

    The heads that share a key become further queries of it, so that no key is repeated: decoding
    16 heads on 4 over 2048 keys takes 0.5 ms instead of 3.1 (2 CPU cores), training is as fast.

    Args:
        query: [..., heads, queries, head_dim].
        key, value: [..., key_heads, keys, head_dim or value_dim]; key_heads divides heads.
        multiply: scores [..., key_heads, rows, keys] from query [..., key_heads, rows, head_dim]
            and key.
        normalize: probabilities from scores, both [..., heads, queries, keys].

    Returns:
        [..., heads, queries, value_dim]; the probabilities.
    """
    *batch, heads, queries, head_dim = query.shape
    key_heads, keys = key.shape[-3:-1]
    rows = heads // max(key_heads, 1) * queries
    scores = multiply(query.reshape(*batch, key_heads, rows, head_dim), key)
    probabilities = normalize(scores.view(*batch, heads, queries, keys))
    output = torch.matmul(probabilities.view_as(scores), value)
    return output.view(*batch, heads, queries, value.shape[-1]), probabilities
