"""Few queries of many keys, on one GPU, beside the backends of SDPA; writes results/decoding.csv.

Decoding, speculative decoding and chunks of a prompt: bfloat16, 32 heads of queries, `group` of
which share keys, in inference mode, with a flushed L2 cache. `percent_of_copy` counts the bytes of
the keys and values that are seen, once, against the bandwidth of a copy; `of_best` is the fastest
backend's time over this one's. Backends have no window: they are given the keys in it, which one
query allows. `error_rms`, relative, is against float64, of one head. What a backend refuses is a
row without a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import measure
import peers
import torch
import typer
from measured import OURS
from torch import Tensor

import megasoftmax

SIZES = ("case", "batch", "heads", "group", "queries", "keys", "head_dim", "window")
FIELDS = [
    *(*SIZES, "implementation", "microseconds", "percent_of_copy", "tflops", "of_best"),
    *("error_rms", "note"),
]
COPY = 4.27  # TB/s that a copy reaches on an H200
MOST = 9e9  # bytes of keys and values


@dataclass(frozen=True)
class Case(measure.Case):
    """A causal call; `window`: of so many keys, the query's own among them; 0: of all."""

    written = SIZES

    batch: int
    group: int
    queries: int
    keys: int
    head_dim: int
    window: int = 0
    heads: int = 32

    @property
    def key_heads(self) -> int:
        return max(self.heads // self.group, 1)

    @property
    def seen(self) -> int:
        """Keys that some query sees."""
        return min(self.keys, self.window + self.queries - 1) if self.window else self.keys

    def key_bytes(self, keys: int) -> int:
        """Of keys and values, so many of each head."""
        return 4 * self.batch * self.key_heads * keys * self.head_dim

    def __str__(self) -> str:
        window = f" window {self.window}" if self.window else ""
        heads = f"{self.heads}/{self.key_heads}"
        return f"{self.batch}x{heads}x{self.queries}x{self.keys}x{self.head_dim}{window}"


def cases() -> list[Case]:
    """Steps of decoding; then more queries, and windows."""
    found = [
        Case(batch, group, 1, keys, head_dim)
        for keys in (1024, 8192, 32_768, 65_536, 131_072)
        for group, head_dim in ((1, 128), (4, 128), (8, 128), (4, 64))
        for batch in (1, 8, 64)
    ]
    found += [
        Case(1, group, queries, 131_072, head_dim)
        for group, head_dim in ((1, 128), (4, 128), (1, 64))
        for queries in (16, 17, 64, 128)
    ]
    found += [Case(8, 4, queries, 8192, 128) for queries in (4, 17, 128)]
    found += [Case(batch, 4, 1, 65_536, 128, window=1024) for batch in (1, 8)]
    found.append(Case(1, 1, 64, 65_536, 128, window=4096))
    return [case for case in found if case.key_bytes(case.keys) <= MOST]


def implementations(case: Case, tensors: list[Tensor]) -> dict[str, measure.Build]:
    """Backends have causality from the first key on: more queries see all keys."""
    query, *of_keys = tensors

    def way(attend: peers.Attend, *of_keys: Tensor) -> measure.Build:
        return lambda: measure.Way(lambda: attend(query, *of_keys))

    ways = {OURS: way(peers.ours(**limits(case)), *of_keys)}
    if not case.window or case.queries == 1:
        seen = [each[:, :, -case.window :] for each in of_keys]
        for name, backend in peers.BACKENDS.items():
            ways[name] = way(peers.sdpa(backend, enable_gqa=case.group > 1), *seen)
    return ways


def limits(case: Case, causal: bool = True) -> dict[str, object]:
    return {"window": (case.window - 1, 0)} if case.window else {"causal": causal}


def rows_of(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    places = ((case.heads, case.queries), *[(case.key_heads, case.keys)] * 2)
    with run.on_device():
        tensors = [
            torch.randn(case.batch, heads, length, case.head_dim, dtype=torch.bfloat16)
            for heads, length in places
        ]
    errors = {}
    operations = 4 * case.batch * case.heads * case.queries * case.seen * case.head_dim

    def look(name: str, output: Tensor, calls: measure.Calls) -> None:
        given = [each[-1:, -1:].double() for each in tensors]  # of the last head
        options = limits(case, causal=name == OURS)
        wanted = megasoftmax.attention(*given, **options, fused=False)[0, 0]
        error = output[-1, -1].double() - wanted
        errors[name] = float((error.square().mean() / wanted.square().mean()).sqrt())

    def figures(direction: str, name: str, times: measure.Times) -> measure.Row:
        backends = [time for other, time in times.items() if other != OURS]
        percent = case.key_bytes(case.seen) / times[name] / COPY / 1e4
        return {
            "microseconds": f"{times[name]:.2f}",
            "percent_of_copy": f"{percent:.1f}",
            "tflops": f"{operations / times[name] / 1e6:.1f}",
            "of_best": f"{min(backends) / times[name]:.3f}" if backends else "",
            "error_rms": f"{errors[name]:.3e}",
        }

    mode, ways = torch.inference_mode, implementations(case, tensors)
    rows = run.rows(ways, ("forward",), figures, forward_mode=mode, look=look, noted=True)
    for row in rows:
        del row["pass"]
        yield row


main = measure.command("decoding.csv", cases(), rows_of, FIELDS, rounds=7)

if __name__ == "__main__":
    typer.run(main)
