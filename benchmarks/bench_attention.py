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
beside each other before anything is timed.
"""

import multiprocessing
import os
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, TypeVar

import attention_peers as peers
import measure
import torch
import typer
from attention_cases import DEVICE, Case, Inputs, cases
from measured import OURS
from rich.progress import track
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "attention.csv"
CASE_FIELDS = [
    *("case", "batch", "heads", "key_heads", "queries", "keys", "head_dim", "dtype"),
    *("masking", "bias", "gradient", "sink", "decode"),
]
FIGURES = [
    *("microseconds", "tflops", "bytes", "percent_of_read"),
    *("peak_mib", "error_max", "error_rms"),
]
FIELDS = [
    *("kind", *CASE_FIELDS),
    *("pass", "implementation", *FIGURES, "note"),
]
READ = 4.37  # TB/s that a kernel which only reads reaches on an H200
HEAD_START = 4_000_000  # GPU cycles, about 2 ms: autograd and compiled code need the host for long
QUICK_ROUNDS = 3
WRONG = 0.02  # relative error, ten times what rounding to bfloat16 costs
WORKERS = min(8, (os.cpu_count() or 1) // 2)

Calls = dict[str, measure.Function]  # by pass
Result = TypeVar("Result")


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
            torch.cuda.synchronize()
        except Exception as error:
            return None, reason(error, caught)
        return result, ""


def passes(case: Case) -> tuple[str, ...]:
    """A gradient of the bias leaves the forward as it is."""
    if case.decode:
        return ("forward",)
    return ("forward+backward",) if case.gradient else ("forward", "forward+backward")


def prepare(inputs: Inputs, build: peers.Build) -> tuple[Calls, Tensor | None, str]:
    """The passes of an implementation, each of which has run; an output; why some are missing."""
    case = inputs.case
    implementation, refusal = attempt(lambda: build(inputs))
    if implementation is None:
        return {}, None, refusal

    def forward() -> Tensor:
        with implementation.during():
            return implementation.forward()

    output, refusal = attempt(forward)
    if output is None:
        return {}, None, refusal
    calls: Calls = {"forward": forward}
    if not case.decode:
        # As the output lies in memory, so that no implementation copies it.
        gradient = torch.empty_like(output).copy_(inputs.d_output)

        def backward() -> object:
            with implementation.during():
                output = implementation.forward()
                return torch.autograd.grad(output, implementation.leaves, gradient)

        found, refusal = attempt(backward)
        if found is not None:
            calls["forward+backward"] = backward
    return {name: calls[name] for name in passes(case) if name in calls}, output.detach(), refusal


def peak_mib(function: measure.Function) -> float:
    """The most memory that a call holds beyond what was there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def described(case: Case) -> dict:
    """The fields of a case."""
    return {
        "case": str(case),
        **{name: getattr(case, name) for name in ("batch", "heads", "queries", "keys", "head_dim")},
        "key_heads": case.groups,
        "dtype": measure.dtype_name(case.dtype),
        "masking": case.masking,
        "bias": case.bias or "",
        **{name: int(getattr(case, name)) for name in ("gradient", "sink", "decode")},
    }


def run_case(
    case: Case, rounds: int, timer: measure.Timer, flex: bool, like: list[str], read: float
) -> Iterator[dict]:
    """The rows of one case, without what all rows share."""
    inputs = Inputs(case)
    expected = inputs.expected()
    ready: dict[str, Calls] = {}
    for name, build in peers.builders(inputs, flex, like).items():
        with torch.inference_mode(case.decode):
            ready[name], output, refusal = prepare(inputs, build)
        for direction in passes(case):
            if direction not in ready[name]:
                yield row("time", direction, name, note=refusal)
        if output is not None and not case.gradient:
            error = inputs.checked(output) - expected
            relative = (error.square().mean() / expected.square().mean()).sqrt()
            figures = {"error_max": f"{error.abs().max():.3e}", "error_rms": f"{relative:.3e}"}
            yield row("error", "forward", name, **figures)
    for direction in passes(case):
        calls = {name: found[direction] for name, found in ready.items() if direction in found}
        with torch.inference_mode(case.decode):
            memory = {name: peak_mib(call) for name, call in calls.items()}
            times = measure.interleaved(calls, rounds, timer)
        for name, microseconds in times.items():
            tflops = case.flops[direction] / microseconds / 1e6
            figures = {"microseconds": f"{microseconds:.2f}", "tflops": f"{tflops:.1f}"}
            if case.decode:
                percent = case.key_bytes / microseconds / read / 1e4
                figures |= {"bytes": str(case.key_bytes), "percent_of_read": f"{percent:.1f}"}
            yield row("time", direction, name, **figures)
            yield row("memory", direction, name, peak_mib=f"{memory[name]:.1f}")


