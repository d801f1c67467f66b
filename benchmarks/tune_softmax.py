"""The row regimes of limits.h beside each other, on one GPU; writes benchmarks/results/tune.csv.

Every regime that serves rows of a length is forced in turn, whether or not it would be chosen;
`chosen` marks the one that is, and `longest` the most columns that the table gives it. Regimes that
differ only in the rows that they are chosen for are timed once. The copy is one of a tensor of the
same size, in the same rounds; fewest bytes are those of bench_softmax.py.

`kind`: rows are unmasked, ragged (one column less), causal or masked. The last two have as many
queries as columns; heads share the mask, which only the forward pass reads.

`timing` says how. "call" is a tensor of 64 MiB, or more where so many columns and queries need it,
and a flushed L2 cache. "cold" are few long rows and a flushed L2 cache. "graph" are the same rows
in a CUDA graph of 10 calls, of which each counts for a tenth.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import measure
import torch
import typer

import megasoftmax
from megasoftmax.build import library
from megasoftmax.explain import DTYPES, H200, PACK_BYTES, Gpu, current_gpu, explain
from megasoftmax.explain.common import visible_entries
from megasoftmax.limits import RowRegime, kernel_limits

LIMITS = kernel_limits()
SIZE = 64 * 2**20  # bytes of the scores, at least
LENGTHS = sorted([*(2**power for power in range(6, 21)), *(3 * 2**power for power in range(5, 19))])
LENGTHS = sorted([*LENGTHS, 5120, 10240, 20480, 50257, 151936])
FEW_ROWS = (1, 4, 16, 64, 256)
LONG = 4096  # columns, from which few rows are timed
CALLS = 10  # in a graph
KINDS = ("unmasked", "ragged", "causal", "masked")
SQUARE = (64, 16384)  # columns of causal and masked rows
MASKED = 0.25  # of the entries
FIELDS = [
    *("direction", "kind", "timing", "rows", "columns", "dtype", "regime", "chosen", "longest"),
    *("microseconds", "percent_of_copy"),
]

Force = Callable[[int, int], None]


@dataclass(frozen=True)
class Case(measure.Case):
    """Scores [heads, queries, columns] and how they are timed."""

    written = ("kind", "timing", "rows", "columns", "dtype")

    heads: int
    queries: int
    columns: int
    dtype: torch.dtype
    kind: str
    timing: str

    @property
    def rows(self) -> int:
        return self.heads * self.queries

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def is_causal(self) -> bool:
        return self.kind == "causal"

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} {self.kind} {self.timing}"

    def fewest_bytes(self, backward: bool) -> int:
        """What a pass reads and writes at least."""
        window = (-1, 0) if self.is_causal else (-1, -1)
        seen = self.heads * visible_entries(window, self.queries, self.columns)
        mask = self.queries * self.columns if self.kind == "masked" and not backward else 0
        return seen * self.dtype.itemsize * (2 if backward else 1) + mask + self.bytes


def table(dtype: torch.dtype) -> list[Case]:
    """The cases."""
    cases = []
    for kind in KINDS:
        for length in LENGTHS:
            columns = length - 1 if kind == "ragged" else length
            rows = max(SIZE // (length * dtype.itemsize), 1)
            if kind in ("unmasked", "ragged"):
                cases.append(Case(1, rows, columns, dtype, kind, "call"))
            elif SQUARE[0] <= columns <= SQUARE[1]:
                cases.append(Case(-(-rows // columns), columns, columns, dtype, kind, "call"))
    return cases + [
        Case(1, rows, columns, dtype, "unmasked", timing)
        for timing in ("graph", "cold")
        for rows in FEW_ROWS
        for columns in LENGTHS
        if columns >= LONG
    ]


def force_regimes(run: measure.Run) -> Force:
    """What forces rows of the tables, forward and backward, on every later call; -1: none."""
    if run.device == "cpu" or run.listed:
        return lambda forward, backward: None
    status = library.load()
    if status.path is None:
        raise SystemExit(f"there are no kernels to time: {status.reason}")
    function = ctypes.CDLL(str(status.path)).megasoftmax_force_regimes
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_int), None
    return function


def launch_of(regime: RowRegime) -> RowRegime:
    """What is left of a regime without the rows that it is chosen for."""
    return replace(regime, name="", max_vectors=None, min_rows=0, serves=())


@dataclass(frozen=True)
class Candidate:
    """A regime that serves the rows of a case."""

    index: int  # in its table
    regime: RowRegime
    chosen: bool
    longest: int | None  # columns; None: any


def candidates(case: Case, backward: bool, gpu: Gpu) -> list[Candidate]:
    """The regimes that serve rows of such a length, each kind of launch once.

    Clusters whose blocks outnumber the units of a row are left out, unless they are chosen.
    """
    found: dict[RowRegime, Candidate] = {}
    usual = explain(
        case.rows,
        case.columns,
        case.dtype,
        queries=case.queries,
        causal=case.is_causal,
        masked=case.kind == "masked",
        backward=backward,
        gpu=gpu,
    )
    vectors_per_segment = (
        LIMITS.constants["kWarpTilesPerSegment"] * LIMITS.constants["kWarpTileVectors"]
    )
    for index, regime in enumerate(LIMITS.backward if backward else LIMITS.forward):
        launch, blocks = launch_of(regime), regime.blocks_per_row or 1
        chosen = launch == launch_of(usual.regime)
        is_for_such = any(usual.kind in LIMITS.kinds[name] for name in regime.serves)
        is_long_enough = regime.max_vectors is None or usual.vectors <= regime.max_vectors
        has_work = chosen or (blocks - 1) * vectors_per_segment < usual.vectors
        if not (is_for_such and is_long_enough and has_work and blocks <= gpu.max_cluster):
            continue
        longest = usual.regime.max_vectors if chosen else regime.max_vectors
        columns = None if longest is None else longest * PACK_BYTES // case.dtype.itemsize
        if regime.storage == "tile":
            is_ragged = case.kind == "ragged"
            columns = LIMITS.constants["kTinyRaggedColumns" if is_ragged else "kTinyColumns"]
            columns -= not is_ragged
        found.setdefault(launch, Candidate(index, regime, chosen, columns))
    return list(found.values())


def run_case(run: measure.Run, case: Case, force: Force, gpu: Gpu) -> Iterator[measure.Row]:
    """The rows of one case: every regime forward, then backward."""
    shape = (case.heads, case.queries, case.columns)
    with run.on_device():
        scores = torch.randn(shape, dtype=case.dtype)
        mask = torch.rand(shape[1:]) < MASKED if case.kind == "masked" else None
    gradient, target = torch.randn_like(scores), torch.empty_like(scores)
    leaf, fused = scores.detach().requires_grad_(), scores.is_cuda or None

    def call(scores: torch.Tensor) -> torch.Tensor:
        return megasoftmax.softmax(scores, mask=mask, causal=case.is_causal, fused=fused)

    def forced(function: measure.Function, forward: int, backward: int) -> None:
        force(forward, backward)
        function()

    output = call(leaf)
    passes: measure.Calls = {
        "forward": lambda: call(scores),
        "backward": lambda: torch.autograd.grad(output, leaf, gradient, retain_graph=True),
    }
    for direction, function in passes.items():
        is_backward = direction == "backward"
        found = {str(regime.index): regime for regime in candidates(case, is_backward, gpu)}
        functions: measure.Calls = {"copy": lambda: target.copy_(scores)}
        for name, candidate in found.items():
            regimes = (-1, candidate.index) if is_backward else (candidate.index, -1)
            functions[name] = functools.partial(forced, function, *regimes)
        for each in functions.values():
            each()
        calls = CALLS if case.timing == "graph" else 1
        graphs = run.captured(functions, calls) if calls > 1 else functions
        times = measure.interleaved(graphs, run.turns, run.timer())
        share = case.fewest_bytes(is_backward) / (2 * case.bytes)
        for name, candidate in found.items():
            yield {
                "direction": direction,
                "regime": candidate.regime.name,
                "chosen": candidate.chosen,
                "longest": candidate.longest,
                "microseconds": f"{times[name] / calls:.2f}",
                "percent_of_copy": f"{100 * share * times['copy'] / times[name]:.1f}",
            }
    force(-1, -1)


@measure.benchmark("tune.csv", rounds=7, chooses=False)
def main(
    run: measure.Run,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bf16",
) -> None:
    """Times every regime."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}, got {dtype!r}")
    on_gpu = run.device == "cuda" and not run.listed
    gpu, force = current_gpu() if on_gpu else H200, force_regimes(run)
    rows_of = functools.partial(run_case, run, force=force, gpu=gpu)
    run.cases(table(DTYPES[dtype]), rows_of, FIELDS, stream=measure.own_stream)


if __name__ == "__main__":
    typer.run(main)
