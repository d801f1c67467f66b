"""The reference path beside the eager code it replaces, on a CPU; writes results/reference_cpu.csv.

Eager is what models run without fused kernels: scale, masked_fill, softmax in float32, cast, drop.
"""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import measure
import peers
import torch
import typer
from measured import OURS

import megasoftmax

SCALE = 0.125
THREADS = 2


@dataclass(frozen=True)
class Case(measure.Case):
    dtype: torch.dtype
    variant: str
    direction: str
    shape: tuple[int, ...] = (4, 8, 512, 512)

    def __str__(self) -> str:
        dtype = measure.dtype_name(self.dtype)
        return f"{list(self.shape)} {dtype} {self.variant} {self.direction}"


VARIANTS = ("masked", "causal", "causal, dropout")
DTYPES = (torch.float32, torch.bfloat16)
CASES = [Case(*each) for each in product(DTYPES, VARIANTS, ("forward", measure.BOTH))]


def rows_of(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    scores = torch.randn(case.shape).to(case.dtype).requires_grad_()
    excluded = torch.rand(case.shape[0], 1, *case.shape[-2:]) < 0.25
    options = {"mask": excluded}
    if case.variant != "masked":
        excluded = torch.ones(case.shape[-2:], dtype=torch.bool).triu(1)
        options = {"causal": True, "dropout": 0.1 if "dropout" in case.variant else 0.0}
    eager = peers.eager(SCALE, excluded, dropout=options.get("dropout", 0.0))
    ways = {
        "eager": lambda: peers.rows(eager, scores),
        OURS: lambda: peers.rows(megasoftmax.softmax, scores, scale=SCALE, **options),
    }
    found = run.rows(ways, (case.direction,), forward_mode=torch.no_grad)
    theirs, ours = (each["microseconds"] / 1e3 for each in found)
    ratio = {"ratio": f"{ours / theirs:.2f}"}
    yield {"eager_ms": f"{theirs:.2f}", "reference_ms": f"{ours:.2f}", **ratio}


@measure.benchmark("reference_cpu.csv", rounds=15, device="cpu", measures_host=True)
def main(run: measure.Run) -> None:
    """Masked, causal and dropped, forward alone and with backward, float32 and bfloat16."""
    torch.set_num_threads(THREADS)
    place = f"{platform.machine()}, {THREADS} threads"
    common = measure.provenance(run.commit, place)
    run.cases(CASES, partial(rows_of, run), common=common)


if __name__ == "__main__":
    typer.run(main)