def row(kind: str, direction: str, implementation: str, **figures: str) -> dict[str, str]:
    return {"kind": kind, "pass": direction, "implementation": implementation, **figures}


def ceilings(rounds: int, timer: measure.Timer) -> Iterator[dict]:
    """What the card reaches: torch's product of 8192 x 8192 matrices, and its sum of 8 GiB."""
    size = 8192
    matrix = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    values = torch.zeros(2 * 2**30, device=DEVICE)
    calls = {"matrix product": lambda: matrix @ matrix, "read": values.sum}
    times = measure.interleaved(calls, rounds, timer)
    for name, microseconds in times.items():
        figures = {"microseconds": f"{microseconds:.2f}"}
        if name == "matrix product":
            figures["tflops"] = f"{2 * size**3 / microseconds / 1e6:.1f}"
        else:
            figures["bytes"] = str(values.nbytes)
        yield row("ceiling", "forward", name, **figures)


def compile_case(case: Case) -> None:
    """Leaves kernels of peers in the caches of their compilers; runs in a process of its own."""
    inputs = Inputs(case)
    for name, build in peers.builders(inputs, flex=True).items():
        if name in (peers.FLEX, peers.FLASH):
            with torch.inference_mode(case.decode):
                prepare(inputs, build)
    del inputs
    measure.release()


def compile_ahead(chosen: list[Case], workers: int) -> None:
    """Compiles in `workers` processes; what fails there is compiled, or fails, in its turn."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(compile_case, case) for case in chosen]
        for future in track(as_completed(futures), "compiling", total=len(futures)):
            if error := future.exception():
                print(f"not compiled ahead: {error!r}"[:200])
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]


def main(
    rounds: measure.Rounds = 9,
    out: measure.Out = RESULTS,
    only: Annotated[str, typer.Option(help="A regular expression of cases.")] = "",
    quick: Annotated[bool, typer.Option(help="Few cases and rounds.")] = False,
    flex: Annotated[bool, typer.Option(help="FlexAttention too.")] = True,
    like: Annotated[
        list[str] | None,
        typer.Option(
            help="megasoftmax with the kernels of another GPU too, by its compute capability; "
            "repeatable: 8.6 has tiles for 99 KB of shared memory, 10.0 the large tiles, without "
            "Hopper's."
        ),
    ] = None,
    read: Annotated[float, typer.Option(help="The bandwidth of a read, in TB/s.")] = READ,
    workers: Annotated[
        int, typer.Option(help="Compile for FlexAttention and FlashAttention-4.")
    ] = WORKERS,
    commit: measure.Commit = "",
    listed: measure.Listed = False,
) -> None:
    """Runs the cases."""
    chosen = [case for case in cases() if re.search(only, str(case)) and (case.quick or not quick)]
    rounds = min(rounds, QUICK_ROUNDS) if quick else rounds
    if listed:
        print(*chosen, sep="\n")
        return
    compiled = [case for case in chosen if case.flex or peers.has_flash_attention(case)]
    if flex and workers > 1 and len(compiled) > 1:
        compile_ahead(compiled, workers)
    timer = measure.gpu_timer(HEAD_START)
    failures = []
    with measure.results(out, measure.provenance(commit), FIELDS) as write:
        for line in ceilings(rounds, timer):
            write(line)
        for case in track(chosen, "attention"):
            try:
                measure.release()
                for line in run_case(case, rounds, timer, flex, like or [], read):
                    write(described(case) | line)
                    is_ours = line["implementation"].startswith(OURS)
                    if is_ours and line["kind"] in ("time", "error"):
                        print(case, *line.values())
                        failures += [f"{case}: {line['note']}"] if "note" in line else []
                    if line["kind"] == "error" and not float(line["error_rms"]) < WRONG:
                        failures.append(f"{case}: {line['implementation']} is wrong")
            except Exception as error:  # of the inputs or the timing: the other cases go on
                line = row("time", "forward", "all", note=reason(error, []))
                write(described(case) | line)
                failures.append(f"{case}: {line['note']}")
    print(*(f"failed: {failure}" for failure in failures), sep="\n")


if __name__ == "__main__":
    typer.run(main)
