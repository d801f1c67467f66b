"""What the benchmarks share: what they measure, and functions that are timed in turn."""

import datetime
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

Function = Callable[[], object]
Timer = Callable[[Function], float]

HEAD_START = 1_000_000  # GPU cycles, about 0.5 ms: the host is done before the GPU begins


def commit() -> str:
    """The short name of the commit that is checked out; empty outside of git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    folder = Path(__file__).parent
    return subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout.strip()


def provenance(commit_of_copy: str = "") -> dict[str, str]:
    """What every row of results says of its GPU and its code.

    Args:
        commit_of_copy: in place of the commit that is checked out, for a copy without git.
    """
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "commit": commit_of_copy or commit(),
        "date": datetime.date.today().isoformat(),
    }


def interleaved(
    functions: dict[str, Function], rounds: int, timer: Timer, warm_up: int = 1
) -> dict[str, float]:
    """The median time of each function, in the unit of `timer`; they take turns.

    Args:
        functions: by name.
        rounds: how often each is timed.
        timer: times one call.
        warm_up: rounds before those, which do not count.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(warm_up + rounds):
        for name, function in functions.items():
            times[name].append(timer(function))
    return {name: statistics.median(samples[warm_up:]) for name, samples in times.items()}


def host_milliseconds(function: Function) -> float:
    """Times a call that runs on the CPU."""
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


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
