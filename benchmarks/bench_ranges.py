"""Masks that leave tiles out, on one GPU: ranges, TileMask and bool masks beside SDPA and
FlexAttention; writes results/ranges.csv.

A case is a shape and a pattern of visible pairs, bfloat16. Every way to say the pattern is a row:
`window=`, `visible=`, a bool mask, a TileMask, one row for each document. forward+backward is one
call and the gradients of query, key and value. "note" is what a TileMask does once for many calls.
`percent_of_copy`, of softmax: the fewest bytes that the pattern needs, against what a copy of the
scores reaches in the same run.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import measure
import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import megasoftmax
from megasoftmax import TileMask, ops, ranges

RESULTS = Path(__file__).parent / "results" / "ranges.csv"
FIELDS = ["case", "pass", "implementation", "microseconds", "percent_of_copy"]
BLOCK = 128  # of the block-sparse pattern, and of FlexAttention

Leaves = tuple[Tensor, Tensor, Tensor]
Ways = dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]
Rows = Iterator[dict[str, object]]


def leaves_of(batch: int, heads: int, queries: int, keys: int, dim: int) -> Leaves:
    """Query, key and value as a projection lays them out."""

    def normal(length: int) -> Tensor:
        made = torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    return normal(queries), normal(keys), normal(keys)


def ours(**options: object) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: megasoftmax.attention(q, k, v, fused=True, **options)


def sdpa(**options: object) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)


def flash(**options: object) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, **options)

    return call


def flex(blocks: BlockMask) -> Ways:
    """By FlexAttention."""
    compiled = torch.compile(flex_attention, dynamic=False)
    return {"FlexAttention": lambda q, k, v: compiled(q, k, v, block_mask=blocks)}


def flex_of(visible: Callable[..., Tensor], tokens: int) -> Ways:
    """The same from its function of batch, head, query and key."""
    return flex(create_block_mask(visible, None, None, tokens, tokens, BLOCK_SIZE=BLOCK))


def time_ways(
    case: str,
    leaves: tuple[Tensor, ...],
    ways: dict[str, Callable[..., Tensor]],
    rounds: int,
    *,
    backward: bool = True,
    compare: bool = True,
) -> Rows:
    """Each forward, and with the gradients; tells which outputs differ from the first."""
    timer = measure.gpu_timer()
    passes: dict[str, measure.Function] = {}
    outputs: dict[str, Tensor] = {}
    for name, call in ways.items():
        try:
            outputs[name] = call(*leaves).detach()
        except RuntimeError as error:
            print(f"{case}, {name}: {str(error).splitlines()[0][:150]}")
            continue
        passes[f"forward|{name}"] = lambda call=call: call(*leaves)
        if backward:
            gradient = torch.randn_like(outputs[name])
            passes[f"forward+backward|{name}"] = lambda call=call, gradient=gradient: (
                torch.autograd.grad(call(*leaves), leaves, gradient)
            )
    first, *others = outputs.items()
    for name, output in others if compare else []:
        if output.shape == first[1].shape and (output - first[1]).abs().max() > 0.05:
            print(f"{case}: {name} and {first[0]} differ")
    del outputs, first, others
    for name, microseconds in measure.interleaved(passes, rounds, timer, warm_up=2).items():
        which, _, implementation = name.partition("|")
        yield {
            "case": case,
            "pass": which,
            "implementation": implementation,
            "microseconds": round(microseconds, 1),
        }


def packed(rounds: int) -> Rows:
    """Eight documents in a row."""
    leaves, length = leaves_of(1, 16, 8192, 8192, 128), 1024
    offsets = torch.arange(0, 8193, length, device="cuda", dtype=torch.int32)
    visible = ranges.packed(offsets, 8192)
    document = torch.arange(8192, device="cuda") // length
    position = torch.arange(8192, device="cuda")
    excluded = (document[:, None] != document) | (position[:, None] < position)

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (each.unflatten(2, (8, length))[0].transpose(0, 1) for each in (q, k, v))
        return megasoftmax.attention(*parts, causal=True, fused=True)

    ways: Ways = {
        "visible": ours(visible=visible, causal=True),
        "a batch of documents": apart,
        "mask": ours(mask=excluded),
        "TileMask": ours(mask=TileMask(excluded)),
        "SDPA, mask": sdpa(attn_mask=~excluded),
        **flex_of(lambda b, h, i, j: (i // length == j // length) & (i >= j), 8192),
    }
    yield from time_ways("packed 8 x 1024, causal [1, 16, 8192, 128]", leaves, ways, rounds)


def windows(rounds: int) -> Rows:
    """Causal, of the last keys."""
    leaves = leaves_of(1, 16, 8192, 8192, 128)
    i = torch.arange(8192, device="cuda", dtype=torch.int32)
    for size in (1024, 128):
        excluded = (i[:, None] < i) | (i[:, None] - i >= size)
        limit = torch.tensor(size, device="cuda")  # compiled again for another tensor
        ways: Ways = {
            "window": ours(window=(size - 1, 0)),
            "visible": ours(visible=((i - size + 1)[None, None], (i + 1)[None, None])),
            "mask": ours(mask=excluded),
            "TileMask": ours(mask=TileMask(excluded)),
            "SDPA, mask": sdpa(attn_mask=~excluded),
            **flex_of(lambda b, h, i, j: (i >= j) & (i - j < limit), 8192),  # noqa: B023
        }
        yield from time_ways(f"window {size} [1, 16, 8192, 128]", leaves, ways, rounds)


def padding(rounds: int) -> Rows:
    """Half of the keys, all of them, and half of the pairs at random."""
    leaves = leaves_of(8, 16, 2048, 2048, 128)
    keep = torch.arange(2048, device="cuda") < 1024
    keys = (~keep).expand(8, 1, 1, 2048)
    whole = keys.expand(8, 1, 2048, 2048).contiguous()
    lengths = torch.full((8,), 1024, device="cuda")
    ways: Ways = {
        "no padding": ours(),
        "SDPA flash, no padding": flash(),
        "visible": ours(visible=ranges.lengths(lengths)),
        "mask of keys": ours(mask=keys),
        "mask of pairs": ours(mask=whole),
        "SDPA, mask of keys": sdpa(attn_mask=~keys),
    }
    yield from time_ways("half padded [8, 16, 2048, 128]", leaves, ways, rounds)
    random = torch.rand(8, 1, 2048, 2048, device="cuda") < 0.5
    ways = {
        "no mask": ours(),
        "mask": ours(mask=random),
        "TileMask": ours(mask=TileMask(random)),
        "SDPA, mask": sdpa(attn_mask=~random),
    }
    yield from time_ways("random mask [8, 16, 2048, 128]", leaves, ways, rounds)


def block_sparse(rounds: int) -> Rows:
    """A sixteenth of the blocks, of which each row has its own, at random."""
    tokens, heads = 32768, 8
    count = tokens // BLOCK
    leaves = leaves_of(1, heads, tokens, tokens, 128)
    excluded = torch.rand(1, heads, count, count, device="cuda").argsort(-1) >= count // 16
    mask = excluded.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
    blocks, tiles = TileMask.from_blocks(excluded, BLOCK), TileMask(mask)
    none = torch.zeros(1, heads, count, device="cuda", dtype=torch.int32)
    order = excluded.to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)
    whole = (~excluded).sum(-1, dtype=torch.int32)
    sparse = BlockMask.from_kv_blocks(none, order, whole, order, BLOCK_SIZE=BLOCK)
    ways: Ways = {
        "TileMask of blocks": ours(mask=blocks),
        "TileMask": ours(mask=tiles),
        "mask": ours(mask=mask),
        **flex(sparse),
    }
    case = f"a sixteenth of the blocks [1, {heads}, {tokens}, 128]"
    yield from time_ways(case, leaves, ways, rounds)
    keep = ~mask
    del mask, tiles
    yield from time_ways(case, leaves, {"SDPA, mask": sdpa(attn_mask=keep)}, 3)
    notes: dict[str, measure.Function] = {
        "TileMask of blocks": lambda: ops.attention.tile_note(excluded, BLOCK, tokens, tokens),
        "TileMask": lambda: ops.attention.tile_note(keep, 1, tokens, tokens),
    }
    for name, call in notes.items():
        call()
        microseconds = measure.interleaved({name: call}, rounds, measure.gpu_timer())[name]
        yield {
            "case": case,
            "pass": "note",
            "implementation": name,
            "microseconds": round(microseconds, 1),
        }


def decoding(rounds: int) -> Rows:
    """One query of a long cache."""
    leaves = leaves_of(8, 32, 1, 65536, 128)
    begin = torch.full((8, 1, 1), 65536 - 1024, device="cuda", dtype=torch.int32)
    ways: Ways = {
        "no window": ours(),
        "window": ours(window=(1023, 0)),
        "visible": ours(visible=(begin, None)),
    }
    case = "decoding, window 1024 [8, 32, 1 of 65536, 128]"
    yield from time_ways(case, leaves, ways, rounds, backward=False)


def softmax(rounds: int) -> Rows:
    """Rows of packed documents, causal or not."""
    shape = (1, 16, 8192, 8192)
    scores = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    offsets = torch.arange(0, 8193, 1024, device="cuda", dtype=torch.int32)
    visible = ranges.packed(offsets, 8192)
    target = torch.empty_like(scores)
    calls: dict[str, measure.Function] = {
        "copy": lambda: target.copy_(scores),
        "visible": lambda: megasoftmax.softmax(scores, visible=visible, fused=True),
        "visible, causal": lambda: megasoftmax.softmax(
            scores, visible=visible, causal=True, fused=True
        ),
    }
    seen = {"copy": 1.0, "visible": 1 / 8, "visible, causal": 1 / 16}
    times = measure.interleaved(calls, rounds, measure.gpu_timer(), warm_up=2)
    for name, microseconds in times.items():
        share = (1 + seen[name]) / 2 * times["copy"] / microseconds
        yield {
            "case": "softmax, packed 8 x 1024 [1, 16, 8192, 8192]",
            "pass": "forward",
            "implementation": name,
            "microseconds": round(microseconds, 1),
            "percent_of_copy": round(100 * share, 1),
        }


CASES = [packed, windows, padding, block_sparse, decoding, softmax]


def main(
    rounds: measure.Rounds = 10,
    only: Annotated[str, typer.Option(help="Names of cases, with commas.")] = "",
    out: measure.Out = RESULTS,
    commit: measure.Commit = "",
) -> None:
    """Time masks that leave tiles out."""
    torch.manual_seed(0)
    with measure.results(out, measure.provenance(commit), FIELDS) as write:
        for case in CASES:
            if only and case.__name__ not in only.split(","):
                continue
            for row in case(rounds):
                write(row)
                figures = row["microseconds"], row.get("percent_of_copy", "")
                print(f"{row['case']:48} {row['pass']:17} {row['implementation']:24}", *figures)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
