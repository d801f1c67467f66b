"""The row regimes of limits.h beside each other, on one GPU; writes benchmarks/results/tune.csv.

Every regime that serves rows of a length, without mask, bias and window, is forced in turn, whether
or not it would be chosen; `chosen` marks the one that is, and `longest` the most columns that the
table gives it. Regimes that differ only in the rows that they are chosen for are timed once. The
copy is one of a tensor of the same size, in the same rounds; fewest bytes are those of
bench_rows.py.

`timing` says how: "call" is a tensor of 64 MiB and a flushed L2 cache; "cold" are few long rows and a
flushed L2 cache; "graph" are the same rows in a CUDA graph of 10 calls, of which each counts for a
tenth.
"""

import csv
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import measure
import torch
import typer
from rich.progress import track

import megasoftmax
from megasoftmax.build import library
from megasoftmax.explain import DTYPES, PACK_BYTES, Gpu, current_gpu, explain
from megasoftmax.limits import RowRegime, kernel_limits

LIMITS = kernel_limits()
RESULTS = Path(__file__).parent / "results" / "tune.csv"
FIELDS = [
    *("gpu", "torch", "commit", "date", "direction", "timing", "rows", "columns", "dtype"),
    *("regime", "chosen", "longest", "microseconds", "percent_of_copy"),
]
SIZE = 64 * 2**20  # bytes of the scores
LENGTHS = sorted(
    [
        *(2**power for power in range(6, 21)),
        *(3 * 2**power for power in range(5, 19)),
        *(5120, 10240, 20480, 50257, 151936),
    ]
)
FEW_ROWS = (1, 4, 16, 64, 256)
LONG = 4096  # columns, from which few rows are timed
CALLS = 10  # in a graph

Force = Callable[[int, int], None]


@dataclass(frozen=True)
class Case:
    """Scores [rows, columns] and how they are timed."""

    rows: int
    columns: int
    dtype: torch.dtype
    timing: str

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize


def table(dtype: torch.dtype) -> list[Case]:
    """The cases."""
    cases = [
        Case(max(SIZE // (columns * dtype.itemsize), 1), columns, dtype, "call")
        for columns in LENGTHS
    ]
    return cases + [
        Case(rows, columns, dtype, timing)
        for timing in ("graph", "cold")
        for rows in FEW_ROWS
        for columns in LENGTHS
        if columns >= LONG
    ]


def force_regimes() -> Force:
    """What forces rows of the tables, forward and backward, on every later call; -1: none."""
    status = library.load()
    if status.path is None:
        raise SystemExit(f"there are no kernels to time: {status.reason}")
    function = ctypes.CDLL(str(status.path)).megasoftmax_force_regimes
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_int), None
    return function


def launch_of(regime: RowRegime) -> RowRegime:
    """What is left of a regime without the rows that it is chosen for."""
    return replace(regime, name="", max_chunks=None, min_rows=0, serves=())


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
        backward=backward,
        multiprocessors=gpu.multiprocessors,
        max_cluster=gpu.max_cluster,
    )
    chunks_per_unit = LIMITS.constants["kUnitBatches"] * LIMITS.constants["kChunksPerBatch"]
    for index, regime in enumerate(LIMITS.backward if backward else LIMITS.forward):
        launch, blocks = launch_of(regime), regime.blocks_per_row or 1
        chosen = launch == launch_of(usual.regime)
        is_for_such = any(usual.kind in LIMITS.kinds[name] for name in regime.serves)
        is_long_enough = regime.max_chunks is None or usual.chunks <= regime.max_chunks
        has_work = chosen or (blocks - 1) * chunks_per_unit < usual.chunks
        if not (is_for_such and is_long_enough and has_work and blocks <= gpu.max_cluster):
            continue
        longest = usual.regime.max_chunks if chosen else regime.max_chunks
        columns = None if longest is None else longest * PACK_BYTES // case.dtype.itemsize
        if regime.storage == "tile":
            columns = LIMITS.constants["kTinyColumns"] - 1
        found.setdefault(launch, Candidate(index, regime, chosen, columns))
    return list(found.values())


