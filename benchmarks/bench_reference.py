"""The reference path beside the eager code it replaces, on a CPU; writes results/reference_cpu.csv.

Eager is what models run without fused kernels: scale, masked_fill, softmax in float32, cast.
"""

import csv
import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import typer
from torch import Tensor

import megasoftmax

RESULTS = Path(__file__).parent / "results" / "reference_cpu.csv"
SCALE = 0.125


def eager(scores: Tensor, mask: Tensor) -> Tensor:
    logits = (scores * SCALE).masked_fill(mask, torch.finfo(scores.dtype).min)
    return logits.softmax(-1, dtype=torch.float32).to(scores.dtype)


def interleaved(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median milliseconds of each function; they take turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 2):
        for function, samples in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            samples.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(samples[2:]) for samples in times]


def main(rounds: int = 15, threads: int = 2, out: Path = RESULTS) -> None:
    """Masked and causal, forward alone and with backward, float32 and bfloat16."""
    torch.set_num_threads(threads)
    shape = (4, 8, 512, 512)
    causal = torch.ones(shape[-2:], dtype=torch.bool).triu(1)
    masks = {"masked": torch.rand(shape[0], 1, *shape[-2:]) < 0.25, "causal": causal}
    folder = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=folder
    ).stdout.strip()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for variant, mask in masks.items():
            scores = torch.randn(shape).to(dtype).requires_grad_()
            gradient = torch.randn(shape).to(dtype)
            arguments = {"causal": True} if variant == "causal" else {"mask": mask}

            def ours(scores=scores, arguments=arguments) -> Tensor:
                return megasoftmax.softmax(scores, scale=SCALE, **arguments)

            def theirs(scores=scores, mask=mask) -> Tensor:
                return eager(scores, mask)

            for direction in ("forward", "forward+backward"):
                with torch.set_grad_enabled(direction != "forward"):
                    if direction == "forward":
                        functions = [theirs, ours]
                    else:
                        functions = [
                            lambda f=f, s=scores, g=gradient: torch.autograd.grad(f(), s, g)
                            for f in (theirs, ours)
                        ]
                    eager_ms, ours_ms = interleaved(functions, rounds)
                name = f"{list(shape)} {str(dtype).removeprefix('torch.')} {variant} {direction}"
                rows.append(
                    (name, f"{eager_ms:.2f}", f"{ours_ms:.2f}", f"{ours_ms / eager_ms:.2f}")
                )
                print(*rows[-1])
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.machine()}, {threads} threads"
    today = datetime.date.today().isoformat()
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["device", "torch", "commit", "date", "case", "eager_ms", "reference_ms", "ratio"]
        )
        for row in rows:
            writer.writerow((machine, torch.__version__, commit, today, *row))


if __name__ == "__main__":
    typer.run(main)
