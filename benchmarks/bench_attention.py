"""attention beside its peers, on one GPU; writes results/attention.csv.

A case is a shape, a mask and what is added to the scores: nothing, a bias, a table of relative
positions, a sink. Forward is that of training, with what backward needs; forward+backward is one
call and the gradients of query, key, value and, where the case has it, bias. Both count
4 * batch * heads * queries * keys * head_dim operations, halved when causal, in a window those that
are visible, forward+backward 3.5 times as many. Decoding steps run in inference mode and count the
bytes of keys and values once, against the bandwidth of a read.

A row is of one `kind`: "time"; "memory", the most that a call holds beyond its inputs; "error", of
the forward against float64 for some queries of one head; "ceiling", what the card reaches at a
matrix product and at a read. What an implementation refuses is a row too, and `note` says why.
Kernels of FlexAttention, and of FlashAttention-4 where it is installed, are compiled in processes
beside each other before anything is timed. Outside of what is timed are FlexAttention's block masks
and the mask of a window. "deterministic, unfilled" is under torch.use_deterministic_algorithms,
where torch fills no new tensors. SDPA has no causal mask beside a bias: each call fills the bias
with -inf.
"""

import ctypes
import functools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

import measure
import peers
import torch
import typer
from attention_cases import Case, Inputs, cases, visible
from measured import DENSE, DETERMINISTIC_UNFILLED, OURS
from rich.progress import track
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import megasoftmax
from megasoftmax.build import library