def run_case(case: Case, rounds: int, force: Force, gpu: Gpu) -> Iterator[dict]:
    """The lines of one case: every regime forward, then backward."""
    scores = torch.randn(case.rows, case.columns, device="cuda", dtype=case.dtype)
    gradient, target = torch.randn_like(scores), torch.empty_like(scores)
    leaf = scores.detach().requires_grad_()
    output = megasoftmax.softmax(leaf, fused=True)

    def forward() -> object:
        return megasoftmax.softmax(scores, fused=True)

    def backward() -> object:
        return torch.autograd.grad(output, leaf, gradient, retain_graph=True)

    for direction, function, share in (("forward", forward, 1.0), ("backward", backward, 1.5)):
        is_backward = direction == "backward"
        found = {str(regime.index): regime for regime in candidates(case, is_backward, gpu)}
        functions: dict[str, measure.Function] = {"copy": lambda: target.copy_(scores)}
        for name, candidate in found.items():

            def forced(
                index: int = candidate.index,
                is_backward: bool = is_backward,
                function: measure.Function = function,
            ) -> None:
                force(-1 if is_backward else index, index if is_backward else -1)
                function()

            functions[name] = forced
        times = microseconds(case, functions, rounds)
        for name, candidate in found.items():
            yield {
                "direction": direction,
                "timing": case.timing,
                "rows": case.rows,
                "columns": case.columns,
                "dtype": str(case.dtype).removeprefix("torch."),
                "regime": candidate.regime.name,
                "chosen": candidate.chosen,
                "longest": candidate.longest,
                "microseconds": f"{times[name]:.2f}",
                "percent_of_copy": f"{100 * share * times['copy'] / times[name]:.1f}",
            }


def microseconds(
    case: Case, functions: dict[str, measure.Function], rounds: int
) -> dict[str, float]:
    """The median time of each, as the case is timed."""
    timer = measure.gpu_timer()
    for function in functions.values():
        function()
    if case.timing != "graph":
        return measure.interleaved(functions, rounds, timer)
    graphs = {name: measure.captured(function, CALLS) for name, function in functions.items()}
    times = measure.interleaved(graphs, rounds, timer)
    return {name: time / CALLS for name, time in times.items()}


def report(lines: list[dict]) -> None:
    """One line for each pass of a case: the regime that is chosen, and the fastest."""
    for direction in ("forward", "backward"):
        here = [line for line in lines if line["direction"] == direction]
        chosen = next(line for line in here if line["chosen"])
        best = min(here, key=lambda line: float(line["microseconds"]))
        print(
            f"{chosen['rows']}x{chosen['columns']} {chosen['timing']} {direction}: "
            f"{chosen['regime']} {chosen['microseconds']} µs, {chosen['percent_of_copy']}%; "
            f"fastest {best['regime']} {best['microseconds']} µs, {best['percent_of_copy']}%"
        )


def main(
    dtype: str = "bf16", rounds: int = 7, out: Path = RESULTS, only: str = "", commit: str = ""
) -> None:
    """Runs the sweep.

    `dtype` is fp16, bf16 or fp32; `only` keeps the cases of which "rowsxcolumns timing" contains
    it; `commit` is for a copy without git.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}, got {dtype!r}")
    gpu, force = current_gpu(), force_regimes()
    common = measure.provenance(commit)
    cases = [
        case for case in table(DTYPES[dtype]) if only in f"{case.rows}x{case.columns} {case.timing}"
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    # Graphs cannot capture the default stream, on which backward passes would run otherwise.
    with out.open("w", newline="") as file, torch.cuda.stream(torch.cuda.Stream()):
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for case in track(cases, "regimes"):
            lines = [common | line for line in run_case(case, rounds, force, gpu)]
            force(-1, -1)
            writer.writerows(lines)
            file.flush()
            report(lines)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
