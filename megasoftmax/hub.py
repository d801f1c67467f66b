"""The attention function of a kernel on Hugging Face's hub, which `export-kernels` writes.

    model.set_attn_implementation("org/repo:flash_attn_forward")

transformers gives such functions the masks of flash-attn: a padding mask or none, since causality,
windows and packed sequences are arguments. Only for names with "flash" does it keep the mask of a
static cache, and refuse masks of chunks. Without the mask, `position_ids` say which entries of the
cache count. A model that takes certain flash kernels alone, such as GPT-OSS, takes
"org/repo:attention_forward". Where transformers asks the kernel for `flash_attn_forward` by itself,
masks are those of SDPA. `megasoftmax.integrations.transformers`, which is installed and registered,
serves other masks too.
"""

from typing import Any

import torch
from torch import Tensor

from megasoftmax import checks, ranges
from megasoftmax.functions.attention import attention
from megasoftmax.functions.softmax import softmax
from megasoftmax.options import AttentionOptions


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as layers of transformers call it.

    Args:
        module: the layer, whose `is_causal` counts where the argument is None.
        query: [batch, heads, queries, head_dim].
        key, value: [batch, key heads, keys, dim].
        attention_mask: [batch, keys], not 0 where a key counts; keys after it, of a static cache,
            do not. Or bool [batch, 1 or heads, queries, keys], True = visible, in which causality
            and windows are included. None: all count.
        dropout: of probabilities. Then two products and the fused softmax compute the attention.
        scaling: head_dim ** -0.5 by default.
        sliding_window: a query sees so many keys up to its own, and without causality as many after
            it.
        softcap: scaled scores become softcap * tanh(scores / softcap).
        s_aux: [heads], a logit that joins the denominator.
        position_bias: broadcastable to [batch, heads, queries, keys], added to the scaled scores.
        position_ids: [1, queries] of packed sequences, each of which begins at 0. With more keys
            than queries and no mask: [1 or batch, queries], the place of each query's own key in a
            static cache. Keys after it do not count.
        cu_seq_lens_q, cu_seq_lens_k: where packed sequences begin, and the last ends.
        others: indices, block_indices, cache and sinks, which change the result, are refused unless
            None. The rest is not used.

    Returns:
        [batch, queries, heads, dim of values], and None.

    Raises:
        NotImplementedError: what is refused.
        ValueError: a mask that is neither.
    """
    for name in ("indices", "block_indices", "cache", "sinks"):
        if others.get(name) is not None:
            raise NotImplementedError(f"{name}: expected None, got {checks.kind(others[name])}")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    mask: Tensor | None = None
    visible: tuple[Tensor | None, Tensor | None] | None = None
    if attention_mask is not None and attention_mask.dim() == 4:
        if attention_mask.dtype != torch.bool:
            raise ValueError(f"attention_mask: expected a bool, got {attention_mask.dtype}")
        mask, causal, window = ~attention_mask, False, None
    elif attention_mask is not None:
        if attention_mask.dim() != 2:
            shape = tuple(attention_mask.shape)
            raise ValueError(f"attention_mask: expected [batch, keys] or 4 dimensions, got {shape}")
        kept = attention_mask.shape[1]
        key, value = key[:, :, :kept], value[:, :, :kept]
        if position_bias is not None:
            position_bias = position_bias[..., :kept]
        mask = attention_mask[:, None, None, :] == 0
    elif cu_seq_lens_q is not None:
        cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        tokens = query.shape[2]
        visible = ranges.of_documents(cu_seq_lens_q, cu_seq_lens_k, tokens, causal, window)
        causal, window = False, None
    elif _may_be_packed(query, key, position_ids):
        assert position_ids is not None
        visible = ranges.segments((position_ids == 0).cumsum(-1))
    elif causal and position_ids is not None and query.shape[2] < key.shape[2]:
        visible, window = _written(position_ids, query, key, window)
    options = AttentionOptions(
        position_bias, mask, scaling, softcap, causal, window, visible, s_aux
    )
    if dropout == 0:
        output = attention(query, key, value, **options._asdict())
    else:
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        of_softmax = options._replace(scale=scale, dropout=dropout).of_softmax()
        output = softmax(query @ key.mT, **of_softmax) @ value
    return output.transpose(1, 2).contiguous(), None


def _may_be_packed(query: Tensor, key: Tensor, position_ids: Tensor | None) -> bool:
    """By shapes alone: values would have to come from the GPU."""
    if position_ids is None or position_ids.shape != (1, query.shape[2]):
        return False
    return query.shape[0] == 1 and 1 < query.shape[2] == key.shape[2]


def _written(
    position_ids: Tensor, query: Tensor, key: Tensor, window: tuple[int, int] | None
) -> tuple[tuple[Tensor | None, Tensor], tuple[int, int] | None]:
    """The keys up to each query's own, and the window that is left to apply.

    Others of a static cache are not written yet. A cache that is longer than the window needs has a
    key for each position. In a shorter one the last keys are those up to the last query's.
    """
    end = position_ids.to(torch.int32)[:, None] + 1
    if window is None or key.shape[2] < window[0] + query.shape[2] + 1:
        return (None, end), window
    return (end - window[0] - 1, end), None


# transformers 5.24 takes a kernel for one of attention if it finds this name.
flash_attn_forward = attention_forward
