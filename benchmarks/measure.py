"""The runner of the benchmarks: their options, calls that are timed in turn, and files of results.

A benchmark is a table of cases, of the ways to compute each, and of what a row of its file says.
Every one has the options of `Run`. On a CPU, or in a quick run, all cases have small sizes: what is
measured there says nothing, and no file is written unless it is named.
"""

import csv
import datetime
import functools
import gc
import inspect
import platform
import re
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from measured import OURS, RESULTS, read
from rich.progress import track
from torch import Tensor

Commit = Annotated[str, typer.Option(help="Of a copy without git.")]
Function = Callable[[], object]
Timer = Callable[[Function], float]
Row = dict[str, object]
Calls = dict[str, Function]  # by pass, or by implementation
Times = dict[str, float]  # microseconds of each implementation
Figures = Callable[[str, str, Times], Row]
Context = Callable[[], AbstractContextManager]
Result = TypeVar("Result")

BOTH = "forward+backward"
HEAD_START = 1_000_000  # GPU cycles, about 0.5 ms: the host is done before the GPU begins
LONG_START = 4 * HEAD_START  # autograd and compiled code need the host for longer
SMALL = 32 * 2**20  # bytes of a tensor, below which CUDA graphs are timed too
CALLS = 20  # in a graph


def provenance(commit_of_copy: str = "", device: str | None = None) -> dict[str, str]:
    """What every row of results says of its device and its code.

    Args:
        commit_of_copy: in place of the commit that is checked out, for a copy without git.
        device: its name, for the column "device"; None: that of the GPU, for the column "gpu".
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        **({"gpu": gpu} if device is None else {"device": device}),
        "torch": torch.__version__,
        "commit": commit_of_copy or found.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }


@contextmanager
def deterministic(fill: bool) -> Iterator[None]:
    """Calls run under torch.use_deterministic_algorithms.

    Args:
        fill: whether torch fills each new tensor, which is its default there.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@contextmanager
def results(
    out: Path | None, common: Mapping[str, object], fields: Iterable[str] = (), resume: bool = False
) -> Iterator[Callable[[Mapping[str, object]], None]]:
    """What writes a row of a CSV file, at once: a run that is cut off leaves what it has measured.

    Args:
        out: the file; its folder is made if need be. None: rows go nowhere.
        common: what all rows have, in the first columns.
        fields: the other columns; by default those of the first row.
        resume: rows of the file stay.
    """
    if out is None:
        yield lambda row: None
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a" if resume else "w", newline="") as file:
        writer: csv.DictWriter | None = None

        def write(row: Mapping[str, object]) -> None:
            nonlocal writer
            if writer is None:
                writer = csv.DictWriter(file, [*common, *(fields or row)], lineterminator="\n")
                if not file.tell():
                    writer.writeheader()
            writer.writerow({**common, **row})
            file.flush()

        yield write


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


def host_timer(calls: int, device: str, clock: Callable[[], float] = time.perf_counter) -> Timer:
    """A timer of what the host does for one call, in microseconds, over some calls in a row.

    On a GPU they must be few and short enough that its queue has room for all of them.
    """

    def microseconds(function: Function) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        for _ in range(calls):
            function()
        return 1e6 * (clock() - start) / calls

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


def own_stream() -> AbstractContextManager:
    """Graphs cannot capture the default stream, on which backward passes would run otherwise."""
    has_streams = torch.cuda.is_available()
    return torch.cuda.stream(torch.cuda.Stream()) if has_streams else nullcontext()


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


# The largest sizes of small cases, by the name of the field; 48 for others.
MOST = {"batch": 2, "heads": 4, "key_heads": 2, "head_dim": 16, "k": 8, "window": 8, "rows": 8}
MOST["size"] = 8


