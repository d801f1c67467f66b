"""Plain softmax of rows of all lengths beside its peers, on one GPU; writes results/rows.csv.

A case is a tensor [rows, columns] and a pass. Its fewest bytes are those of one read of the scores,
or of gradient and probabilities, and one write; the copy is one of a tensor of the same size, in
the same rounds. The implementations take turns, as in bench_softmax.py.

`timing` says how: "call" is a call from Python with the L2 cache flushed before it. Cases below
64 MiB have a further line, "graph": a CUDA graph of 20 calls, of which each counts for a twentieth.
What the host needs for a launch is not in it, and the tensors may stay in the L2 cache from one
call to the next, those of the copy too.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import measure
import torch
import typer
from measured import OURS
from rich.progress import track
from torch import Tensor

import megasoftmax

RESULTS = Path(__file__).parent / "results" / "rows.csv"
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
SMALL = 64 * 2**20  # bytes of scores and probabilities together
CALLS = 20  # in a graph
LARGE = 256 * 2**20  # bytes of the scores in the sweep over columns
MOST = 4 * 2**30  # bytes of the scores: each implementation keeps as many for its backward
QUACK_COLUMNS = 2**20  # beyond, it fails once it has compiled

PEERS_TABLE = [
    *((rows, 1024, HALF) for rows in (128, 2048, 32768)),
    *((2048, 8192, HALF), (262144, 256, HALF), (32768, 4096, HALF), (8192, 32768, HALF)),
    *((4096, 65536, HALF), (2048, 131072, HALF), (1024, 262144, HALF), (8192, 50257, HALF)),
    *((4, columns, HALF) for columns in (65536, 1048576, 8388608, 33554432)),
    *((32768, 1024, FLOAT), (32768, 4096, FLOAT), (2048, 65536, FLOAT), (2048, 262144, FLOAT)),
    *((32768, 4096, BFLOAT), (8192, 32768, BFLOAT), (2048, 131072, BFLOAT)),
]
# Each costs seconds of compilation.
COMPILED = [
    *((2048, 8192, HALF), (32768, 4096, HALF), (1024, 262144, HALF), (8192, 50257, HALF)),
    *((4, 1048576, HALF), (32768, 4096, FLOAT), (2048, 65536, FLOAT), (2048, 262144, FLOAT)),
]
VOCABULARIES = [(8192, 50257), (2048, 128256), (2048, 151936), (2048, 201088)]
FEW_ROWS = [1, 4, 64]
LONG_ROWS = [32000, 65536, 131072, 262144, 1048576, 8388608, 33554432]
SHORT_ROWS = [8, 33, 64, 100, 128]
COLUMNS = [(64, 1024, 1024), (64, 1024, 1023), (16, 512, 4096), (8, 4096, 1024)]


@dataclass(frozen=True)
class Case:
    """Scores of a shape and type, normalised over `dim`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = -1

    @property
    def columns(self) -> int:
        return self.shape[self.dim]

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // self.columns

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        name = f"{'x'.join(map(str, self.shape))} {measure.dtype_name(self.dtype)}"
        return name if self.dim == -1 else f"{name} dim {self.dim}"


def table(dim0: bool) -> list[Case]:
    """The cases, each once."""
    cases = [Case((rows, columns), dtype) for rows, columns, dtype in PEERS_TABLE]
    for power in range(8, 19):
        rows = LARGE // (2**power * HALF.itemsize)
        cases += [Case((rows, columns), HALF) for columns in (2**power, 2**power - 1)]
    cases += [Case(shape, HALF) for shape in VOCABULARIES]
    cases += [Case((rows, columns), HALF) for rows in FEW_ROWS for columns in LONG_ROWS]
    cases += [Case((2**20, columns), HALF) for columns in SHORT_ROWS]
    cases.append(Case((1, 32000), FLOAT))
    if dim0:
        cases += [Case(shape, dtype, 1) for shape in COLUMNS for dtype in (BFLOAT, FLOAT)]
    return [case for case in dict.fromkeys(cases) if case.bytes <= MOST]


Softmax = Callable[[Tensor], Tensor]


@functools.cache
def installed() -> dict[str, Softmax]:
    """The peers that are packages; says which are missing."""
    found: dict[str, Softmax] = {}
    try:
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        found["liger"] = LigerSoftmaxFunction.apply
    except ImportError as error:
        print(f"without liger: {error}")
    try:
        from quack.softmax import softmax as quack_softmax

        found["quack"] = quack_softmax
    except ImportError as error:
        print(f"without quack: {error}")
    return found


