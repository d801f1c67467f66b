"""``python -m megasoftmax`` tells what runs here.

Its command ``build`` compiles the CUDA part, ``explain`` tells how the kernels serve a call, and
``regress`` whether a model trains with them as it did without. ``check`` compares the kernels with
the reference. ``tune`` measures on this GPU from how many rows on each kernel is chosen.
``export-kernels`` writes a folder for Hugging Face's ``kernels``.
"""

import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

import megasoftmax
from megasoftmax._export_kernels import export_kernels
from megasoftmax._extras import missing_extra
from megasoftmax.build import extension, library
from megasoftmax.explain import (
    DTYPES,
    GPU_NAMES,
    Window,
    current_gpu,
    explain,
    explain_attention,
    explain_topk,
    gpu_named,
)
from megasoftmax.limits import kernel_limits

try:
    import typer
    from rich.console import Console

    from megasoftmax._progress import Steps
    from megasoftmax._tables import (
        attention_table,
        call_table,
        regimes_table,
        skipped_table,
        topk_table,
        verdict,
        versions,
    )
except ModuleNotFoundError as error:
    raise SystemExit(f"megasoftmax: {missing_extra(error) or error}") from error

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(emoji=False)  # package.module:factory is no emoji

Function = Literal["softmax", "softmax_topk", "attention"]


@contextmanager
def _exit_on(*errors: type[Exception], code: int = 1) -> Iterator[None]:
    """Prints an error of these types, and ends the command with this exit code."""
    try:
        yield
    except errors as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(code) from error


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"megasoftmax {megasoftmax.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def info(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Without a command: the tables of the kernels too.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Without a command: whether calls run fused on this machine, versions and GPUs."""
    if context.invoked_subcommand is None:
        console.print(verdict(), soft_wrap=True, highlight=False)
        console.print(versions())
        if verbose:
            console.print(regimes_table("Forward", kernel_limits().forward))
            console.print(regimes_table("Backward", kernel_limits().backward))


@app.command()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Architecture, such as 9.0a; repeatable. Default: TORCH_CUDA_ARCH_LIST, else "
            "those of this machine's GPUs."
        ),
    ] = None,
    package: Annotated[
        bool,
        typer.Option("--package", help="Build into the package's own folder, not into the cache."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Build into this folder, not into the cache.")
    ] = None,
    objects: Annotated[
        Path,
        typer.Option(help="With --package or --out: folder of object files, kept for later builds"),
    ] = Path("build/objects"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Compile the operators and one library of kernels, such as attention_bfloat16; "
            "repeatable. Default: all kernels."
        ),
    ] = None,
) -> None:
    """Compile the CUDA part: needs nvcc and any build of torch, but no GPU.

    Without --package and --out it also compiles the C++ part of calls, for this torch.

    The library goes into the cache where the first CUDA tensor looks for it: it is found by
    processes whose GPUs are those that it was compiled for. MAX_JOBS limits the files compiled at a
    time. What the compilers print goes into the file `log` beside the objects.
    """
    if package and out is not None:
        raise typer.BadParameter("expected one of --package and --out, got both")
    folder = extension.PACKAGE if package else out
    if only and folder is not None:
        raise typer.BadParameter("expected --only without --package and --out")
    for name in only or ():
        if name not in extension.libraries_of_kernels():
            known = ", ".join(extension.libraries_of_kernels())
            raise typer.BadParameter(f"--only: expected one of {known}, got {name}")
    with _exit_on(extension.BuildError):
        nvcc = extension.check_tools()
        requested = " ".join(arch or ()) or os.environ.get("TORCH_CUDA_ARCH_LIST")
        requested = requested or library.these_gpus()
        if not requested:
            raise extension.BuildError(
                "torch sees no CUDA GPU to compile for: name an architecture, such as --arch 9.0a "
                "(H100, H200) or --arch 8.0 (A100)"
            )
        names = extension.architectures(nvcc.version, requested)
        typer.echo(f"Compiling for {' '.join(names)} with {nvcc.path}")
        sys.stdout.flush()
        if only:
            for component in (extension.OPERATORS, *only):
                path = library.build_component(component, nvcc, names)
            _build_host()
        elif folder is None:
            path = library.build_into_cache(nvcc, names)
            _build_host()
        else:
            path = library.build_into(folder, objects, nvcc, names, objects / "log")
    typer.echo(f"Built {path}")


def _build_host() -> None:
    """The C++ part of calls, which is optional."""
    try:
        typer.echo(f"Built {library.host()}")
    except extension.BuildError as error:
        typer.echo(f"Calls go through Python: {error}", err=True)


