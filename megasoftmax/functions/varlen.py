"""Attention within documents that lie one after the other."""

from typing import Any, Literal, Never, overload

import torch
from torch import Tensor

from megasoftmax import arguments, checks, ranges
from megasoftmax.biases import RelativeBias
from megasoftmax.dispatch import Reasons
from megasoftmax.functions.attention import attention, attention_reasons
from megasoftmax.options import Window, checked_window


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    bias: RelativeBias | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    sink: Tensor | float | None = ...,
    dropout: float = ...,
    seed: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    fused: bool | None = ...,
) -> Tensor: ...


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    bias: RelativeBias | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    sink: Tensor | float | None = ...,
    dropout: float = ...,
    seed: Tensor | None = ...,
    return_lse: Literal[True],
    fused: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@checks.takes_options_by_name
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    bias: RelativeBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    fused: bool | None = None,
    **others: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several documents that lie one after the other, without padding.

        cu_seqlens = torch.tensor([0, 3, 10], device="cuda")  # documents of 3 and 7 tokens
        output = attention_varlen(query, key, value, cu_seqlens, causal=True)

    It is `attention` over one batch, with the documents, causality and the window in `visible`:
    everything that is said there holds here. Nothing is read by the host.

    Args:
        query: [tokens, heads, head_dim], of the types of `attention`, any strides.
        key: [key_tokens, key_heads, head_dim], of the same dtype; key_heads divides heads.
        value: [key_tokens, key_heads, value_dim], of the same dtype.
        cu_seqlens_q: int32 or int64 [documents + 1], where the queries of each document begin, and
            where those of the last end: from 0 on, not decreasing, up to tokens. That is checked
            on a CPU. On a GPU, which keys a query sees is unspecified where it does not hold, but
            nothing outside of the tensors is read. Queries after the last document see nothing.
        cu_seqlens_k: the same of the keys; by default cu_seqlens_q.
        bias: a `RelativeBias` by distance, without cu_seqlens_k or with the same tensor: its table
            has 2 * length - 1 entries, [heads, ...] or [1, heads, ...], for distances from
            1 - length to length - 1. Distances beyond them have bias 0. `t5_bias` and
            `alibi_bias` of `length` queries and keys make such tables.
        scale: factor of the products; by default head_dim ** -0.5.
        softcap: as in `attention`.
        causal: exclude keys after the query. The last query of a document stands at its last key.
        window: (left, right), as in `attention`, within each document.
        sink: as in `attention`.
        dropout, seed: as in `attention`, of one batch: entries are counted in all tokens.
        return_lse: also return the log-sum-exp.
        fused: as in `attention`.

    Returns:
        The output [tokens, heads, value_dim], contiguous, in the dtype of the query. With
        return_lse also the log-sum-exp [heads, tokens], float32 (float64 for float64 queries).

    Raises:
        TypeError, ValueError, NotImplementedError: as `attention`.
    """
    if others:
        raise checks.misnamed("attention_varlen", 5, (), others)
    tensors, limits = _as_one_batch(
        query, key, value, cu_seqlens_q, cu_seqlens_k, bias, causal, window
    )
    limits |= {
        "scale": scale,
        "softcap": softcap,
        "sink": sink,
        "dropout": dropout,
        "seed": seed,
        "fused": fused,
    }
    if return_lse is False:
        return attention(*tensors, **limits).squeeze(0).transpose(0, 1)
    output, lse = attention(*tensors, **limits, return_lse=return_lse)
    return output.squeeze(0).transpose(0, 1), lse.squeeze(0)


def _as_one_batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    bias: RelativeBias | None,
    causal: bool,
    window: Window | None,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """From what `attention_varlen` takes: query, key and value of `attention`, and its limits."""
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    arguments.check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, bias)
    checks.check_flag("causal", causal)
    window = checked_window("window", window)
    tokens = query.shape[0]
    if bias is not None:
        surplus = tokens - (bias.table.shape[-1] + 1) // 2
        table = bias.table[..., :0]
        if tokens > 0:
            table = torch.nn.functional.pad(bias.table, (surplus, surplus))
        bias = RelativeBias(table)
    visible = ranges.of_documents(cu_seqlens_q, cu_seqlens_k, tokens, causal, window)
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    return (query, key, value), {"bias": bias, "visible": visible}


def varlen_reasons(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    bias: RelativeBias | None = None,
    causal: bool = False,
    window: Window | None = None,
    **options: Any,
) -> Reasons:
    (query, key, value), limits = _as_one_batch(
        query, key, value, cu_seqlens_q, cu_seqlens_k, bias, causal, window
    )
    return attention_reasons(query, key, value, **limits, **options)