def implementations(case: Case) -> Iterator[tuple[str, Softmax, tuple[str, ...]]]:
    """Name, function and passes of all that are to be timed.

    quack compiles for each length, which takes seconds: its backward is timed in PEERS_TABLE alone.
    """
    both = ("forward", "backward")
    yield OURS, lambda scores: megasoftmax.softmax(scores, dim=case.dim, fused=True), both
    yield "torch.softmax", lambda scores: scores.softmax(case.dim), both
    if case.dim != -1:
        return
    key = (*case.shape, case.dtype)
    for name, softmax in installed().items():
        if name != "quack":
            yield name, softmax, both
        elif case.columns <= QUACK_COLUMNS:
            yield name, softmax, both if key in PEERS_TABLE else ("forward",)
        else:
            print(f"{name} is left out of {case}: more than {QUACK_COLUMNS} columns")
    if key in COMPILED:
        torch._dynamo.reset()
        yield (
            "torch.compile",
            torch.compile(lambda scores: scores.softmax(-1), dynamic=False),
            ("forward",),
        )


def calls_of(
    case: Case, scores: Tensor, gradient: Tensor
) -> dict[str, dict[str, measure.Function]]:
    """{pass: {implementation: call}} of what does not refuse the case; each has run once."""
    calls: dict[str, dict[str, measure.Function]] = {"forward": {}, "backward": {}}
    for name, softmax, passes in implementations(case):
        try:
            with torch.no_grad():
                softmax(scores)
            torch.cuda.synchronize()
            calls["forward"][name] = lambda softmax=softmax: softmax(scores)
            if "backward" in passes:
                leaf = scores.detach().requires_grad_()
                output = softmax(leaf)

                def backward(output: Tensor = output, leaf: Tensor = leaf) -> object:
                    return torch.autograd.grad(output, leaf, gradient, retain_graph=True)

                backward()
                torch.cuda.synchronize()
                calls["backward"][name] = backward
        except Exception as error:  # a peer that refuses the case is a result too
            if name == OURS:
                raise
            print(f"{name} refuses {case}: {error!r}"[:200])
    return calls


def run_case(case: Case, rounds: int) -> Iterator[dict]:
    """The lines of one case: forward and backward, with the copy."""
    scores = torch.randn(case.shape, device="cuda", dtype=case.dtype)
    gradient, target = torch.randn_like(scores), torch.empty_like(scores)
    timer = measure.gpu_timer()
    fewest = {"forward": 2 * case.bytes, "backward": 3 * case.bytes}
    for direction, functions in calls_of(case, scores, gradient).items():
        functions = {"copy": lambda: target.copy_(scores)} | functions
        with torch.set_grad_enabled(direction != "forward"):
            times = {"call": measure.interleaved(functions, rounds, timer)}
            if 2 * case.bytes < SMALL:
                graphs = captured(case, functions)
                totals = measure.interleaved(graphs, rounds, timer)
                times["graph"] = {name: total / CALLS for name, total in totals.items()}
        for timing, found in times.items():
            yield from lines(case, direction, timing, found, fewest[direction])


def captured(case: Case, functions: dict[str, measure.Function]) -> dict[str, measure.Function]:
    """Their graphs, of those that can be captured."""
    graphs = {}
    for name, function in functions.items():
        try:
            graphs[name] = measure.captured(function, CALLS)
        except Exception as error:
            if name in (OURS, "copy"):
                raise
            print(f"{name} refuses a graph of {case}: {error!r}"[:200])
    return graphs


def lines(
    case: Case, direction: str, timing: str, times: dict[str, float], fewest: int
) -> Iterator[dict]:
    """A line per implementation, from microseconds per call."""
    for columns in measure.beside_copy(times, 2 * case.bytes, fewest):
        yield {
            "shape": "x".join(map(str, case.shape)),
            "dim": case.dim,
            "rows": case.rows,
            "columns": case.columns,
            "dtype": measure.dtype_name(case.dtype),
            "pass": direction,
            "timing": timing,
            **columns,
        }


def main(
    rounds: measure.Rounds = 15,
    out: measure.Out = RESULTS,
    only: Annotated[str, typer.Option(help='Cases whose "shape dtype" has it.')] = "",
    commit: measure.Commit = "",
    dim0: Annotated[bool, typer.Option(help="The middle of three dimensions, too.")] = False,
) -> None:
    """Runs the table."""
    common = measure.provenance(commit)
    cases = [case for case in table(dim0) if only in str(case)]
    with measure.results(out, common) as write, measure.own_stream():
        for case in track(cases, "rows"):
            for row in run_case(case, rounds):
                write(row)
                if row["implementation"] == OURS:
                    print(*row.values())
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