@app.command("export-kernels")
def export(
    folder: Annotated[Path, typer.Argument(help="Gets a folder `build`, with one per variant.")],
    cuda: Annotated[
        int | None,
        typer.Option(
            help="Major version of the CUDA that built the compiled part. Default: nvcc's."
        ),
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Architecture of the compiled part, such as 9.0a; repeatable. Default: of a "
            "library in the cache, those of this machine's GPUs."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace variants that an earlier export wrote.")
    ] = False,
) -> None:
    """Write the package, and the compiled part if there is one, for Hugging Face's kernels.

    kernels.get_local_kernel(Path(FOLDER)) loads it.
    """
    nvcc = extension.find_nvcc()
    if cuda is None and nvcc is not None:
        cuda = nvcc.version[0]
    with _exit_on(extension.BuildError, OSError, ValueError):
        compiled = library.find_whole()
        archs = arch or (library.architectures_of(compiled) if compiled else ())
        for variant in export_kernels(folder, compiled, cuda, archs, force=force):
            typer.echo(f"Wrote {variant}")
    if compiled is None:
        typer.echo("No compiled part with all kernels: `megasoftmax build` compiles it")


@app.command("explain")
def explain_call(
    shape: Annotated[
        str,
        typer.Argument(
            help="ROWSxCOLUMNS of a softmax or softmax_topk, or more dimensions, the last two "
            "queries x keys; BATCHxHEADSxQUERIESxHEAD_DIM of attention."
        ),
    ],
    function: Annotated[Function, typer.Option(help="The function that is called.")] = "softmax",
    dtype: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(DTYPES)}. Default: fp16, of attention bf16."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Causal.")] = False,
    window: Annotated[
        str | None, typer.Option(help="LEFT,RIGHT: a window's sides, -1 for no limit.")
    ] = None,
    masked: Annotated[bool, typer.Option("--masked", help="With a bool mask.")] = False,
    softcap: Annotated[bool, typer.Option("--softcap", help="With a softcap.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="The backward pass.")] = False,
    bias_gradient: Annotated[
        bool,
        typer.Option(
            "--bias-gradient", help="The backward pass, with the gradient of a full bias."
        ),
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="attention: the backward pass under torch.use_deterministic_algorithms.",
        ),
    ] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="softmax: with dropout.")] = False,
    k: Annotated[int, typer.Option(help="softmax_topk: how many are kept of a row.")] = 10,
    keys: Annotated[
        int | None, typer.Option(help="attention: how many keys. Default: as many as queries.")
    ] = None,
    key_heads: Annotated[
        int | None, typer.Option(help="attention: heads of keys. Default: as many as of queries.")
    ] = None,
    value_dim: Annotated[
        int | None, typer.Option(help="attention: dimension of values. Default: that of keys.")
    ] = None,
    bias: Annotated[
        bool, typer.Option("--bias", help="attention: with a bias [1, heads, queries, keys].")
    ] = False,
    relative: Annotated[
        bool, typer.Option("--relative", help="attention: with a relative bias of each head.")
    ] = False,
    key_bias: Annotated[
        bool, typer.Option("--key-bias", help="attention: with a bias [1, heads, 1, keys].")
    ] = False,
    shifted: Annotated[
        bool, typer.Option("--shifted", help="attention: with a ShiftedBias of each head.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"The GPU: {', '.join(GPU_NAMES)}. Default: this machine's, else an H200."
        ),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="TB/s of a copy. Default: as known of the GPU.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="Nominal TFLOP/s of 16-bit products. Default: as known of the GPU."),
    ] = None,
) -> None:
    """Tell which kernel serves a call, why, over which grid, and what it moves; needs no GPU."""
    skipped = None
    with _exit_on(ValueError, extension.BuildError):
        device = current_gpu() if gpu is None else gpu_named(gpu)
        device = device.with_rates(bandwidth, tflops)
        of_all: dict[str, Any] = {"masked": masked, "softcap": softcap, "gpu": device}
        of_pairs = of_all | {"causal": causal, "window": _window(window)}
        is_backward = backward or bias_gradient or (deterministic and function == "attention")
        of_pairs |= {"bias_gradient": bias_gradient, "backward": is_backward}
        if function == "attention":
            table = attention_table(
                explain_attention(
                    *_dimensions_of_query(shape),
                    keys=keys,
                    key_heads=key_heads,
                    value_dim=value_dim,
                    bias=bias or (bias_gradient and not (relative or key_bias or shifted)),
                    relative=relative,
                    key_bias=key_bias,
                    shifted=shifted,
                    deterministic=deterministic,
                    dtype=_dtype(dtype or "bf16"),
                    **of_pairs,
                )
            )
        elif function == "softmax_topk":
            leading, columns = _dimensions(shape)
            call = math.prod(leading), columns, k, _dtype(dtype or "fp16")
            table = topk_table(explain_topk(*call, backward=backward, **of_all))
        else:
            leading, columns = _dimensions(shape)
            rows = math.prod(leading), columns, _dtype(dtype or "fp16")
            found = explain(*rows, queries=leading[-1], dropout=dropout, **of_pairs)
            table, skipped = call_table(found), skipped_table(found)
    console.print(table)
    if skipped is not None and skipped.row_count:
        console.print(skipped)


