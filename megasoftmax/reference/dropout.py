"""Which entries dropout drops: a function of the seed and of where an entry is.

Kernels and plain torch, forward and backward, drop the same entries for the same seed, whatever the
size of their blocks.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from megasoftmax.tracing import is_traced, refuses_out

STEPS = 2**15  # the values of the 15 bits that decide an entry

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # what each round adds to the key
_ROUNDS = 7
_MASK = 2**32 - 1
_HALVES = ((0, 0x7FFF), (16, 0x7FFF0000))  # of a word: the shift of each half, and its bits

# The most entries at a time for each thread of a CPU: intermediate results stay in a cache.
_PART = 2**18


def threshold(dropout: float) -> int:
    """An entry is dropped where its 15 bits are below this: from 0, none, to STEPS, all."""
    return round(dropout * STEPS)


def factor(dropout: float) -> float:
    """The factor of kept entries: 1 over their share of the 15-bit values; 0 where none is kept."""
    kept = STEPS - threshold(dropout)
    return STEPS / kept if kept > 0 else 0.0


def dropped(weights: Tensor, keep: Tensor, dropout: float) -> Tensor:
    """factor * weights where entries are kept; else 0, also in place of NaN."""
    return torch.where(keep, weights * factor(dropout), 0)


def drop_(weights: Tensor, keep: Tensor, dropout: float) -> Tensor:
    """`dropped`, in place."""
    weights.mul_(factor(dropout))
    if refuses_out(weights):
        return weights.copy_(torch.where(keep, weights, 0))
    return torch.where(keep, weights, weights.new_zeros(()), out=weights)


def kept(
    seed: Tensor, dropout: float, heads: Tensor, first_query: int, queries: int, keys: int
) -> Tensor:
    """Bool [*heads, queries, keys], True = kept, of the queries from `first_query` on.

    The bits of an entry (head, query i, key j) come from Philox 4x32 with 7 rounds, of the key
    (low, high 32 bits of the seed) and the counter

        (j // 32, i // 16, head, (i % 8) * 8 + j % 8),

    whose four words serve 2 x 4 entries that lie 8 queries and 8 keys apart: the entry takes word
    (i // 8) % 2 * 2 + (j // 8) % 4 // 2, and of it the low 15 bits where (j // 8) % 2 is 0, else
    those of the high half.

    Args:
        seed: int64, one element.
        dropout: the probability to drop an entry, which is rounded to a multiple of 2**-15.
        heads: int64, any shape: the number of each head, batch * heads + head.
        first_query: the number of the first query.
        queries, keys: how many.
    """
    device = seed.device
    below = first_query // 16
    count, columns = -(-(first_query + queries) // 16) - below, -(-keys // 32)
    if heads.numel() == 0 or queries == 0 or keys == 0:
        return torch.ones((*heads.shape, queries, keys), dtype=torch.bool, device=device)
    rows = torch.arange(below, below + count, device=device)
    numbers = heads.reshape(-1)
    low_key, high_key = halves_of(seed)

    def part(numbers: Tensor, rows: Tensor) -> Tensor:
        return _kept(low_key, high_key, threshold(dropout), numbers, rows, columns)

    found = _in_parts(part, numbers, rows, columns)
    found = found.reshape(*heads.shape, 16 * count, 32 * columns)
    return found.narrow(-2, first_query % 16, queries).narrow(-1, 0, keys)


def kept_of_scores(seed: Tensor, dropout: float, scores: Tensor) -> Tensor:
    """`kept` for scores [..., queries, keys]; heads count all dimensions before queries."""
    queries, keys = scores.shape[-2] if scores.dim() > 1 else 1, scores.shape[-1]
    heads = torch.arange(scores.shape[:-2].numel(), device=seed.device)
    return kept(seed, dropout, heads, 0, queries, keys).view(scores.shape)


def _in_parts(
    part: Callable[[Tensor, Tensor], Tensor], numbers: Tensor, rows: Tensor, columns: int
) -> Tensor:
    """part(numbers, rows), on a CPU cut into parts of at most _PART entries for each thread."""
    entries_of_row = 16 * 32 * columns
    entries_of_head = entries_of_row * len(rows)
    if not _is_eager_on_cpu(numbers):
        return part(numbers, rows)
    most = _PART * torch.get_num_threads()
    if entries_of_head * len(numbers) <= most:
        return part(numbers, rows)
    if entries_of_head <= most:
        return torch.cat([part(some, rows) for some in numbers.split(most // entries_of_head)])
    some_rows = rows.split(max(1, most // entries_of_row))
    of_heads = [torch.cat([part(one, some) for some in some_rows], 1) for one in numbers.split(1)]
    return torch.cat(of_heads)


def _is_eager_on_cpu(tensor: Tensor) -> bool:
    return tensor.is_cpu and not torch.compiler.is_compiling()


def halves_of(seed: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of a seed, the key of Philox."""
    return seed.reshape(()) & _MASK, (seed.reshape(()) >> 32) & _MASK


def philox(
    low_key: Tensor, high_key: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The words of Philox 4x32 with 7 rounds, of counters in int64.

    The second and the fourth word have further bits above their 32.
    """
    for i in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        k0, k1 = low_key + i * _WEYL[0], high_key + i * _WEYL[1]
        c0, c2 = _next(right, c1, k0), _next(left, c3, k1)
        c1, c3 = right, left
    return c0, c1, c2, c3


def _next(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    """The exclusive or of the high half of a product, a word and a key, in 32 bits.

    In place where operands have the size of the result, and that is large.
    """
    high, word = product >> 32, word ^ key
    if high.shape != word.shape or high.numel() < 2**12 or not _is_eager_on_cpu(high):
        return (high ^ word) & _MASK
    return high.bitwise_xor_(word).bitwise_and_(_MASK)


def _kept(
    low_key: Tensor, high_key: Tensor, least: int, heads: Tensor, rows: Tensor, columns: int
) -> Tensor:
    """Bool [heads, 16 * rows, 32 * columns].

    The words lie as [heads, rows, i % 8, columns, j % 8]. In the first rounds they do not depend on
    all of these dimensions yet: those have size 1, which saves work. Words are int64, because both
    halves of a product are needed. Operands of an exclusive or are not cut to 32 bits before it.
    """
    device = heads.device
    eight = torch.arange(8, device=device)
    c0 = torch.arange(columns, device=device).view(-1, 1)
    c1, c2 = rows.view(-1, 1, 1, 1), heads.view(-1, 1, 1, 1, 1)
    c3 = 8 * eight.view(-1, 1, 1) + eight
    words = philox(low_key, high_key, c0, c1, c2, c3)
    halves = [(word & bits) >= (least << shift) for word in words for shift, bits in _HALVES]
    # Moves 8 neighbours at a time, which lie together in the result too, as one int64. torch.vmap
    # has no rule for such views before torch 2.13, nor torch.compile in 2.11.
    in_eights = not is_traced()
    if in_eights:
        halves = [half.view(torch.int64) for half in halves]
    found = rearrange(
        torch.stack(halves, -1),
        "heads rows i columns j (upper step) -> heads (rows upper i) (columns step j)",
        upper=2,
    )
    return found.contiguous().view(torch.bool) if in_eights else found
