"""The run of `megasoftmax check`, and its report."""

import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import SystemRandom

import torch

import megasoftmax
from megasoftmax import host
from megasoftmax.build import library
from megasoftmax.check.cases import SUITE
from megasoftmax.check.suite import SEEDS, Outcome, Tally, warm_up

MOST_FAILURES = 20  # in a report


@dataclass
class CheckReport:
    """What a run found; `str` is a text for a bug report."""

    device: str
    tallies: dict[str, Tally]
    failures: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Every result is right, and there are results of each family."""
        return not self.failures and all(tally.configurations for tally in self.tallies.values())

    @property
    def verdict(self) -> str:
        count = sum(tally.configurations for tally in self.tallies.values())
        ran = "kernels" if self.device == "cuda" else "CPU paths; no kernel ran"
        if self.failures:
            return f"WRONG: {len(self.failures)} of {count} calls differ from the reference ({ran})"
        empty = [family for family, tally in self.tallies.items() if not tally.configurations]
        if empty:
            return f"NO RESULT: no call of {', '.join(empty)} ran in {self.seconds:.0f} s ({ran})"
        return f"right: {count} calls agree with the reference ({ran})"

    def __str__(self) -> str:
        lines = [self.verdict, "", *(f"{name}: {value}" for name, value in _machine()), ""]
        lines += [f"{family}: {tally}" for family, tally in self.tallies.items()]
        for outcome in self.failures[:MOST_FAILURES]:
            lines += ["", self.command(outcome), outcome.in_words()]
        more = len(self.failures) - MOST_FAILURES
        lines += ["", f"... and {more:,} more failures"] if more > 0 else []
        return "\n".join(lines) + "\n"

    def command(self, outcome: Outcome) -> str:
        """Runs the configuration of an outcome again."""
        named = f"--family {outcome.family} --seed {outcome.seed} --device {self.device}"
        return f"megasoftmax check {named}"


def check(
    seconds: float = 60,
    *,
    families: Iterable[str] = (),
    device: str | None = None,
    seed: int | None = None,
    processes: int | None = None,
    progress: Callable[[CheckReport], None] = lambda report: None,
) -> CheckReport:
    """Compares random calls, forward and every gradient, with the reference in float32.

    Args:
        seconds: how long it runs.
        families: "softmax", "softmax_topk", "attention". Default: all.
        device: "cuda", where each call runs on the kernels, or "cpu". Default: cuda if there is
            one.
        seed: one configuration alone, as a report names it.
        processes: on a GPU, 4 by default, so that a call that ends a process is a failure of its
            own; 0 for none but this one, the default on a CPU.
        progress: called after each call.

    Raises:
        ValueError: seconds are below 0, or a family or device has no such name.
        RuntimeError: the device is "cuda", and no kernels can be loaded.
    """
    if not seconds >= 0:
        raise ValueError(f"seconds: expected a number from 0 on, got {seconds}")
    names = list(families) or list(SUITE.families)
    for name in names:
        if name not in SUITE.families:
            expected = ", ".join(SUITE.families)
            raise ValueError(f"family: expected one of {expected}, got {name!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in SUITE.usual:
        raise ValueError(f"device: expected cuda or cpu, got {device!r}")
    if device == "cuda":
        status = library.load()
        if not status.available:
            raise RuntimeError(f"no kernels to check: {status.reason}")
        warm_up(device)
    processes = (4 if device == "cuda" else 0) if processes is None else processes
    report = CheckReport(device, {name: Tally() for name in names})
    start = time.monotonic()
    for outcome in _outcomes(names, device, seconds, seed, processes):
        report.tallies[outcome.family].add(outcome)
        if outcome.has_failed:
            report.failures.append(outcome)
        report.seconds = time.monotonic() - start
        progress(report)
    return report


def _outcomes(
    names: list[str], device: str, seconds: float, seed: int | None, processes: int
) -> Iterator[Outcome]:
    if seed is not None:
        return (SUITE.attempt(name, seed, device) for name in names)
    first = SystemRandom().randrange(100) * 100 * SEEDS
    if processes == 0:
        return SUITE.in_this_process(names, device, seconds, first)
    return SUITE.in_processes(processes, names, device, seconds, first)


def _machine() -> list[tuple[str, str]]:
    status = library.status()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    described = [f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}" for gpu in gpus]
    return [
        ("megasoftmax", megasoftmax.__version__),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("GPUs", "; ".join(described) or "none"),
        ("kernels", str(status.path) if status.path else f"none: {status.reason}"),
        ("calls in C++", host.status()),
    ]