@app.command("check")
def check_kernels(
    seconds: Annotated[float, typer.Option(help="How long.")] = 60,
    family: Annotated[
        list[str] | None,
        typer.Option(help="softmax, softmax_topk or attention; repeatable. Default: all."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu. Default: cuda if there is one.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="One call alone, as a report names it.")] = None,
    report: Annotated[Path, typer.Option(help="The file for a bug report.")] = Path(
        "megasoftmax-check.txt"
    ),
) -> None:
    """Compare the kernels of this machine's GPU with the reference, on random calls.

    Forward and every gradient. Without a GPU the paths of a CPU are compared, and no kernel runs.
    Exit code 0: all results are right; 1: some are wrong; 2: no result.
    """
    from megasoftmax.check import CheckReport, check  # seconds of imports for other commands

    is_new = not report.exists()
    try:
        report.open("a").close()  # an error comes before the run, not after it
    except OSError as error:
        typer.echo(f"Error: report: {error}", err=True)
        raise typer.Exit(2) from error
    if device is None and not torch.cuda.is_available():
        typer.echo("torch sees no CUDA GPU: the paths of a CPU are checked, and no kernel")
    if seed is None:
        typer.echo(f"Comparing random calls with the reference for {seconds:.0f} s")
    try:
        with Steps(console, math.ceil(seconds)) as told, _exit_on(RuntimeError, ValueError, code=2):

            def tell(found: CheckReport) -> None:
                told.reach(min(math.floor(found.seconds), math.ceil(seconds)), found.verdict)

            found = check(seconds, families=family or (), device=device, seed=seed, progress=tell)
        report.write_text(str(found))
    finally:
        if is_new and not report.stat().st_size:  # the run did not end
            report.unlink()
    for name, tally in found.tallies.items():
        typer.echo(f"{name}: {tally}")
    for outcome in found.failures[:3]:
        typer.echo(f"{found.command(outcome)}  # {outcome.in_words()}")
    typer.echo(f"{found.verdict}\nReport: {report}")
    if not found.passed:
        raise typer.Exit(1 if found.failures else 2)


@app.command()
def tune(
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove what was measured, and measure nothing.")
    ] = False,
) -> None:
    """Measure on this machine's GPU from how many rows on each kernel of the softmax is chosen.

    Takes minutes, in which nothing else should run on the GPU. A file beside the compiled part
    keeps what was found, and later processes read it unless MEGASOFTMAX_TUNED is 0. Not a bit of
    any result changes. Exit code 1: nothing was measured.
    """
    from megasoftmax import tune as tuning  # it takes the functions, which others do not need

    with _exit_on(OSError, RuntimeError):
        if remove:
            file = tuning.remove()
            typer.echo("There was no file to remove" if file is None else f"Removed {file}")
            return
        with Steps(console, tuning.thresholds()) as told:
            found, file = tuning.tune_this_gpu(told.reach)
    changes = tuning.changes(found)
    for change in changes:
        typer.echo(str(change))
    typer.echo(f"{len(changes)} of {tuning.thresholds()} thresholds changed on {found.gpu}: {file}")


