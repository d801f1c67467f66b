"""Random configurations of softmax, softmax_topk and attention against the oracles in tests/.

    python benchmarks/soak.py --seconds 120                         # writes results/soak.csv
    python benchmarks/soak.py --device cpu                          # writes results/soak_cpu.csv
    python benchmarks/soak.py --family attention --seed 123456      # that configuration alone

Forward and every gradient are checked in float64. A family and a seed fix a configuration and its
data, on the same kind of device; soak_cases.py says how each dimension is drawn. A failure does not
stop the run: it prints the command that reproduces it, and the exit status is 1. On a GPU every
configuration runs with `fused=True`; those that the kernels do not take are counted as redrawn. On
a CPU the reference runs.

In the CSV, `worst_ratio` is the ratio of an error to the allowed one, and `seconds`
is the time of all processes together.
"""

import itertools
import multiprocessing
import os
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random, SystemRandom
from typing import Annotated, Any

import measure
import torch
import typer
from soak_arguments import Arguments
from soak_cases import FAMILIES as ORACLES
from soak_cases import USUAL, Data, NotFusedError

import megasoftmax

FAMILIES = ORACLES | {"arguments": Arguments}
RESULTS = {"cuda": "soak.csv", "cpu": "soak_cpu.csv"}
FIELDS = [
    *("family", "configurations", "redrawn", "failures"),
    *("worst_ratio", "worst_result", "seed", "seconds"),
]
SHARES = {"softmax": 0.38, "softmax_topk": 0.14, "attention": 0.43, "arguments": 0.05}  # of time
PROGRESS = 10.0  # seconds between lines
PATIENCE = 300.0  # seconds for one configuration; a process that takes longer is ended
SEEDS = 10_000_000  # of each process


@dataclass(frozen=True)
class Outcome:
    """What became of a configuration."""

    family: str
    seed: int
    words: str  # the configuration
    ratio: float = 0.0  # of the worst error to the allowed one
    result: str = ""  # which has it
    message: str = ""
    why_not_fused: str = ""  # not run
    seconds: float = 0.0

    @property
    def has_failed(self) -> bool:
        return not self.ratio <= 1  # NaN too


@dataclass
class Tally:
    """The outcomes of a family."""

    configurations: int = 0
    redrawn: int = 0
    failures: int = 0
    seconds: float = 0.0
    worst: Outcome | None = None

    def add(self, outcome: Outcome) -> None:
        self.seconds += outcome.seconds
        if outcome.why_not_fused:
            self.redrawn += 1
            return
        self.configurations += 1
        self.failures += outcome.has_failed
        if self.worst is None or not outcome.ratio <= self.worst.ratio:
            self.worst = outcome

    def row(self) -> measure.Row:
        """Its columns in the file."""
        counts = {name: getattr(self, name) for name in ("configurations", "redrawn", "failures")}
        found = counts | {"seconds": f"{self.seconds:.1f}"}
        if self.worst is None:
            return found
        worst = {"worst_ratio": f"{self.worst.ratio:.3f}", "worst_result": self.worst.result}
        return found | worst | {"seed": self.worst.seed}

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.row().items())


def attempt(family: str, seed: int, device: str) -> Outcome:
    """Draws, runs and checks one configuration; whatever it raises is a failure."""
    case = FAMILIES[family].draw(Random(f"{family} {seed}"), USUAL[device])
    start, words = time.perf_counter(), str(case)

    def outcome(**found: object) -> Outcome:
        seconds = time.perf_counter() - start
        return Outcome(family, seed, words, seconds=seconds, **found)  # type: ignore[arg-type]

    try:
        deviations = case.compare(Data(seed, device), True if device == "cuda" else None)
    except NotFusedError as error:
        return outcome(why_not_fused=str(error))
    except Exception as error:
        kind = type(error).__name__
        return outcome(ratio=torch.inf, result="call", message=f"{kind}: {error}")
    name = max(deviations, key=lambda name: deviations[name].ratio)
    worst = deviations[name]
    return outcome(ratio=worst.ratio, result=name, message=worst.message)


def command(outcome: Outcome, device: str) -> str:
    """Reproduces an outcome."""
    on_cpu = "" if device == "cuda" else f" --device {device}"
    return f"python benchmarks/soak.py --family {outcome.family} --seed {outcome.seed}{on_cpu}"


