"""Packed sequences of Megatron-core, as documents that lie one after the other."""

from collections.abc import Callable
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_pg_size
from torch import Tensor

from megasoftmax import arguments


def documents_of(
    packed: PackedSeqParams, queries: int, keys: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """cu_seqlens of queries and of keys on that device, as `attention_varlen` takes them.

    Where sequences are padded, each becomes three documents: the sequence itself, the padding of
    its keys without a query, and the padding of its queries without a key.

    Raises:
        TypeError, ValueError: names the field of packed_seq_params.
    """
    if packed.qkv_format != "thd":
        raise ValueError(f"packed_seq_params: expected qkv_format 'thd', got {packed.qkv_format!r}")
    if packed.local_cp_size not in (None, 1) or get_pg_size(packed.cp_group) > 1:
        raise ValueError("packed_seq_params: expected no context parallelism, got a group of ranks")
    of_queries, begins_of_queries = _given(packed, "cu_seqlens_q", device)
    of_keys, begins_of_keys = _given(packed, "cu_seqlens_kv", device)
    if of_queries.shape != of_keys.shape:
        raise ValueError(
            "packed_seq_params: expected as many sequences of keys as of queries, "
            f"{len(of_queries) - 1}, got {len(of_keys) - 1}"
        )
    if begins_of_queries is not of_queries or begins_of_keys is not of_keys:
        begins, last = begins_of_queries[:-1], begins_of_queries[-1:]
        ends = begins + of_queries.diff()
        of_queries = torch.cat([torch.stack([begins, ends, ends], -1).flatten(), last])
        begins, last = begins_of_keys[:-1], begins_of_keys[-1:]
        ends = begins + of_keys.diff()
        of_keys = torch.cat([torch.stack([begins, ends, begins_of_keys[1:]], -1).flatten(), last])
    arguments.check_offsets("packed_seq_params.cu_seqlens_q", of_queries, queries)
    arguments.check_offsets("packed_seq_params.cu_seqlens_kv", of_keys, keys)
    return of_queries, of_keys


def _given(packed: PackedSeqParams, name: str, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The sums of lengths, and those with padding: the same tensor where there is none."""
    sums, padded = getattr(packed, name), getattr(packed, f"{name}_padded")
    if sums is None:
        raise ValueError(f"packed_seq_params: expected {name}, got None")
    if padded is not None and padded.shape != sums.shape:
        raise ValueError(
            f"packed_seq_params: expected {name}_padded of shape {tuple(sums.shape)}, as {name}, "
            f"got {tuple(padded.shape)}"
        )
    sums = sums.to(device)
    return sums, sums if padded is None else padded.to(device)


def one_batch(tensor: Tensor) -> Tensor:
    """[1, heads, tokens, dim] of a tensor [tokens, heads, dim]."""
    return tensor.transpose(0, 1).unsqueeze(0)


def attend_one_by_one(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
) -> Tensor:
    """Attention of one document after the other: no score between two documents is computed.

    Args:
        attend: attention of tensors [batch, heads, tokens, dim].
        query, key, value: [tokens, heads, dim].
        of_queries, of_keys: cu_seqlens, on a CPU.

    Returns:
        [tokens, heads * dim of values], 0 for tokens of no document.
    """
    ends = of_queries.tolist()
    outputs = []
    for (begin, end), (first, last) in zip(pairwise(ends), pairwise(of_keys.tolist()), strict=True):
        if begin < end:
            output = attend(
                one_batch(query[begin:end]),
                one_batch(key[first:last]),
                one_batch(value[first:last]),
            )
            outputs.append(output.squeeze(0).transpose(0, 1).flatten(1))
    rest = query.new_zeros(len(query) - ends[-1], query.shape[1] * value.shape[2])
    return torch.cat([*outputs, rest])