FIELDS = [
    *("kind", *Case.written, "pass", "implementation", "microseconds", "tflops", "bytes"),
    *("percent_of_read", "peak_mib", "error_max", "error_rms", "note"),
]
READ = 4.37  # TB/s that a kernel which only reads reaches on an H200
WRONG = 0.02  # relative error, ten times what rounding to bfloat16 costs
WORKERS = min(8, (os.cpu_count() or 1) // 2)


@contextmanager
def gpu_like(capability: str) -> Iterator[None]:
    """Kernels are chosen as on a GPU of common/limits.h."""
    act_as = ctypes.CDLL(str(library.load().path)).megasoftmax_act_as
    if not act_as(*map(int, capability.split("."))):
        raise ValueError(f"common/limits.h has no GPU of compute capability {capability}")
    try:
        yield
    finally:
        act_as(0, 0)


def has_flash_attention(case: Case) -> bool:
    """Whether the package is there and has the case: 16 bits, and no gradient of a bias."""
    is_taken = not (case.gradient or case.sink or case.decode or case.softcap)
    is_taken = is_taken and case.dtype.itemsize == 2
    return is_taken and peers.is_there(peers.FLASH)


def implementations(inputs: Inputs, like: Sequence[str] = ()) -> dict[str, measure.Build]:
    """By name; building, as well as calling, may fail: that is a refusal.

    Args:
        like: compute capabilities whose kernels megasoftmax takes besides, such as "8.6".
    """
    case, bias, table, excluded = inputs.case, inputs.bias, inputs.table, inputs.excluded
    either = bias if table is None else table
    is_grouped = case.groups != case.heads

    def way(attend: peers.Attend, read: Tensor | None = bias, **rest) -> measure.Way:
        tensors = (inputs.query, inputs.key, inputs.value)
        return measure.Way(lambda: attend(*tensors), inputs.leaves(read), **rest)

    def ours(table: Tensor | None = table, during: measure.Context | None = None) -> measure.Way:
        window = None if case.window is None else (case.window, 0)

        options = {"causal": case.causal, "window": window, "softcap": case.softcap}

        def attend(*tensors: Tensor) -> Tensor:
            added = bias if table is None else megasoftmax.RelativeBias(table)
            return peers.ours(bias=added, sink=inputs.sink, **options)(*tensors)

        return way(attend, bias if table is None else table, during=during)

    def sdpa(name: str) -> measure.Way:
        seen = None if case.window is None or excluded is None else ~excluded

        def mask() -> Tensor | None:
            if bias is None:
                return seen
            return bias if excluded is None else bias.masked_fill(excluded, -torch.inf)

        is_causal = case.causal and bias is None and seen is None
        options = {"is_causal": is_causal, "enable_gqa": is_grouped}
        return way(peers.sdpa(peers.BACKENDS[name], mask, **options))

    def flash() -> measure.Way:
        is_table = table is not None
        return way(
            peers.flash_attention(case.causal, case.window, either, is_table, case.queries - 1)
        )

    def flex_attention() -> measure.Way:
        sizes, last, block_mask = (case.queries, case.keys), case.queries - 1, None
        is_of_batch = case.bias == "b,h"

        def add(score, b, h, i, j):
            if case.softcap is not None:
                return torch.tanh(score / case.softcap) * case.softcap
            if table is not None:
                return score + table[h, j - i + last]
            return score + bias[b if is_of_batch else 0, h, i, j]

        if case.causal:
            device, seen = inputs.query.device, visible(case.window)
            block_mask = create_block_mask(seen, None, None, *sizes, device=device)
        options = {"block_mask": block_mask, "enable_gqa": is_grouped}
        options["score_mod"] = add if case.bias else None
        if inputs.sink is not None:
            return way(peers.flex_with_sink(inputs.sink, **options), either)
        return way(peers.flex(**options), either)

    found: dict[str, measure.Build] = {OURS: ours}
    if not case.decode:
        in_order = functools.partial(measure.deterministic, fill=False)
        found[DETERMINISTIC_UNFILLED] = functools.partial(ours, during=in_order)
    for capability in like:
        as_on = functools.partial(gpu_like, capability)
        found[f"{OURS} as on {capability}"] = functools.partial(ours, during=as_on)
    if case.bias == "table":
        found[DENSE] = functools.partial(ours, None)
    if not case.sink and case.softcap is None:  # SDPA has neither
        found |= {name: functools.partial(sdpa, name) for name in peers.BACKENDS}
    if has_flash_attention(case):
        found[peers.FLASH] = flash
    if case.flex:
        found[peers.FLEX] = flex_attention
    return found


def peak_mib(function: measure.Function) -> float:
    """The most memory that a call holds beyond what was there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def prepare(inputs: Inputs) -> dict[str, Any]:
    """Gradients lie as the output lies in memory, so that no implementation copies them."""

    def gradient(output: Tensor) -> Tensor:
        return torch.empty_like(output).copy_(inputs.d_output)

    mode = torch.inference_mode if inputs.case.decode else nullcontext
    return {"passes": inputs.case.passes, "gradient": gradient, "forward_mode": mode}


def run_case(run: measure.Run, case: Case, like: list[str]) -> Iterator[measure.Row]:
    """The rows of one case, without what all rows share."""
    with run.on_device():
        inputs = Inputs(case)
    expected, options, found = inputs.expected(), prepare(inputs), []

    def look(name: str, output: Tensor, calls: measure.Calls) -> None:
        if not case.gradient:
            error = inputs.checked(output) - expected
            relative = (error.square().mean() / expected.square().mean()).sqrt()
            figures = {"error_max": f"{error.abs().max():.3e}", "error_rms": f"{relative:.3e}"}
            found.append(row("error", "forward", name, **figures))
        for direction, call in calls.items() if run.device == "cuda" else ():
            with options["forward_mode"]():
                found.append(row("memory", direction, name, peak_mib=f"{peak_mib(call):.1f}"))

    def figures(direction: str, name: str, times: measure.Times) -> measure.Row:
        microseconds = times[name]
        tflops = case.flops[direction] / microseconds / 1e6
        found = {"microseconds": f"{microseconds:.2f}", "tflops": f"{tflops:.1f}"}
        if not case.decode:
            return found
        percent = case.key_bytes / microseconds / READ / 1e4
        return found | {"bytes": case.key_bytes, "percent_of_read": f"{percent:.1f}"}

    start, ways = measure.LONG_START, implementations(inputs, like)
    timed = run.rows(ways, figures=figures, head_start=start, look=look, noted=True, **options)
    for each in timed:
        yield {"kind": "time"} | each
    yield from found


def row(kind: str, direction: str, implementation: str, **figures: str) -> measure.Row:
    return {"kind": kind, "pass": direction, "implementation": implementation, **figures}


def ceilings(run: measure.Run) -> Iterator[measure.Row]:
    """What the card reaches: torch's product of 8192 x 8192 matrices, and its sum of 8 GiB."""
    size, count = (64, 2**10) if run.is_small else (8192, 2 * 2**30)
    with run.on_device():
        matrix, values = torch.randn(size, size, dtype=torch.bfloat16), torch.zeros(count)

    def figures(direction: str, name: str, times: measure.Times) -> measure.Row:
        found = {"microseconds": f"{times[name]:.2f}"}
        if name == "read":
            return found | {"bytes": values.nbytes}
        return found | {"tflops": f"{2 * size**3 / times[name] / 1e6:.1f}"}

    ways = measure.ways_of({"matrix product": lambda: matrix @ matrix, "read": values.sum})
    for each in run.rows(ways, ("forward",), figures, head_start=measure.LONG_START):
        yield {"kind": "ceiling"} | each


def compile_case(case: Case) -> None:
    """Leaves kernels of peers in the caches of their compilers; runs in a process of its own."""
    with torch.device("cuda"):
        inputs = Inputs(case)
    for name, build in implementations(inputs).items():
        if name in (peers.FLEX, peers.FLASH):
            measure.prepare(build, **prepare(inputs))
    del inputs
    measure.release()


def compile_ahead(chosen: list[Case]) -> None:
    """Compiles in processes; what fails there is compiled, or fails, in its turn."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        futures = [pool.submit(compile_case, case) for case in chosen]
        for future in track(as_completed(futures), "compiling", total=len(futures)):
            if error := future.exception():
                print(f"not compiled ahead: {error!r}"[:200])
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]


@measure.benchmark("attention.csv", rounds=9)
def main(
    run: measure.Run,
    like: Annotated[
        list[str] | None,
        typer.Option(
            help="megasoftmax with the kernels of another GPU too, by its compute capability; "
            "repeatable: 8.6 has tiles for 99 KB of shared memory, 10.0 the large tiles, without "
            "Hopper's."
        ),
    ] = None,
) -> None:
    """Times attention."""
    failures = []

    def rows_of(case: Case) -> Iterator[measure.Row]:
        try:
            for line in run_case(run, case, like or []):
                yield line
                if line["implementation"].startswith(OURS) and "note" in line:
                    failures.append(f"{case}: {line['note']}")
                if line["kind"] == "error" and not float(line["error_rms"]) < WRONG:
                    failures.append(f"{case}: {line['implementation']} is wrong")
        except Exception as error:  # of the inputs or the timing: the other cases go on
            line = row("time", "forward", "all", note=measure.reason(error, []))
            failures.append(f"{case}: {line['note']}")
            yield line

    def before(chosen: list[Case]) -> Iterator[measure.Row]:
        compiled = [
            case
            for case in chosen
            if (case.flex and run.wants(peers.FLEX))
            or (has_flash_attention(case) and run.wants(peers.FLASH))
        ]
        if WORKERS > 1 and len(compiled) > 1 and run.device == "cuda":
            compile_ahead(compiled)
        yield from ceilings(run)

    run.cases(cases(), rows_of, FIELDS, before=before)
    print(*(f"failed: {failure}" for failure in failures), sep="\n")


if __name__ == "__main__":
    typer.run(main)