@dataclass(frozen=True)
class Case:
    """What a benchmark times: a dataclass, of which `written` names columns of the file."""

    written = ("case",)

    def tiny(self) -> "Case":
        """With sizes that a CPU computes in no time; what is odd stays odd."""

        def small(name: str, size: int) -> int:
            most = MOST.get(name, 48)
            return size if size <= most else most - size % 2

        changes: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is int:
                changes[each.name] = small(each.name, value)
            elif isinstance(value, tuple) and {type(one) for one in value} == {int}:
                names = ["heads"] * (len(value) - 2) + ["", ""]
                changes[each.name] = tuple(map(small, names, value))
        return replace(self, **changes)

    @property
    def case(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """The name, of cases that have one."""
        return self.name

    def described(self) -> Row:
        """The columns of the case."""

        def shown(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return dtype_name(value)
            return int(value) if isinstance(value, bool) else value

        return {name: shown(getattr(self, name)) for name in self.written}


@dataclass(frozen=True)
class Run:
    """The options of a run, which every benchmark has."""

    file: str
    rounds: Annotated[int, typer.Option(help="How often each call is timed.")]
    device: Annotated[str, typer.Option(help="cpu or cuda.")]
    out: Annotated[Path | None, typer.Option(help="The CSV file; by default in results/.")] = None
    only: Annotated[str, typer.Option(help="A regular expression of cases.")] = ""
    implementations: Annotated[str, typer.Option(help="A regular expression of their names.")] = ""
    quick: Annotated[bool, typer.Option(help="Small sizes, one round.")] = False
    resume: Annotated[bool, typer.Option(help="Leave out cases that the file has.")] = False
    commit: Commit = ""
    listed: Annotated[bool, typer.Option("--list", help="Print the names of the cases.")] = False
    measures_host: bool = field(default=False, kw_only=True)  # whether a CPU is what it is for

    @property
    def is_small(self) -> bool:
        return self.quick or (self.device == "cpu" and not self.measures_host)

    @property
    def path(self) -> Path | None:
        """The file to write, which may have rows already."""
        if self.out is not None:
            return self.out.absolute()
        return None if self.is_small else RESULTS / self.file

    @property
    def turns(self) -> int:
        """How often each call is timed."""
        return 1 if self.is_small else self.rounds

    def timer(self, head_start: int = HEAD_START) -> Timer:
        """In microseconds."""
        return gpu_timer(head_start) if self.device == "cuda" else host_timer(1, self.device)

    def wants(self, implementation: str) -> bool:
        """Whether `--implementations` matches its name: others do not run."""
        return re.search(self.implementations, implementation) is not None

    def on_device(self) -> AbstractContextManager:
        """Makes tensors there."""
        return torch.device(self.device)

    @contextmanager
    def writer(
        self, common: Mapping[str, object] | None = None, fields: Iterable[str] = ()
    ) -> Iterator[Callable[[Mapping[str, object]], None]]:
        """Writes rows of the file, and prints them without what they have in common."""
        common = provenance(self.commit) if common is None else common
        with results(self.path, common, fields, self.resume) as write:

            def write_and_print(row: Mapping[str, object]) -> None:
                write(row)
                print(*(value for value in row.values() if value != ""), sep="  ", flush=True)

            yield write_and_print

    def cases(
        self,
        cases: Iterable[Case],
        rows_of: Callable[[Any], Iterable[Row]],
        fields: Iterable[str] = (),
        common: Mapping[str, object] | None = None,
        before: Callable[[list[Any]], Iterable[Row]] = lambda chosen: (),
        stream: Context = nullcontext,
    ) -> None:
        """Writes the rows of all cases that were chosen.

        Args:
            fields: columns beside those in common; by default those of the first row.
            common: in place of `provenance`.
            before: has the first rows, which are of no case.
            stream: on which all runs, such as `own_stream`.
        """
        chosen = [case for case in cases if re.search(self.only, str(case))]
        if self.listed:
            print(*chosen, sep="\n")
            return
        chosen = [case.tiny() for case in chosen] if self.is_small else chosen
        done = read(self.path) if self.resume and self.path else []
        with self.writer(common, fields) as write, stream():
            for row in before(chosen) if not done else ():
                write(row)
            for case in track(chosen, self.file.removesuffix(".csv")):
                described = case.described()
                words = {name: str(value) for name, value in described.items()}
                if any(words.items() <= row.items() for row in done):
                    continue
                torch.manual_seed(0)
                for row in rows_of(case):
                    write(described | row)
                release()

    def rows(
        self,
        ways: "Mapping[str, Build]",
        passes: Sequence[str],
        figures: Figures | None = None,
        *,
        beside: Calls | None = None,
        gradient: Callable[[Tensor], Tensor] = torch.randn_like,
        forward_mode: Context = nullcontext,
        head_start: int = HEAD_START,
        graph_calls: int | None = None,
        look: Callable[[str, Tensor, Calls], None] = lambda name, output, calls: None,
        noted: bool = False,
    ) -> Iterator[Row]:
        """A row of each pass of each implementation.

        Args:
            ways: what builds each implementation; building and calling may fail, as a refusal.
            figures: columns, of (pass, implementation, {implementation: microseconds}); by default
                the microseconds.
            beside: calls that are timed in turn with those of each pass.
            gradient: the incoming gradient of an output.
            forward_mode: of the forward pass alone, such as torch.no_grad.
            graph_calls: as many calls in a CUDA graph are timed besides, if it is not 0. None: rows
                have no column "timing".
            look: is given each output, and the calls by pass.
            noted: what refuses a pass is a row with a note. Else it is printed, and an error if it
                is ours.
        """
        ready: dict[str, Calls] = {}
        for name, build in ways.items():
            if not self.wants(name):
                continue
            ready[name], output, refusal = prepare(build, passes, gradient, forward_mode)
            if output is not None:
                look(name, output, ready[name])
            if refusal and not noted:
                if name == OURS:
                    raise RuntimeError(refusal)
                print(f"{name} refuses: {refusal}"[:200])
            for direction in passes if refusal and noted else ():
                if direction not in ready[name]:
                    yield {"pass": direction, "implementation": name, "note": refusal}
            del output
        timer = self.timer(head_start)
        for direction in passes:
            of_pass = {n: calls[direction] for n, calls in ready.items() if direction in calls}
            calls = (beside or {}) | of_pass
            with forward_mode() if direction == "forward" else nullcontext():
                found = {"call": interleaved(calls, self.turns, timer, warm_up=2)}
                if graph_calls:
                    graphs = self.captured(calls, graph_calls)
                    totals = interleaved(graphs, self.turns, timer)
                    found["graph"] = {n: total / graph_calls for n, total in totals.items()}
            for timing, times in found.items():
                place = {"pass": direction} | ({} if graph_calls is None else {"timing": timing})
                for name, microseconds in times.items():
                    rounded = {"microseconds": round(microseconds, 1)}
                    columns = figures(direction, name, times) if figures else rounded
                    yield {**place, "implementation": name, **columns}

    def beside_copy(
        self,
        ways: "Mapping[str, Build]",
        source: Tensor,
        fewest: Mapping[str, int],
        graphs: bool = False,
        **options: Any,
    ) -> Iterator[Row]:
        """Rows of passes with their shares of the bandwidth that a copy of a tensor reaches.

        Args:
            fewest: bytes that each pass has to read and write.
            graphs: rows have a column "timing". It says "call", and of a small tensor also "graph".
            options: of `rows`.
        """
        if graphs:
            options["graph_calls"] = CALLS if source.nbytes < SMALL else 0
        copied, target, plain = 2 * source.nbytes, torch.empty_like(source), source.detach()

        def figures(direction: str, name: str, times: Times) -> Row:
            moved = copied if name == "copy" else fewest[direction]
            share = moved / copied * times["copy"] / times[name]
            percent = {"bytes": moved, "percent_of_copy": f"{100 * share:.1f}"}
            return {"microseconds": f"{times[name]:.2f}", **percent}

        copy = {"copy": lambda: target.copy_(plain)}
        options |= {"beside": copy, "forward_mode": torch.no_grad}
        return self.rows(ways, tuple(fewest), figures, **options)

    def captured(self, functions: Calls, calls: int) -> Calls:
        """Their graphs, of those that can be captured; on a CPU the functions."""
        if self.device == "cpu":
            return functions
        graphs: Calls = {}
        for name, function in functions.items():
            try:
                graphs[name] = captured(function, calls)
            except Exception as error:
                if name in (OURS, "copy"):
                    raise
                print(f"{name} refuses a graph: {error!r}"[:200])
        return graphs


@dataclass(frozen=True)
class Way:
    """How an implementation computes a case.

    leaves: tensors that get a gradient.
    during: the context of each call.
    passes: those that it has; None: all.
    """

    call: Callable[[], Any]
    leaves: Sequence[Tensor] = ()
    during: Context | None = None
    passes: Sequence[str] | None = None


Build = Callable[[], Way]


def ways_of(functions: Calls, leaves: Sequence[Tensor] = ()) -> dict[str, Build]:
    """Those of calls, all of which have the same leaves."""
    return {name: functools.partial(Way, call, leaves) for name, call in functions.items()}


def within(context: Context | None, function: Callable[[], Result]) -> Callable[[], Result]:
    """The function in a context."""
    if context is None:
        return function

    def call() -> Result:
        with context():
            return function()

    return call


def prepare(
    build: Build,
    passes: Sequence[str],
    gradient: Callable[[Tensor], Tensor] = torch.randn_like,
    forward_mode: Context = nullcontext,
) -> tuple[Calls, Tensor | None, str]:
    """The passes of an implementation, each of which has run; an output; why some are missing."""
    way, refusal = attempt(build)
    if way is None:
        return {}, None, refusal
    forward = within(way.during, way.call)
    output, refusal = attempt(within(forward_mode, forward))
    if output is None:
        return {}, None, refusal
    calls: Calls = {"forward": forward}
    wanted = [name for name in passes if way.passes is None or name in way.passes]
    incoming = gradient(output) if {"backward", BOTH} & set(wanted) else None
    if BOTH in wanted:

        def both() -> object:
            return torch.autograd.grad(way.call(), way.leaves, incoming)

        calls[BOTH] = within(way.during, both)
        _, refusal = attempt(calls[BOTH])
    if "backward" in wanted and not refusal:
        kept, refusal = attempt(forward)

        def backward() -> object:
            return torch.autograd.grad(kept, way.leaves, incoming, retain_graph=True)

        calls["backward"] = within(way.during, backward)
        refusal = refusal or attempt(calls["backward"])[1]
    if refusal:
        calls = {"forward": forward}
    return {name: calls[name] for name in wanted if name in calls}, output.detach(), refusal


def reason(error: Exception, caught: list[warnings.WarningMessage]) -> str:
    """Why a call failed, in one line: SDPA says it in warnings, others in the error."""
    texts = [str(warning.message) for warning in caught]
    said = [text.split("(Triggered")[0].strip() for text in texts if "sdp_utils" in text]
    said = [text for text in said if "disabled" not in text and not text.endswith("because:")]
    text = " ".join([*dict.fromkeys(said), f"{type(error).__name__}: {error}"])
    return " ".join(text.split())[:300]


def attempt(function: Callable[[], Result]) -> tuple[Result | None, str]:
    """What it returns, or None and why it does not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            return None, reason(error, caught)
        return result, ""


def benchmark(
    file: str, rounds: int = 0, device: str = "cuda", chooses: bool = True, **given: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command of a benchmark: the options of its own, then those of `Run`, by name.

    Args:
        file: of benchmarks/results.
        rounds, device, given: defaults of the options.
        chooses: whether it has `--implementations`.
    """
    defaults = {"rounds": rounds, "device": device, **given}
    shared = {
        name: each.replace(kind=each.KEYWORD_ONLY, default=defaults.get(name, each.default))
        for name, each in inspect.signature(Run).parameters.items()
        if name not in ("file", "measures_host") and (chooses or name != "implementations")
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        own = [each.replace(kind=each.KEYWORD_ONLY) for each in own]

        @functools.wraps(function)
        def command(**options: Any) -> None:
            of_own = {each.name: options.pop(each.name) for each in own if each.name in options}
            run = Run(file, **(defaults | options))
            with torch.compiler.set_stance("force_eager" if run.is_small else "default"):
                function(run, **of_own)

        command.__signature__ = inspect.Signature([*own, *shared.values()])  # type: ignore[attr-defined]
        return command

    return decorate


def command(
    file: str,
    cases: Iterable[Case],
    rows_of: Callable[[Run, Any], Iterable[Row]],
    fields: Iterable[str] = (),
    *,
    stream: Context = nullcontext,
    **defaults: Any,
) -> Callable[..., None]:
    """The command of a benchmark without options of its own: the arguments are those of `cases`."""

    @benchmark(file, **defaults)
    def main(run: Run) -> None:
        """Times the cases, and writes the file."""
        run.cases(cases, functools.partial(rows_of, run), fields, stream=stream)

    return main
