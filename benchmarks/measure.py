"""What the benchmarks share: options, files of results, and functions that are timed in turn."""

import csv
import datetime
import gc
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

Rounds = Annotated[int, typer.Option(help="How often each call is timed.")]
Out = Annotated[Path, typer.Option(help="The CSV file to write.")]
Commit = Annotated[str, typer.Option(help="Of a copy without git.")]
Listed = Annotated[bool, typer.Option("--list", help="Print the names of the cases.")]

Function = Callable[[], object]
Timer = Callable[[Function], float]

HEAD_START = 1_000_000  # GPU cycles, about 0.5 ms: the host is done before the GPU begins


def commit() -> str:
    """The short name of the commit that is checked out; empty outside of git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    folder = Path(__file__).parent
    return subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout.strip()


def provenance(commit_of_copy: str = "", device: str | None = None) -> dict[str, str]:
    """What every row of results says of its device and its code.

    Args:
        commit_of_copy: in place of the commit that is checked out, for a copy without git.
        device: its name, for the column "device"; None: that of the GPU, for the column "gpu".
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        **({"gpu": gpu} if device is None else {"device": device}),
        "torch": torch.__version__,
        "commit": commit_of_copy or commit(),
        "date": datetime.date.today().isoformat(),
    }


@contextmanager
def results(
    out: Path, common: Mapping[str, object], fields: Iterable[str] = ()
) -> Iterator[Callable[[Mapping[str, object]], None]]:
    """What writes a row of a CSV file, at once: a run that is cut off leaves what it has measured.

    Args:
        out: the file; its folder is made if need be.
        common: what all rows have, in the first columns.
        fields: the other columns; by default those of the first row, and none without rows.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer: csv.DictWriter | None = None

        def begin(columns: Iterable[str]) -> csv.DictWriter:
            writer = csv.DictWriter(file, [*common, *columns], lineterminator="\n")
            writer.writeheader()
            return writer

        def write(row: Mapping[str, object]) -> None:
            nonlocal writer
            writer = writer or begin(fields or row)
            writer.writerow({**common, **row})
            file.flush()

        yield write
        if writer is None:
            begin(fields)


def beside_copy(times: dict[str, float], copied: int, fewest: int) -> Iterator[dict[str, object]]:
    """The columns of each implementation, from microseconds of a call; one of them is "copy".

    Args:
        times: by implementation.
        copied: bytes that the copy reads and writes.
        fewest: bytes that the others have to read and write.
    """
    for name, microseconds in times.items():
        moved = copied if name == "copy" else fewest
        share = moved / copied * times["copy"] / microseconds
        yield {
            "implementation": name,
            "microseconds": f"{microseconds:.2f}",
            "bytes": moved,
            "percent_of_copy": f"{100 * share:.1f}",
        }


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def release() -> None:
    """Gives the GPU back what nothing refers to; closures and graphs refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()


def host_name() -> str:
    """The CPU's name; where the system does not tell it, its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def interleaved(
    functions: dict[str, Function],
    rounds: int,
    timer: Timer,
    warm_up: int = 1,
    choose: Callable[[Iterable[float]], float] = statistics.median,
) -> dict[str, float]:
    """The median time of each function, in the unit of `timer`; they take turns.

    Args:
        functions: by name.
        rounds: how often each is timed.
        timer: times one call.
        warm_up: rounds before those, which do not count.
        choose: in place of the median.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(warm_up + rounds):
        for name, function in functions.items():
            times[name].append(timer(function))
    return {name: choose(samples[warm_up:]) for name, samples in times.items()}


def host_milliseconds(function: Function) -> float:
    """Times a call that runs on the CPU."""
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def host_timer(calls: int, device: str) -> Timer:
    """A timer of what the host does for one call, in microseconds, over some calls in a row.

    On a GPU they must be few and short enough that its queue has room for all of them.
    """

    def microseconds(function: Function) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return 1e6 * (time.perf_counter() - start) / calls

    return microseconds


def gpu_timer(head_start: int = HEAD_START) -> Timer:
    """A timer of calls that run on the current GPU, in microseconds, with a flushed L2 cache.

    Args:
        head_start: of the host, in GPU cycles.
    """
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")

    def microseconds(function: Function) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(head_start)
        start.record()
        function()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop)

    return microseconds


def own_stream() -> torch.cuda.StreamContext:
    """Graphs cannot capture the default stream, on which backward passes would run otherwise."""
    return torch.cuda.stream(torch.cuda.Stream())


def captured(function: Function, calls: int) -> Function:
    """`calls` calls as one CUDA graph: timing it leaves out what the host needs to launch them.

    Captured on the current stream, which may not be the default one, and on which `function` has
    run before; a backward pass is captured there if its forward ran there.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            function()
    return graph.replay
