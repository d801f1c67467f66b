"""Random configurations of softmax, softmax_topk, sample and attention beside tests/oracle*.py.

    python benchmarks/soak.py --seconds 120                         # writes results/soak.csv
    python benchmarks/soak.py --device cpu                          # writes results/soak_cpu.csv
    python benchmarks/soak.py --family attention --seed 123456      # that configuration alone

Forward and every gradient are checked in float64. A family and a seed fix a configuration and its
data, on the same kind of device. megasoftmax/check/cases.py and soak_cases.py say how each
dimension is drawn. A failure does not stop the run: it prints the command that reproduces it, and
the exit status is 1. On a GPU every configuration runs with `fused=True`; those that the kernels do
not take are counted as redrawn. On a CPU the reference runs.

In the CSV, `worst_ratio` is the ratio of an error to the allowed one, and `seconds`
is the time of all processes together.
"""

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from random import SystemRandom
from typing import Annotated

import measure
import typer
from soak_arguments import Arguments
from soak_cases import FAMILIES as ORACLES

from megasoftmax.check.cases import USUAL
from megasoftmax.check.suite import SEEDS, Outcome, Suite, Tally, warm_up

FAMILIES = ORACLES | {"arguments": Arguments}
RESULTS = {"cuda": "soak.csv", "cpu": "soak_cpu.csv"}
FIELDS = [
    *("family", "configurations", "redrawn", "failures"),
    *("worst_ratio", "worst_result", "seed", "seconds"),
]
SHARES = {"softmax": 0.38, "softmax_topk": 0.14, "attention": 0.43, "arguments": 0.05}  # of time
SUITE = Suite(FAMILIES, SHARES, USUAL)
PROGRESS = 10.0  # seconds between lines


def command(outcome: Outcome, device: str) -> str:
    """Reproduces an outcome."""
    on_cpu = "" if device == "cuda" else f" --device {device}"
    return f"python benchmarks/soak.py --family {outcome.family} --seed {outcome.seed}{on_cpu}"


def soak(outcomes: Iterable[Outcome], families: list[str], device: str) -> dict[str, Tally]:
    """Counts outcomes, and prints failures as they come and now and then how far it is."""
    tallies = {family: Tally() for family in families}
    next_progress = time.monotonic() + PROGRESS
    for outcome in outcomes:
        tallies[outcome.family].add(outcome)
        if outcome.has_failed:
            print(f"{command(outcome, device)}  # {outcome.in_words()}", flush=True)
        if time.monotonic() >= next_progress:
            next_progress = time.monotonic() + PROGRESS
            for family, tally in tallies.items():
                print(f"{family}: {tally}", flush=True)
    return tallies


def write(tallies: dict[str, Tally], out: Path, device: str, commit: str) -> None:
    common = measure.provenance(commit)
    if device == "cpu":
        common["gpu"] = f"none, {platform.machine()}"
    with measure.results(out, common, FIELDS) as write_row:
        for family, tally in tallies.items():
            write_row({"family": family, **tally.row()})
            print(f"{family}: {tally}")


def reproduce(family: str, seed: int, device: str) -> bool:
    """Runs one configuration and prints it; whether it is right, or cannot run fused."""
    outcome = SUITE.attempt(family, seed, device)
    print(f"{command(outcome, device)}  # {outcome.in_words()}")
    return not outcome.has_failed


def main(
    seconds: float = 120,
    family: Annotated[list[str] | None, typer.Option(help="default: all")] = None,
    device: str = "cuda",
    seed: Annotated[int | None, typer.Option(help="run this configuration alone")] = None,
    first: Annotated[int | None, typer.Option(help="first seed; default: at random")] = None,
    processes: Annotated[int, typer.Option(help="default: 8, or the cores")] = 0,
    out: Annotated[Path | None, typer.Option(help="default: in results/")] = None,
    commit: measure.Commit = "",
) -> None:
    """Runs for `seconds`, or one `seed`; exit status 1 where a result is wrong."""
    families = family or list(FAMILIES)
    for name in families:
        if name not in FAMILIES:
            raise typer.BadParameter(f"--family: expected one of {', '.join(FAMILIES)}, got {name}")
    if device not in USUAL:
        raise typer.BadParameter(f"--device: expected cuda or cpu, got {device}")
    if seed is not None:
        are_right = [reproduce(name, seed, device) for name in families]
        if not all(are_right):
            raise SystemExit(1)
        return
    warm_up(device)
    first = SystemRandom().randrange(100) * 100 * SEEDS if first is None else first
    processes = processes or min(8, os.cpu_count() or 1)
    if processes == 1:
        outcomes = SUITE.in_this_process(families, device, seconds, first)
    else:
        outcomes = SUITE.in_processes(processes, families, device, seconds, first)
    tallies = soak(outcomes, families, device)
    write(tallies, out or Path(__file__).parent / "results" / RESULTS[device], device, commit)
    if any(tally.failures for tally in tallies.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
