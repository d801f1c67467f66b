"""Packed sequences of Megatron-core, as spans of tokens: (begin, end)."""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import torch
from einops import rearrange
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_pg_size
from torch import Tensor


def attend_packed(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSeqParams,
) -> Tensor:
    """Each sequence attends to itself, in a padded batch for each power of two of lengths.

    Args:
        attend: attention, as (query, key, value, mask), of tensors [batch, heads, tokens, dim].
        query, key, value: [tokens, heads, dim].
        packed: where sequences begin and end.

    Returns:
        [tokens, heads * dim of values], 0 for tokens of no sequence.
    """
    buckets = defaultdict(list)
    for spans in _packed_spans(packed, len(query), len(key)):
        buckets[tuple((end - begin).bit_length() for begin, end in spans)].append(spans)

    results: list[Tensor] = []
    source = torch.zeros(len(query), dtype=torch.long)  # of each token, among all results
    found = 1
    for members in buckets.values():
        of_query, of_key = zip(*members, strict=True)
        query_tokens, is_no_query = _aligned(of_query)
        key_tokens, is_no_key = _aligned(of_key)
        output = attend(
            _taken(query, query_tokens),
            _taken(key, key_tokens),
            _taken(value, key_tokens),
            is_no_key[:, None, None].to(query.device) if is_no_key.any() else None,
        )
        results.append(rearrange(output, "sequences heads m x -> (sequences m) (heads x)"))
        places = torch.arange(found, found + query_tokens.numel()).view_as(query_tokens)
        source[query_tokens[~is_no_query]] = places[~is_no_query]
        found += query_tokens.numel()
    like = results[0] if results else query  # autocast may give another type
    zeros = like.new_zeros(1, query.shape[1] * value.shape[2])
    return torch.cat([zeros, *results]).index_select(0, source.to(query.device))


def _packed_spans(
    packed: PackedSeqParams, queries: int, keys: int
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Those of queries and of keys, sequence by sequence."""
    if packed.qkv_format != "thd":
        raise ValueError(f"packed_seq_params: expected qkv_format 'thd', got {packed.qkv_format!r}")
    if packed.local_cp_size not in (None, 1) or get_pg_size(packed.cp_group) > 1:
        raise ValueError("packed_seq_params: expected no context parallelism, got a group of ranks")
    of_queries = _spans("q", packed.cu_seqlens_q, packed.cu_seqlens_q_padded, queries)
    of_keys = _spans("kv", packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded, keys)
    if len(of_queries) != len(of_keys):
        raise ValueError(
            f"packed_seq_params: expected as many sequences of keys as of queries, "
            f"{len(of_queries)}, got {len(of_keys)}"
        )
    return list(zip(of_queries, of_keys, strict=True))


def _spans(
    name: str, cumulative: Tensor | None, padded: Tensor | None, tokens: int
) -> list[tuple[int, int]]:
    """Of each sequence; where they are padded, they begin at what the padded lengths add up to."""
    if cumulative is None:
        raise ValueError(f"packed_seq_params: expected cu_seqlens_{name}, got None")
    sums = cumulative.tolist()
    begins = sums if padded is None else padded.tolist()
    spans = [
        (begin, begin + end - start)
        for begin, (start, end) in zip(begins, pairwise(sums), strict=False)
    ]
    if any(not 0 <= begin <= end <= tokens for begin, end in spans):
        raise ValueError(
            f"packed_seq_params: expected cu_seqlens_{name} that ascend from 0 to at most "
            f"{tokens}, got sequences {spans}"
        )
    return spans


def _aligned(spans: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    """Tokens of a padded batch whose rows end with their sequences, so that positions do too.

    Returns:
        int64 [sequences, longest], the token of each place, and bool, True = there is none and the
        sequence's first one stands in.
    """
    begins, ends = torch.tensor(spans).unsqueeze(-1).unbind(1)
    tokens = ends - torch.arange(int((ends - begins).max()), 0, -1)
    return torch.maximum(tokens, begins), tokens < begins


def _taken(tensor: Tensor, tokens: Tensor) -> Tensor:
    """[sequences, heads, longest, head_dim] of a tensor [tokens, heads, head_dim]."""
    rows = tensor.index_select(0, tokens.flatten().to(tensor.device))
    pattern = "(sequences longest) heads x -> sequences heads longest x"
    return rearrange(rows, pattern, sequences=len(tokens))
