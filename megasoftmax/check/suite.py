"""Runs random configurations of several families for a while, and counts what became of them."""

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from random import Random
from typing import Any, NamedTuple

import torch

import megasoftmax
from megasoftmax.check.draws import Data, NotFusedError

PATIENCE = 300.0  # seconds for one configuration; a process that takes longer is ended
SHORTEST = 10.0  # seconds: what is left for a process that replaces a lost one
SEEDS = 10_000_000  # of each process


class Deviation(NamedTuple):
    """How far a result is from what is expected, in units of what is allowed."""

    ratio: float
    message: str = ""


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

    def in_words(self) -> str:
        """The error and the configuration, on one line."""
        if self.why_not_fused:
            return f"cannot run fused: {self.why_not_fused}; {self.words}"
        error = f"{self.result}: ratio {self.ratio:.3f}, {self.message}"
        return " ".join(f"{error}; {self.words}".split())


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

    def row(self) -> dict[str, Any]:
        """Its columns in a file."""
        counts = {name: getattr(self, name) for name in ("configurations", "redrawn", "failures")}
        found = counts | {"seconds": f"{self.seconds:.1f}"}
        if self.worst is None:
            return found
        worst = {"worst_ratio": f"{self.worst.ratio:.3f}", "worst_result": self.worst.result}
        return found | worst | {"seed": self.worst.seed}

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.row().items())


@dataclass(frozen=True)
class Suite:
    """Families of configurations.

    A family is a class with `draw(random, usual)`. What it draws has `compare(data, fused)`, which
    returns a `Deviation` for each result.
    """

    families: dict[str, Any]
    shares: dict[str, float]  # of the time
    usual: dict[str, int]  # scores of a configuration, by the kind of device; few have more

    def draw(self, family: str, seed: int, device: str) -> Any:
        return self.families[family].draw(Random(f"{family} {seed}"), self.usual[device])

    def attempt(self, family: str, seed: int, device: str) -> Outcome:
        """Draws, runs and checks one configuration; whatever it raises is a failure."""
        case = self.draw(family, seed, device)
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

    def turns(
        self, families: Iterable[str], device: str, seconds: float, seeds: Iterable[int]
    ) -> Iterator[tuple[str, int] | Outcome]:
        """(family, seed), then its outcome, and so on. The family furthest behind is next."""
        spent = dict.fromkeys(families, 0.0)
        deadline = time.monotonic() + seconds
        for seed in seeds:
            if time.monotonic() >= deadline:
                return
            family = min(spent, key=lambda name: spent[name] / self.shares[name])
            yield family, seed
            outcome = self.attempt(family, seed, device)
            spent[family] += outcome.seconds
            yield outcome

    def in_this_process(
        self, families: list[str], device: str, seconds: float, first: int
    ) -> Iterator[Outcome]:
        """The outcomes of `seconds` from the seed `first` on."""
        for message in self.turns(families, device, seconds, itertools.count(first)):
            if isinstance(message, Outcome):
                yield message

    def in_processes(
        self, count: int, families: list[str], device: str, seconds: float, first: int
    ) -> Iterator[Outcome]:
        """The outcomes of several processes. One that ends too early is a failure and replaced."""
        context = multiprocessing.get_context("spawn")
        deadline = time.monotonic() + seconds
        firsts = itertools.count(first, SEEDS)
        threads = max(1, (os.cpu_count() or 1) // count)

        def start(left: float) -> _Worker:
            receiver, sender = context.Pipe(duplex=False)
            given = (self, sender, threads, next(firsts), families, device, left)
            process = context.Process(target=_work, args=given, daemon=True)
            process.start()
            sender.close()
            return _Worker(process, receiver)

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
                            yield self._lost(worker, device)
                        left = deadline - time.monotonic()
                        if left > SHORTEST:
                            workers.append(start(left))
                        continue
                    worker.running = None if isinstance(message, Outcome) else message
                    if isinstance(message, Outcome):
                        yield message
                elif time.monotonic() - worker.since > PATIENCE:
                    worker.process.kill()

    def _lost(self, worker: "_Worker", device: str) -> Outcome:
        """The outcome of a configuration that ended its process."""
        assert worker.running is not None
        family, seed = worker.running
        words = str(self.draw(family, seed, device))
        message = f"the process ended with exit code {worker.process.exitcode}"
        return Outcome(family, seed, words, torch.inf, "call", message)


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    running: tuple[str, int] | None = None  # family and seed
    since: float = field(default_factory=time.monotonic)


def warm_up(device: str) -> None:
    """Loads the kernels and the part of the host, and compiles it: none of that is in the time."""
    if device == "cuda":
        megasoftmax.softmax(torch.zeros(1, 1, device=device, dtype=torch.float32), fused=True)


def _work(
    suite: Suite,
    connection: Connection,
    threads: int,
    first: int,
    families: list[str],
    device: str,
    seconds: float,
) -> None:
    """What a process of its own does; it ends when a fault has made its GPU unusable."""
    torch.set_num_threads(threads)
    warm_up(device)
    for message in suite.turns(families, device, seconds, itertools.count(first)):
        connection.send(message)
        if isinstance(message, Outcome) and message.has_failed and device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return
