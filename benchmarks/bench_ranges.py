"""Masks that leave tiles out, on one GPU: ranges, TileMask and bool masks beside SDPA and
FlexAttention; writes results/ranges.csv.

A case is a shape and a pattern of visible pairs, bfloat16. Every way to say the pattern is a row:
`window=`, `visible=`, a bool mask, a TileMask, one row for each document. forward+backward is one
call and the gradients of query, key and value. "note" is what a TileMask does once for many calls.
`percent_of_copy`, of softmax: the fewest bytes that the pattern needs, against what a copy of the
scores reaches in the same run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import measure
import peers
import torch
import typer
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import megasoftmax
from megasoftmax import TileMask, ops, ranges

FIELDS = ["case", "pass", "implementation", "microseconds", "percent_of_copy"]
BLOCK = 128  # of the block-sparse pattern, and of FlexAttention
DOCUMENTS = 8

Ways = dict[str, Callable[[], peers.Attend]]


@dataclass(frozen=True)
class Case(measure.Case):
    """A pattern of [batch, heads, queries, dim] and as many keys, or more."""

    pattern: Callable[["Case"], Ways] | None
    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int = 128
    size: int = 0  # of a window

    def __str__(self) -> str:
        length = f"{self.queries}" if self.queries == self.keys else f"1 of {self.keys}"
        last = self.head_dim if self.pattern else self.keys
        return f"{self.name} [{self.batch}, {self.heads}, {length}, {last}]"


def flex_of(visible: Callable[..., Tensor], case: Case) -> Ways:
    """By FlexAttention, from its function of batch, head, query and key."""
    sizes, device = (None, None, case.queries, case.keys), torch.get_default_device()
    blocks = create_block_mask(visible, *sizes, BLOCK_SIZE=BLOCK, device=device)
    return {peers.FLEX: lambda: peers.flex(block_mask=blocks)}


def masks(excluded: Tensor) -> Ways:
    """The ways of a bool mask."""
    tiles = TileMask(excluded)
    return {
        "mask": lambda: peers.ours(mask=excluded),
        "TileMask": lambda: peers.ours(mask=tiles),
        "SDPA, mask": lambda: peers.sdpa(attn_mask=~excluded),
    }


def packed(case: Case) -> Ways:
    """Documents in a row."""
    tokens, length = case.keys, case.keys // DOCUMENTS
    visible = ranges.packed(torch.arange(0, tokens + 1, length, dtype=torch.int32), tokens)
    position = torch.arange(tokens)
    document = position // length
    excluded = (document[:, None] != document) | (position[:, None] < position)

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (each.unflatten(2, (DOCUMENTS, length))[0].transpose(0, 1) for each in (q, k, v))
        return peers.ours(causal=True)(*parts)

    return {
        "visible": lambda: peers.ours(visible=visible, causal=True),
        "a batch of documents": lambda: apart,
        **masks(excluded),
        **flex_of(lambda b, h, i, j: (i // length == j // length) & (i >= j), case),
    }


def window(case: Case) -> Ways:
    """Causal, of the last keys."""
    size, i = case.size, torch.arange(case.keys, dtype=torch.int32)
    excluded = (i[:, None] < i) | (i[:, None] - i >= size)
    limit = torch.tensor(size)  # compiled again for another tensor
    visible = ((i - size + 1)[None, None], (i + 1)[None, None])
    return {
        "window": lambda: peers.ours(window=(size - 1, 0)),
        "visible": lambda: peers.ours(visible=visible),
        **masks(excluded),
        **flex_of(lambda b, h, i, j: (i >= j) & (i - j < limit), case),
    }


def half_padded(case: Case) -> Ways:
    """Half of the keys, or all of them."""
    seen, shape = case.keys // 2, (case.batch, 1, 1, case.keys)
    excluded = (torch.arange(case.keys) >= seen).expand(shape)
    whole = excluded.expand(case.batch, 1, case.queries, case.keys).contiguous()
    visible = ranges.lengths(torch.full((case.batch,), seen))
    flash = peers.BACKENDS["SDPA flash"]
    return {
        "no padding": peers.ours,
        "SDPA flash, no padding": lambda: peers.sdpa(flash),
        "visible": lambda: peers.ours(visible=visible),
        "mask of keys": lambda: peers.ours(mask=excluded),
        "mask of pairs": lambda: peers.ours(mask=whole),
        "SDPA, mask of keys": lambda: peers.sdpa(attn_mask=~excluded),
    }


def at_random(case: Case) -> Ways:
    """Half of the pairs."""
    excluded = torch.rand(case.batch, 1, case.queries, case.keys) < 0.5
    return {"no mask": peers.ours, **masks(excluded)}


def tenth_of_keys(case: Case) -> Ways:
    """A mask excludes a tenth of the keys, of each example others."""
    excluded = torch.rand(case.batch, 1, 1, case.keys) < 0.1
    return {"no mask": peers.ours, "mask of keys": lambda: peers.ours(mask=excluded)}


def sparse(case: Case) -> Ways:
    """A sixteenth of the blocks, of which each row has its own, at random."""
    count, heads = -(-case.keys // BLOCK), case.heads
    excluded = torch.rand(1, heads, count, count).argsort(-1) >= max(count // 16, 1)
    mask = excluded.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
    mask = mask[..., : case.queries, : case.keys]
    blocks = TileMask.from_blocks(excluded, BLOCK)
    none = torch.zeros(1, heads, count, dtype=torch.int32)
    order = excluded.to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)
    whole = (~excluded).sum(-1, dtype=torch.int32)
    sizes = (case.queries, case.keys)
    of_flex = BlockMask.from_kv_blocks(
        none, order, whole, order, BLOCK_SIZE=BLOCK, seq_lengths=sizes
    )
    return {
        "TileMask of blocks": lambda: peers.ours(mask=blocks),
        **masks(mask),
        peers.FLEX: lambda: peers.flex(block_mask=of_flex),
    }


def decoding(case: Case) -> Ways:
    """One query of a long cache."""
    begin = torch.full((case.batch, 1, 1), case.keys - case.size, dtype=torch.int32)
    return {
        "no window": peers.ours,
        "window": lambda: peers.ours(window=(case.size - 1, 0)),
        "visible": lambda: peers.ours(visible=(begin, None)),
    }


CASES = [
    Case(packed, "packed 8 x 1024, causal", 1, 16, 8192, 8192),
    *(Case(window, f"window {size}", 1, 16, 8192, 8192, size=size) for size in (1024, 128)),
    Case(half_padded, "half padded", 8, 16, 2048, 2048),
    Case(at_random, "random mask", 8, 16, 2048, 2048),
    *(
        Case(tenth_of_keys, "a tenth of the keys masked", batch, 16, keys, keys, head_dim)
        for head_dim in (32, 64, 128)
        for batch, keys in ((32, 384), (8, 1024), (4, 4096))
    ),
    Case(sparse, "a sixteenth of the blocks", 1, 8, 32768, 32768),
    Case(decoding, "decoding, window 1024", 8, 32, 1, 65536, size=1024),
    Case(None, "softmax, packed 8 x 1024", 1, 16, 8192, 8192),
]


def notes(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    """What a TileMask does once for many calls."""
    count = -(-case.keys // BLOCK)
    with run.on_device():
        excluded = torch.rand(1, case.heads, count, count).argsort(-1) >= max(count // 16, 1)
    keep = ~excluded.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
    sizes = (case.queries, case.keys)
    calls = {
        "TileMask of blocks": lambda: ops.attention.tile_note(excluded, BLOCK, *sizes),
        "TileMask": lambda: ops.attention.tile_note(keep, 1, *sizes),
    }
    for row in run.rows(measure.ways_of(calls), ("forward",)):
        yield row | {"pass": "note"}


def softmax(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    """Rows of packed documents, causal or not."""
    tokens = case.keys
    with run.on_device():
        scores = torch.randn(case.batch, case.heads, tokens, tokens, dtype=torch.bfloat16)
        offsets = torch.arange(0, tokens + 1, tokens // DOCUMENTS, dtype=torch.int32)
    options = {"visible": ranges.packed(offsets, tokens), "fused": scores.is_cuda or None}
    target, seen = torch.empty_like(scores), {"copy": 1.0, "visible": 1 / DOCUMENTS}
    seen["visible, causal"] = seen["visible"] / 2
    calls = {
        "visible": lambda: megasoftmax.softmax(scores, **options),
        "visible, causal": lambda: megasoftmax.softmax(scores, causal=True, **options),
    }

    def figures(direction: str, name: str, times: measure.Times) -> measure.Row:
        percent = 100 * (1 + seen[name]) / 2 * times["copy"] / times[name]
        return {"microseconds": round(times[name], 1), "percent_of_copy": round(percent, 1)}

    copy = {"copy": lambda: target.copy_(scores)}
    return run.rows(measure.ways_of(calls), ("forward",), figures, beside=copy)


def attention(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    """Each pass of each way; tells which outputs differ from the first."""
    lengths, outputs = (case.queries, case.keys, case.keys), {}
    with run.on_device():
        leaves = peers.projected(case.heads, case.head_dim, lengths, case.batch)
        attends = case.pattern(case)

    def way(build: Callable[[], peers.Attend]) -> measure.Way:
        return measure.Way(partial(build(), *leaves), leaves)

    def look(name: str, output: Tensor, calls: measure.Calls) -> None:
        first = outputs.setdefault("first", output)
        if output.shape == first.shape and (output - first).abs().max() > 0.05:
            print(f"{name} differs from the first")

    passes = ("forward", measure.BOTH) if case.queries > 1 else ("forward",)
    ways = {name: partial(way, build) for name, build in attends.items()}
    return run.rows(ways, passes, look=look)


def rows_of(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    yield from (attention if case.pattern else softmax)(run, case)
    if case.pattern is sparse:
        yield from notes(run, case)


main = measure.command("ranges.csv", CASES, rows_of, FIELDS, rounds=10)

if __name__ == "__main__":
    typer.run(main)
