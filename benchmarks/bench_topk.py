"""softmax_topk beside its peers, on one GPU; writes results/topk.csv.

A case is logits [rows, columns], a k and what they hold. Forward, the fewest bytes are those of one
read of the logits and one write of probabilities, int64 indices and three statistics per row;
backward, of one read of the logits and one write of their gradient. The copy, of a tensor of the
size of the logits, is timed in the same rounds.

`timing` says how: "call" is a call from Python with the L2 cache flushed before it. Cases below
32 MiB have a further line, "graph": a CUDA graph of 20 calls, of which each counts for a twentieth.
What the host needs for a launch is not in it, and the logits may stay in the L2 cache.
"""

import functools
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

RESULTS = Path(__file__).parent / "results" / "topk.csv"
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
SMALL = 32 * 2**20  # bytes of the logits
CALLS = 20  # in a graph
STATISTICS = 3 * 4  # bytes of a row
VOCABULARIES = range(10_000, 1_000_000)  # columns, for which FlashInfer is made


@dataclass(frozen=True)
class Case:
    rows: int
    columns: int
    dtype: torch.dtype
    k: int
    data: str = "normal"
    compiled: bool = False  # beside torch.compile, which costs seconds
    backward: bool = False

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def fewest(self) -> dict[str, int]:
        """By pass."""
        result = self.rows * (self.k * (self.dtype.itemsize + 8) + STATISTICS)
        return {"forward": self.bytes + result, "backward": 2 * self.bytes}

    def logits(self) -> Tensor:
        logits = torch.empty(self.rows, self.columns, device="cuda", dtype=self.dtype)
        if self.data == "normal":
            return logits.normal_()
        if self.data == "constant":
            return logits.fill_(1)
        rising = torch.linspace(-4, 4, self.columns, device="cuda").to(self.dtype)
        return logits.copy_(rising if self.data == "sorted" else rising.flip(0))

    def __str__(self) -> str:
        dtype = measure.dtype_name(self.dtype)
        return f"{self.rows}x{self.columns} {dtype} k={self.k} {self.data}"


CASES = [
    Case(8192, 50257, FLOAT, 10, compiled=True, backward=True),
    Case(8192, 50257, BFLOAT, 10, compiled=True, backward=True),
    Case(8192, 50257, BFLOAT, 64),
    Case(8192, 50257, BFLOAT, 256),
    Case(8192, 128256, BFLOAT, 10, compiled=True),
    Case(8192, 128256, BFLOAT, 64),
    Case(2048, 151936, BFLOAT, 20),
    Case(64, 128256, BFLOAT, 32, compiled=True),
    Case(16, 128256, BFLOAT, 50),
    Case(1, 151936, FLOAT, 10, compiled=True),
    Case(1, 201088, BFLOAT, 50),
    Case(1, 8388608, HALF, 10),
    Case(4, 33554432, HALF, 10),
    Case(65536, 4096, BFLOAT, 8, backward=True),
    Case(262144, 1024, BFLOAT, 8),
    Case(262144, 256, BFLOAT, 8, compiled=True),
    Case(262144, 256, FLOAT, 8),
    Case(2**20, 128, BFLOAT, 8),
    Case(2**20, 64, BFLOAT, 6, compiled=True, backward=True),
    Case(2**20, 64, FLOAT, 6),
    Case(2**20, 8, BFLOAT, 2, compiled=True),
    Case(4096, 64, BFLOAT, 6),
    *(
        Case(rows, columns, BFLOAT, k, data)
        for rows, columns, k in [(8192, 50257, 10), (8192, 128256, 64), (64, 128256, 32)]
        for data in ("sorted", "reversed", "constant")
    ),
]


def softmax_then_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What most libraries write."""
    return logits.softmax(-1).topk(k)


def topk_and_logsumexp(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same without a softmax as long as the logits."""
    best, indices = logits.topk(k)
    return (best - logits.logsumexp(-1, keepdim=True)).exp(), indices


@functools.cache
def flashinfer() -> Callable[[Tensor, int], tuple[Tensor, Tensor]] | None:
    """FlashInfer's softmax, in float32, then its top-k; None where the package is not installed.

    Its results are not sorted, unlike those of the others. Its kernels are compiled when they are
    first called, which needs nvcc.
    """
    try:
        from flashinfer import top_k
        from flashinfer.sampling import softmax
    except ImportError as error:
        print(f"without FlashInfer: {error}")
        return None
    return lambda logits, k: top_k(softmax(logits), k, sorted=False)


def forward_calls(case: Case, logits: Tensor) -> dict[str, measure.Function]:
    calls: dict[str, measure.Function] = {
        OURS: lambda: megasoftmax.softmax_topk(logits, case.k, fused=True)
    }
    if case.data == "normal":
        calls["softmax, topk"] = lambda: softmax_then_topk(logits, case.k)
        calls["topk, logsumexp"] = lambda: topk_and_logsumexp(logits, case.k)
        if case.columns in VOCABULARIES and (peer := flashinfer()) is not None:
            calls["FlashInfer"] = lambda: peer(logits, case.k)
    if case.compiled:
        torch._dynamo.reset()
        compiled = torch.compile(softmax_then_topk, dynamic=False)
        calls["torch.compile"] = lambda: compiled(logits, case.k)
    return calls


def backward_calls(case: Case, logits: Tensor) -> dict[str, measure.Function]:
    leaf = logits.detach().requires_grad_()
    calls = {}
    for name, function in {
        OURS: lambda: megasoftmax.softmax_topk(leaf, case.k, fused=True)[0],
        "softmax, topk": lambda: softmax_then_topk(leaf, case.k)[0],
    }.items():
        output = function()
        gradient = torch.randn_like(output)
        calls[name] = lambda output=output, gradient=gradient: torch.autograd.grad(
            output, leaf, gradient, retain_graph=True
        )
    return calls


def run_case(case: Case, rounds: int) -> Iterator[dict]:
    """The lines of one case."""
    logits = case.logits()
    target = torch.empty_like(logits)
    timer = measure.gpu_timer()
    passes = {"forward": forward_calls(case, logits)}
    if case.backward:
        passes["backward"] = backward_calls(case, logits)
    for direction, functions in passes.items():
        functions = {"copy": lambda: target.copy_(logits)} | functions
        for function in functions.values():
            function()
        times = {"call": measure.interleaved(functions, rounds, timer)}
        if case.bytes < SMALL:
            graphs = {name: measure.captured(call, CALLS) for name, call in functions.items()}
            totals = measure.interleaved(graphs, rounds, timer)
            times["graph"] = {name: total / CALLS for name, total in totals.items()}
        for timing, found in times.items():
            for columns in measure.beside_copy(found, 2 * case.bytes, case.fewest[direction]):
                yield {
                    "rows": case.rows,
                    "columns": case.columns,
                    "dtype": measure.dtype_name(case.dtype),
                    "k": case.k,
                    "data": case.data,
                    "pass": direction,
                    "timing": timing,
                    **columns,
                }


def main(
    rounds: measure.Rounds = 9,
    out: measure.Out = RESULTS,
    only: Annotated[str, typer.Option(help="Cases whose name has it.")] = "",
    commit: measure.Commit = "",
) -> None:
    """Runs the cases."""
    common = measure.provenance(commit)
    with measure.results(out, common) as write, measure.own_stream():
        for case in track([case for case in CASES if only in str(case)], "topk"):
            for row in run_case(case, rounds):
                write(row)
                if row["implementation"] == OURS:
                    print(*row.values())
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
