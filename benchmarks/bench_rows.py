"""Plain softmax of rows of all lengths beside its peers, on one GPU; writes results/rows.csv.

A case is a tensor [rows, columns] and a pass. Its fewest bytes are those of one read of the scores,
or of gradient and probabilities, and one write; the copy is one of a tensor of the same size, in
the same rounds. The implementations take turns, as in bench_softmax.py.

`timing` says how: "call" is a call from Python with the L2 cache flushed before it. Scores below
32 MiB have a further line, "graph": a CUDA graph of 20 calls, of which each counts for a twentieth.
What the host needs for a launch is not in it, and the tensors may stay in the L2 cache from one
call to the next, those of the copy too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import measure
import peers
import torch
import typer
from measured import OURS
from torch import Tensor

import megasoftmax

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
PASSES = ("forward", "backward")
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
LONG_ROWS = (32000, 65536, 131072, 262144, 1048576, 8388608, 33554432)
SHAPES = [
    # A sweep over columns, of one size.
    *((LARGE // 2 ** (power + 1), 2**power - odd) for power in range(8, 19) for odd in (0, 1)),
    *((8192, 50257), (2048, 128256), (2048, 151936), (2048, 201088)),  # vocabularies
    *((rows, columns) for rows in (1, 4, 64) for columns in LONG_ROWS),
    *((2**20, columns) for columns in (8, 33, 64, 100, 128)),
]
# The middle of three dimensions.
COLUMNS = [(64, 1024, 1024), (64, 1024, 1023), (16, 512, 4096), (8, 4096, 1024)]


@dataclass(frozen=True)
class Case(measure.Case):
    """Scores of a shape and type, normalised over `dim`.

    compiled: beside torch.compile.
    quack: its passes. It compiles for each length, which takes seconds: its backward is timed in
        PEERS_TABLE alone.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = -1
    compiled: bool = False
    quack: tuple[str, ...] = ()

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: torch.dtype, dim: int = -1) -> "Case":
        key = (*shape, dtype)
        has_quack = dim == -1 and shape[-1] <= QUACK_COLUMNS
        quack = PASSES if key in PEERS_TABLE else PASSES[:1]
        return cls(shape, dtype, dim, key in COMPILED, quack if has_quack else ())

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def described(self) -> measure.Row:
        columns = self.shape[self.dim]
        rows, dtype = math.prod(self.shape) // columns, measure.dtype_name(self.dtype)
        found = {"shape": "x".join(map(str, self.shape)), "dim": self.dim, "rows": rows}
        return {**found, "columns": columns, "dtype": dtype}

    def __str__(self) -> str:
        name = f"{'x'.join(map(str, self.shape))} {measure.dtype_name(self.dtype)}"
        return name if self.dim == -1 else f"{name} dim {self.dim}"


def cases() -> list[Case]:
    """Each once."""
    found = [Case.make((rows, columns), dtype) for rows, columns, dtype in PEERS_TABLE]
    found += [Case.make(shape, HALF) for shape in SHAPES]
    found.append(Case.make((1, 32000), FLOAT))
    found += [Case.make(shape, dtype, 1) for shape in COLUMNS for dtype in (BFLOAT, FLOAT)]
    return [case for case in dict.fromkeys(found) if case.bytes <= MOST]


def implementations(case: Case, scores: Tensor) -> dict[str, measure.Build]:
    """All that are to be timed."""
    options = {"dim": case.dim, "fused": scores.is_cuda or None}
    ways: dict[str, measure.Build] = {
        OURS: lambda: peers.rows(megasoftmax.softmax, scores, **options),
        "torch.softmax": lambda: peers.rows(torch.softmax, scores, case.dim),
    }
    if case.dim == -1:
        ways["liger"] = lambda: peers.rows(peers.liger(), scores)
    if case.quack:
        ways["quack"] = lambda: peers.rows(peers.quack(), scores, passes=case.quack)
    if case.compiled:
        ways["torch.compile"] = lambda: peers.rows(
            peers.compiled(lambda scores: scores.softmax(-1)), scores, passes=PASSES[:1]
        )
    return peers.only_there(ways)


def rows_of(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    with run.on_device():
        scores = torch.randn(case.shape, dtype=case.dtype).requires_grad_()
    gradient = torch.randn_like(scores)
    return run.beside_copy(
        implementations(case, scores),
        scores,
        {"forward": 2 * case.bytes, "backward": 3 * case.bytes},
        graphs=True,
        gradient=lambda output: gradient,
    )


main = measure.command("rows.csv", cases(), rows_of, rounds=15, stream=measure.own_stream)

if __name__ == "__main__":
    typer.run(main)