def in_words(outcome: Outcome) -> str:
    """The error and the configuration, on one line."""
    if outcome.why_not_fused:
        return f"cannot run fused: {outcome.why_not_fused}; {outcome.words}"
    error = f"{outcome.result}: ratio {outcome.ratio:.3f}, {outcome.message}"
    return " ".join(f"{error}; {outcome.words}".split())


# Runs


def turns(
    families: Iterable[str], device: str, seconds: float, seeds: Iterable[int]
) -> Iterator[tuple[str, int] | Outcome]:
    """(family, seed), then its outcome, and so on. The family furthest behind its share is next."""
    spent = dict.fromkeys(families, 0.0)
    deadline = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() >= deadline:
            return
        family = min(spent, key=lambda name: spent[name] / SHARES[name])
        yield family, seed
        outcome = attempt(family, seed, device)
        spent[family] += outcome.seconds
        yield outcome


def work(connection: Connection, threads: int, first: int, *given: Any) -> None:
    """What a process of its own does; it ends when a fault has made its GPU unusable."""
    torch.set_num_threads(threads)
    _, device, _ = given
    for message in turns(*given, itertools.count(first)):
        connection.send(message)
        if isinstance(message, Outcome) and message.has_failed and device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return


def in_this_process(
    families: list[str], device: str, seconds: float, first: int
) -> Iterator[Outcome]:
    for message in turns(families, device, seconds, itertools.count(first)):
        if isinstance(message, Outcome):
            yield message


@dataclass
class Worker:
    process: BaseProcess
    connection: Connection
    running: tuple[str, int] | None = None  # family and seed
    since: float = field(default_factory=time.monotonic)


def in_processes(
    count: int, families: list[str], device: str, seconds: float, first: int
) -> Iterator[Outcome]:
    """The outcomes of several processes. One that ends too early is a failure, and is replaced."""
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + seconds
    firsts = itertools.count(first, SEEDS)
    threads = max(1, (os.cpu_count() or 1) // count)

    def start(left: float) -> Worker:
        receiver, sender = context.Pipe(duplex=False)
        given = (sender, threads, next(firsts), families, device, left)
        process = context.Process(target=work, args=given, daemon=True)
        process.start()
        sender.close()
        return Worker(process, receiver)

    workers = [start(seconds) for _ in range(count)]
    while workers:
        ready = wait([worker.connection for worker in workers], timeout=1)
        for worker in list(workers):
            if worker.connection in ready:
                worker.since = time.monotonic()
                try:
                    message = worker.connection.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    worker.process.join()
                    if worker.running is not None:
                        yield lost(worker, device)
                    left = deadline - time.monotonic()
                    if left > PROGRESS:
                        workers.append(start(left))
                    continue
                worker.running = None if isinstance(message, Outcome) else message
                if isinstance(message, Outcome):
                    yield message
            elif time.monotonic() - worker.since > PATIENCE:
                worker.process.kill()


def lost(worker: Worker, device: str) -> Outcome:
    """The outcome of a configuration that ended its process."""
    assert worker.running is not None
    family, seed = worker.running
    words = str(FAMILIES[family].draw(Random(f"{family} {seed}"), USUAL[device]))
    message = f"the process ended with exit code {worker.process.exitcode}"
    return Outcome(family, seed, words, torch.inf, "call", message)


def soak(outcomes: Iterable[Outcome], families: list[str], device: str) -> dict[str, Tally]:
    """Counts outcomes, and prints failures as they come and now and then how far it is."""
    tallies = {family: Tally() for family in families}
    next_progress = time.monotonic() + PROGRESS
    for outcome in outcomes:
        tallies[outcome.family].add(outcome)
        if outcome.has_failed:
            print(f"{command(outcome, device)}  # {in_words(outcome)}", flush=True)
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
    outcome = attempt(family, seed, device)
    print(f"{command(outcome, device)}  # {in_words(outcome)}")
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
    if device == "cuda":  # kernels that are not yet compiled: once, and not in the time
        megasoftmax.softmax(torch.zeros(1, device="cuda"), fused=True)
    first = SystemRandom().randrange(100) * 100 * SEEDS if first is None else first
    processes = processes or min(8, os.cpu_count() or 1)
    if processes == 1:
        outcomes = in_this_process(families, device, seconds, first)
    else:
        outcomes = in_processes(processes, families, device, seconds, first)
    tallies = soak(outcomes, families, device)
    write(tallies, out or Path(__file__).parent / "results" / RESULTS[device], device, commit)
    if any(tally.failures for tally in tallies.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