@app.command()
def regress(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable: a tiny gpt2, llama, mistral, mixtral, gemma2, gpt_oss, t5, bert, "
            "opt, swin or wav2vec2_conformer; pair, a transformer with triangle attention; a "
            "checkpoint's folder; package.module:factory, a function that returns a model. "
            "Default: gpt2."
        ),
    ] = None,
    all_models: Annotated[bool, typer.Option("--all", help="All tiny models.")] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="package.module:batches, called as (batch, length, seed). Default: the standard "
            "library's sources, half of the batches padded."
        ),
    ] = None,
    baseline: Annotated[str, typer.Option(help="Attention implementation.")] = "eager",
    candidate: Annotated[str, typer.Option(help="Attention implementation.")] = "megasoftmax",
    dtype: Annotated[
        str, typer.Option(help="fp32; bf16: autocast with weights in fp32; pure-bf16.")
    ] = "fp32",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: cuda if any.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    steps: Annotated[int, typer.Option(help="Of training.")] = 32,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 6,
    length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    checks: Annotated[int, typer.Option(help="Steps whose gradients are compared.")] = 5,
    dropout: Annotated[
        bool,
        typer.Option(
            "--dropout",
            help="Keep the model's dropout. Entry by entry, where both sides draw the same; "
            "else means over seeds.",
        ),
    ] = False,
    seeds: Annotated[int, typer.Option(help="Of each side, for these means; at least 16.")] = 64,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write a report as JSON.")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page.")] = None,
) -> None:
    """Train a model with and without megasoftmax, and tell whether only speed and memory differ.

    Exit code 0: the trainings are the same within rounding; 1: they differ; 2: no result.
    """
    # transformers takes seconds to import, which the other commands need not wait for.
    try:
        from transformers.utils import logging

        from megasoftmax import regression
        from megasoftmax.regression import RegressionError
        from megasoftmax.regression.models import NAMES
        from megasoftmax.regression.report import print_report, print_summary, to_html, to_json
    except ModuleNotFoundError as error:
        typer.echo(f"Error: {missing_extra(error) or error}", err=True)
        raise typer.Exit(2) from error

    for file in (json_file, html_file):
        if file is not None and not file.parent.is_dir():
            typer.echo(f"Error: no folder {file.parent} for {file.name}", err=True)
            raise typer.Exit(2)
    logging.set_verbosity_error()
    settings: dict[str, Any] = {"data": data, "baseline": baseline, "candidate": candidate}
    settings |= {"dtype": dtype, "device": device, "seed": seed, "steps": steps, "batch": batch}
    settings |= {"length": length, "learning_rate": lr, "checks": checks}
    settings |= {"dropout": dropout, "seeds": seeds}
    names = [*dict.fromkeys(NAMES if all_models else model or ["gpt2"])]
    outcomes: dict[str, regression.Report | RegressionError] = {}
    with Steps(console, len(names) * steps) as told:
        for index, name in enumerate(names):

            def tell(step: int, name: str = name, before: int = index * steps) -> None:
                told.reach(before + step + 1, name)

            try:
                outcomes[name] = report = regression.run(name, **settings, progress=tell)
                print_report(console, report)
            except RegressionError as error:
                outcomes[name] = error
                typer.echo(f"Error: {error}", err=True)
            except Exception as error:  # of a factory, say: exit code 1 is for regressions alone
                outcomes[name] = RegressionError(f"{type(error).__name__}: {error}")
                console.print_exception()
    if len(names) > 1:
        print_summary(console, outcomes)
    if json_file is not None:
        json_file.write_text(to_json(outcomes))
    if html_file is not None:
        html_file.write_text(to_html(outcomes))
    reports = [outcome for outcome in outcomes.values() if isinstance(outcome, regression.Report)]
    if not all(report.passed for report in reports):
        raise typer.Exit(1)
    if len(reports) < len(names):
        raise typer.Exit(2)


def _dimensions(text: str) -> tuple[list[int], int]:
    if re.fullmatch(r"\d+(x\d+)+", text) is None:
        raise ValueError(f"shape: expected ROWSxCOLUMNS, such as 8192x50257, got {text!r}")
    *leading, columns = map(int, text.split("x"))
    return leading, columns


def _dimensions_of_query(text: str) -> list[int]:
    if re.fullmatch(r"\d+(x\d+){3}", text) is None:
        raise ValueError(
            "shape: expected BATCHxHEADSxQUERIESxHEAD_DIM, such as 8x16x2048x64, got " + repr(text)
        )
    return list(map(int, text.split("x")))


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _window(text: str | None) -> Window | None:
    if text is None:
        return None
    sides = re.fullmatch(r"(-?\d+),(-?\d+)", text)
    if sides is None:
        raise ValueError(f"window: expected LEFT,RIGHT, such as 256,0, got {text!r}")
    return int(sides[1]), int(sides[2])


def main() -> None:
    """The console script."""
    app(prog_name="megasoftmax")


if __name__ == "__main__":
    app(prog_name="python -m megasoftmax")
