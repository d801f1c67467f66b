"""Ranges of keys that queries see, for `visible` of softmax and attention.

    visible = megasoftmax.ranges.packed(cu_seqlens, tokens)
    output = megasoftmax.attention(query, key, value, causal=True, visible=visible)

Each function returns (first, end): query i sees keys first <= j < end. Both are int32, broadcast to
[..., heads, queries], and lie on the device of what they are made from; first or end is None
where it limits nothing. They are computed on the device, without asking the host. causal and window
beside them count as they do without.
"""

import torch
from torch import Tensor

from megasoftmax import arguments, checks

Range = tuple[Tensor, Tensor]


def packed(cu_seqlens: Tensor, tokens: int) -> Range:
    """Documents that lie one after the other: each token sees its own document.

        packed(torch.tensor([0, 2, 5]), 6)  # first [0, 0, 2, 2, 2, 0], end [2, 2, 5, 5, 5, 0]

    Args:
        cu_seqlens: int32 or int64 [documents + 1], where documents begin, and where the last ends:
            from 0 on, not decreasing. That is checked on a CPU. On a GPU, which documents a token
            sees is unspecified if they decrease.
        tokens: of all documents. Tokens after the last document see nothing.

    Returns:
        first, end: [1, 1, tokens].

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    tokens = checks.checked_integer("tokens", tokens, 0)
    arguments.check_offsets("cu_seqlens", cu_seqlens, tokens)
    document = document_of_tokens(cu_seqlens, tokens)
    begins, ends = documents(cu_seqlens)
    return begins[document].view(1, 1, tokens), ends[document].view(1, 1, tokens)


def document_of_tokens(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Where each token's document is in `documents`, int32 [tokens]."""
    position = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, position, right=True, out_int32=True)


def documents(cu_seqlens: Tensor) -> Range:
    """Where each begins and ends, int32 [1 + documents + 1].

    The first and the last are empty: those of tokens before and after all documents.
    """
    offsets = _as_int32(cu_seqlens)
    pad = torch.nn.functional.pad
    return pad(offsets[:-1], (1, 1)), pad(offsets[1:], (1, 1))


def of_documents(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    tokens: int,
    causal: bool,
    window: tuple[int, int] | None,
) -> Range:
    """What a query sees of its document's keys; its last query stands at its last key.

    Args:
        cu_seqlens_q, cu_seqlens_k: as `packed` takes them, of queries and of keys.
        tokens: the queries.
        causal: as in `megasoftmax.attention`, within each document.
        window: the same, as `options.checked_window` returns it.

    Returns:
        first, end: [1, 1, tokens].
    """
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    document = document_of_tokens(cu_seqlens_q, tokens)
    (begins, ends), (_, ends_q) = documents(cu_seqlens_k), documents(cu_seqlens_q)
    first, end = begins[document], ends[document]
    if left >= 0 or right >= 0:
        query = torch.arange(tokens, device=cu_seqlens_q.device)
        position = end + query - ends_q[document]  # int64: nothing overflows
        if left >= 0:
            first = torch.maximum(first, position - left)
        if right >= 0:
            end = torch.minimum(end, position + right + 1)
    return first.view(1, 1, tokens), end.view(1, 1, tokens)


def segments(ids: Tensor) -> Range:
    """Neighbours with equal ids belong together: each token sees its own segment.

        segments(torch.tensor([[7, 7, 3, 3, 3]]))  # first [0, 0, 2, 2, 2], end [2, 2, 5, 5, 5]

    Args:
        ids: [..., tokens], integers or bool.

    Returns:
        first, end: [..., 1, tokens].

    Raises:
        TypeError, ValueError: ids are not as above.
    """
    arguments.check_integers("ids", ids, 1, "[..., tokens]", is_bool=True)
    tokens = ids.shape[-1]
    if tokens == 0:
        nothing = ids.new_zeros(ids.shape, dtype=torch.int32).unsqueeze(-2)
        return nothing, nothing
    position = torch.arange(tokens, device=ids.device, dtype=torch.int32).expand(ids.shape)
    differs = ids[..., 1:] != ids[..., :-1]
    pad = torch.nn.functional.pad
    begins = pad(position[..., 1:].where(differs, 0), (1, 0))
    # Less the tokens: torch.compile makes a constant of a number that `where` or `pad` fills in.
    ends = pad((position[..., 1:] - tokens).where(differs, 0), (0, 1))
    first = begins.cummax(-1).values
    end = ends.flip(-1).cummin(-1).values.flip(-1) + tokens
    return first.unsqueeze(-2), end.unsqueeze(-2)


