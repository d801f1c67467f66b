"""Few queries of many keys, on one GPU, beside the backends of SDPA; writes results/decoding.csv.

Decoding, speculative decoding and chunks of a prompt: bfloat16, 32 heads of queries, `group` of
which share keys, in inference mode, with a flushed L2 cache. `percent_of_copy` counts the bytes of
the keys and values that are seen, once, against the bandwidth of a copy; `of_best` is the fastest
backend's time over this one's. Backends have no window: they are given the keys in it, which one
query allows. `error_rms`, relative, is against float64, of one head. What a backend refuses is a
row without a time.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import measure
import torch
import typer
from attention_peers import BACKENDS
from bench_attention import attempt
from measured import OURS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import megasoftmax

RESULTS = Path(__file__).parent / "results" / "decoding.csv"
FIELDS = [
    *("case", "batch", "heads", "group", "queries", "keys", "head_dim", "window"),
    *("implementation", "microseconds", "percent_of_copy", "tflops", "of_best"),
    *("error_rms", "note"),
]
HEADS = 32
BAR = 0.95  # of the fastest backend's speed
COPY = 4.27  # TB/s that a copy reaches on an H200
MOST = 9e9  # bytes of keys and values
QUICK_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """A causal call; `window`: of so many keys, the query's own among them; 0: of all."""

    batch: int
    group: int
    queries: int
    keys: int
    head_dim: int
    window: int = 0

    @property
    def key_heads(self) -> int:
        return HEADS // self.group

    @property
    def seen(self) -> int:
        """Keys that some query sees."""
        return min(self.keys, self.window + self.queries - 1) if self.window else self.keys

    def key_bytes(self, keys: int) -> int:
        """Of keys and values, so many of each head."""
        return 4 * self.batch * self.key_heads * keys * self.head_dim

    def __str__(self) -> str:
        window = f" window {self.window}" if self.window else ""
        return (
            f"{self.batch}x{HEADS}/{self.key_heads}x{self.queries}x{self.keys}x{self.head_dim}"
            + window
        )


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


def is_quick(case: Case) -> bool:
    if case.window:
        return case.batch == 1
    return case.group == 4 and case.head_dim == 128 and case.batch == 1


def backend_call(
    backend: SDPBackend, case: Case, query: Tensor, key: Tensor, value: Tensor
) -> measure.Function:
    """One backend of torch's. Its causality begins at the first key: more queries see all keys."""
    if case.window:
        key, value = key[:, :, -case.window :], value[:, :, -case.window :]

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, enable_gqa=case.group > 1)

    return call


def expected(case: Case, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """[queries, head_dim] of the last head, in float64."""
    query, key, value = (tensor[-1:, -1:].double() for tensor in (query, key, value))
    return megasoftmax.attention(query, key, value, **limits(case, causal), fused=False)[0, 0]


def limits(case: Case, causal: bool) -> dict[str, object]:
    if case.window:
        return {"window": (case.window - 1, 0)}
    return {"causal": causal}


def run_case(case: Case, rounds: int, timer: measure.Timer, copy: float) -> Iterator[dict]:
    def normal(heads: int, length: int) -> Tensor:
        shape = (case.batch, heads, length, case.head_dim)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    query, key, value = (
        normal(heads, length)
        for heads, length in (
            (HEADS, case.queries),
            (case.key_heads, case.keys),
            (case.key_heads, case.keys),
        )
    )
    calls: dict[str, measure.Function] = {
        OURS: lambda: megasoftmax.attention(query, key, value, **limits(case, True), fused=True)
    }
    if not case.window or case.queries == 1:
        calls |= {
            name: backend_call(backend, case, query, key, value)
            for name, backend in BACKENDS.items()
        }
    errors: dict[str, float] = {}
    for name, call in list(calls.items()):
        output, refusal = attempt(call)
        if output is None:
            del calls[name]
            yield {"implementation": name, "note": refusal}
            continue
        wanted = expected(case, query, key, value, causal=name == OURS)
        error = output[-1, -1].double() - wanted
        errors[name] = float((error.square().mean() / wanted.square().mean()).sqrt())
    times = measure.interleaved(calls, rounds, timer)
    best = min((time for name, time in times.items() if name != OURS), default=None)
    operations = 4 * case.batch * HEADS * case.queries * case.seen * case.head_dim
    for name, microseconds in times.items():
        percent = case.key_bytes(case.seen) / microseconds / copy / 1e4
        yield {
            "implementation": name,
            "microseconds": f"{microseconds:.2f}",
            "percent_of_copy": f"{percent:.1f}",
            "tflops": f"{operations / microseconds / 1e6:.1f}",
            "of_best": "" if best is None else f"{best / microseconds:.3f}",
            "error_rms": f"{errors[name]:.3e}",
        }


def main(
    rounds: measure.Rounds = 7,
    out: measure.Out = RESULTS,
    only: Annotated[str, typer.Option(help="A regular expression of cases.")] = "",
    quick: Annotated[bool, typer.Option(help="Few cases and rounds.")] = False,
    copy: Annotated[float, typer.Option(help="The bandwidth of a copy, in TB/s.")] = COPY,
    commit: measure.Commit = "",
    listed: measure.Listed = False,
) -> None:
    """Times steps of decoding."""
    chosen = [
        case for case in cases() if re.search(only, str(case)) and (is_quick(case) or not quick)
    ]
    if listed:
        print(*chosen, sep="\n")
        return
    torch.manual_seed(0)
    rounds = min(rounds, QUICK_ROUNDS) if quick else rounds
    common, timer = measure.provenance(commit), measure.gpu_timer()
    with torch.inference_mode(), measure.results(out, common, FIELDS) as write:
        for case in chosen:
            names = ("batch", "group", "queries", "keys", "head_dim", "window")
            described = {"case": str(case), "heads": HEADS}
            described |= {name: getattr(case, name) for name in names}
            for row in run_case(case, rounds, timer, copy):
                write(described | row)
                is_short = row["implementation"] == OURS and float(row.get("of_best") or 1) < BAR
                figures = [row.get(name, "") for name in ("microseconds", "percent_of_copy")]
                figures += [row.get("of_best", ""), f"short of {BAR}" if is_short else ""]
                print(f"{case!s:44} {row['implementation']:20}", *figures)
            measure.release()


if __name__ == "__main__":
    typer.run(main)