def lengths(n: Tensor) -> tuple[None, Tensor]:
    """The first keys of each batch: the others are padding.

        lengths(torch.tensor([3, 5]))  # first None, end [3], [5]

    Args:
        n: int32 or int64 [...], the keys that count, from the left.

    Returns:
        None, and end: [..., 1, 1].

    Raises:
        TypeError, ValueError: n is not as above.
    """
    arguments.check_integers("n", n, 0, "[...]")
    return None, _as_int32(n)[..., None, None]


def padding(keep: Tensor) -> Range:
    """The keys of each batch from the first to the last that counts, padded on either side.

        padding(torch.tensor([[False, True, True], [True, True, False]]))
        # first [1], [0], end [3], [2]

    Args:
        keep: [..., keys], bool or integers, such as the attention_mask of tokenizers. True, or
            not 0, keeps a key. A row with a gap is no range: give such a mask as `mask`. Gaps are
            refused on a CPU. Elsewhere nothing is read, and the keys of a gap are visible.

    Returns:
        first, end: [..., 1, 1]; empty where nothing is kept.

    Raises:
        TypeError, ValueError: keep is not as above.
    """
    arguments.check_integers("keep", keep, 1, "[..., keys]", is_bool=True)
    keys = keep.shape[-1]
    if keys == 0:
        nothing = keep.new_zeros((*keep.shape[:-1], 1, 1), dtype=torch.int32)
        return nothing, nothing
    position = torch.arange(keys, device=keep.device, dtype=torch.int32)
    kept = keep != 0
    first = position.where(kept, keys).amin(-1)
    end = (position + 1).where(kept, 0).amax(-1)
    if checks.has_values(keep):
        with_gap = (kept.sum(-1) < end - first).nonzero().tolist()
        if with_gap:
            row = ", ".join(map(str, with_gap[0]))
            raise ValueError(
                f"keep: expected one run of kept keys in each row, got a gap in row {row}; "
                "pass mask=keep[..., None, None, :] == 0 in place of the range"
            )
    return first[..., None, None], end[..., None, None]


def chunks(size: int, tokens: int, *, device: torch.device | str | None = None) -> Range:
    """Chunks of neighbours, as in the chunked layers of Llama 4: each token sees its own chunk.

        chunks(2, 5)  # first [0, 0, 2, 2, 4], end [2, 2, 4, 4, 5]

    Args:
        size: tokens of a chunk, from 1 on.
        tokens: the last chunk may be shorter.
        device: of the result; by default torch's.

    Returns:
        first, end: [1, 1, tokens].

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    size = checks.checked_integer("size", size, 1)
    tokens = checks.checked_integer("tokens", tokens, 0)
    size = min(size, max(tokens, 1))
    device = checks.checked_device(device)
    position = torch.arange(tokens, device=device, dtype=torch.int32)
    first = (position - position % size).view(1, 1, tokens)
    return first, (first + size).clamp(max=tokens)


def prefix(n: Tensor, tokens: int) -> tuple[None, Tensor]:
    """A prefix that all see, and after it causality, as in PaliGemma: not beside causal.

        prefix(torch.tensor([3]), 5)  # first None, end [3, 3, 3, 4, 5]

    Args:
        n: int32 or int64 [...], the tokens of the prefix, which all tokens see. A token sees
            besides all up to itself.
        tokens: of each example, queries and keys.

    Returns:
        None, and end: [..., 1, tokens].

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    arguments.check_integers("n", n, 0, "[...]")
    tokens = checks.checked_integer("tokens", tokens, 0)
    own = torch.arange(1, tokens + 1, device=n.device, dtype=torch.int32)
    return None, torch.maximum(_as_int32(n)[..., None, None], own)


def _as_int32(n: Tensor) -> Tensor:
    """What does not fit becomes the least or the largest."""
    if n.dtype == torch.int32:
        return n
    limits = torch.iinfo(torch.int32)
    return n.clamp(limits.min, limits.max).to(torch.int32)
