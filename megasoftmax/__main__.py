"""``python -m megasoftmax`` tells what runs here.

Its command ``build`` compiles the CUDA part, ``explain`` tells how the kernels serve a call, and
``regress`` whether a model trains with them as it did without.
``export-kernels`` writes a folder for Hugging Face's ``kernels``.
"""

import math
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch

from megasoftmax._export_kernels import export_kernels
from megasoftmax._extras import missing_extra
from megasoftmax.build import extension, library
from megasoftmax.explain import DTYPES, PACK_BYTES, Explanation, Gpu, Window, current_gpu, explain
from megasoftmax.limits import RowRegime, kernel_limits

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f"python -m megasoftmax: {missing_extra(error) or error}") from error

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


@app.callback(invoke_without_command=True)
def info(context: typer.Context) -> None:
    """Without a command: versions, GPUs, the compiled part and its limits."""
    if context.invoked_subcommand is None:
        console.print(_versions())
        console.print(_compiled_part())
        console.print(_regimes("Forward", kernel_limits().forward))
        console.print(_regimes("Backward", kernel_limits().backward))


@app.command()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Architecture, such as 9.0a; repeatable. Default: TORCH_CUDA_ARCH_LIST."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the library. Default: where the package looks for it.")
    ] = extension.PACKAGE,
    objects: Annotated[
        Path, typer.Option(help="Folder of the object files, reused by later builds.")
    ] = Path("build/objects"),
) -> None:
    """Compile the CUDA part: needs nvcc and any build of torch, but no GPU.

    MAX_JOBS limits the files compiled at a time.
    """
    try:
        nvcc = extension.check_tools()
        requested = " ".join(arch) if arch else os.environ.get("TORCH_CUDA_ARCH_LIST")
        names = extension.architectures(nvcc.version, requested)
        console.print(f"Compiling for {' '.join(names)} with {nvcc.path}")
        path = extension.build(out, objects, nvcc, names)
    except extension.BuildError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"Built {path}")


@app.command("export-kernels")
def export(
    folder: Annotated[Path, typer.Argument(help="Gets a folder `build`, with one per variant.")],
    cuda: Annotated[
        int | None,
        typer.Option(
            help="Major version of the CUDA that built the compiled part. Default: nvcc's."
        ),
    ] = None,
) -> None:
    """Write the package, and the compiled part if there is one, for Hugging Face's kernels.

    kernels.get_local_kernel(Path(FOLDER)) loads it.
    """
    compiled = library.status()
    nvcc = extension.find_nvcc()
    if cuda is None and nvcc is not None:
        cuda = nvcc.version[0]
    try:
        for variant in export_kernels(folder, compiled.path, cuda):
            typer.echo(f"Wrote {variant}")
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    if compiled.path is None:
        typer.echo(f"No compiled part: {compiled.reason}")


@app.command("explain")
def explain_call(
    shape: Annotated[
        str, typer.Argument(help="ROWSxCOLUMNS, or more dimensions, the last two queries x keys.")
    ],
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "fp16",
    causal: Annotated[bool, typer.Option("--causal", help="Causal.")] = False,
    window: Annotated[
        str | None, typer.Option(help="LEFT,RIGHT: a window's sides, -1 for no limit.")
    ] = None,
    masked: Annotated[bool, typer.Option("--masked", help="With a bool mask.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="The backward pass.")] = False,
    bias_gradient: Annotated[
        bool, typer.Option("--bias-gradient", help="The backward pass, with that of a full bias.")
    ] = False,
) -> None:
    """Tell which row regime serves a call, why, and what it moves; needs no GPU.

    Without a GPU, the answer is that of an H200.
    """
    gpu = current_gpu()
    try:
        leading, columns = _dimensions(shape)
        explanation = explain(
            math.prod(leading),
            columns,
            _dtype(dtype),
            queries=leading[-1],
            causal=causal,
            window=_window(window),
            masked=masked,
            bias_gradient=bias_gradient,
            backward=backward or bias_gradient,
            multiprocessors=gpu.multiprocessors,
            max_cluster=gpu.max_cluster,
        )
    except (ValueError, extension.BuildError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    console.print(_call(explanation, gpu))
    if explanation.skipped:
        console.print(_skipped(explanation))


@app.command()
def regress(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable: a tiny gpt2, llama, mistral, mixtral, gemma2, gpt_oss, t5, bert, opt "
            "or swin; a checkpoint's folder; package.module:factory. Default: gpt2."
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
        from megasoftmax.regression.models import TINY
        from megasoftmax.regression.report import print_report, print_summary, to_html, to_json
    except ModuleNotFoundError as error:
        typer.echo(f"Error: {missing_extra(error) or error}", err=True)
        raise typer.Exit(2) from error

    for file in (json_file, html_file):
        if file is not None and not file.parent.is_dir():
            typer.echo(f"Error: no folder {file.parent} for {file.name}", err=True)
            raise typer.Exit(2)
    logging.set_verbosity_error()
    names = [*dict.fromkeys(TINY if all_models else model or ["gpt2"])]
    outcomes: dict[str, regression.Report | RegressionError] = {}
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(names) * steps)
        for index, name in enumerate(names):
            progress.update(task, description=name, completed=index * steps)
            try:
                outcomes[name] = report = regression.run(
                    name,
                    data=data,
                    baseline=baseline,
                    candidate=candidate,
                    dtype=dtype,
                    device=device,
                    seed=seed,
                    steps=steps,
                    batch=batch,
                    length=length,
                    learning_rate=lr,
                    checks=checks,
                    progress=lambda step: progress.advance(task),
                )
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


def _call(found: Explanation, gpu: Gpu) -> Table:
    direction = "backward" if found.backward else "forward"
    units = f"up to {found.units:,} per row, of {found.batches_per_unit} batches"
    if found.threads is None:
        blocks, shared = "of as many rows as fit a tile", "a tile per block"
    else:
        blocks = "as many as run at a time" if found.blocks is None else f"{found.blocks:,}"
        blocks += f", of {found.threads} threads"
        shared = f"{found.shared_bytes:,} bytes per block"
    bandwidth = f"{gpu.bytes_per_second / 1e12:.2f} TB/s, {gpu.bandwidth_source}"
    table = Table(show_header=False, box=None)
    for name, value in (
        ("regime", f"{found.regime.name}, row {found.index} of the {direction} table"),
        ("why", "\n".join(found.reasons)),
        ("rows", f"{found.rows:,} of {found.columns:,} {found.dtype}".replace("torch.", "")),
        ("kind of rows", found.kind),
        ("visible columns", f"up to {found.visible_columns:,} per row"),
        ("chunks", f"up to {found.chunks:,} per row, of 16 bytes"),
        ("units", units if found.units else "none"),
        ("blocks per row", f"{found.blocks_per_row:,}"),
        ("blocks", blocks),
        ("shared memory", shared),
        ("workspace", f"{found.workspace_bytes:,} bytes"),
        ("reads", f"{found.bytes_read:,} bytes at least"),
        ("writes", f"{found.bytes_written:,} bytes"),
        ("expected time", f"{found.microseconds(gpu.bytes_per_second):.1f} µs on {gpu.name}"),
        ("bandwidth", bandwidth),
    ):
        table.add_row(name, value)
    return table


def _skipped(found: Explanation) -> Table:
    table = Table(title="Skipped", title_justify="left", box=box.SIMPLE)
    table.add_column("row", justify="right")
    table.add_column("regime")
    table.add_column("why")
    for regime in found.skipped:
        table.add_row(str(regime.index), regime.name, regime.why)
    return table


def _versions() -> Table:
    try:
        installed = metadata.version("megasoftmax")
    except metadata.PackageNotFoundError:
        installed = "not installed"
    nvcc = extension.find_nvcc()
    table = Table(show_header=False, box=None)
    table.add_row("megasoftmax", f"{installed}, {extension.PACKAGE}")
    table.add_row("python", platform.python_version())
    table.add_row("torch", str(torch.__version__))
    table.add_row("CUDA of torch", torch.version.cuda or "none")
    table.add_row("nvcc", f"{nvcc.version[0]}.{nvcc.version[1]}, {nvcc.path}" if nvcc else "none")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        table.add_row(f"GPU {index}", f"{name}, compute capability {major}.{minor}")
    return table


def _compiled_part() -> str:
    status = library.status()
    return (
        f"Compiled part: {status.path}"
        if status.available
        else f"No compiled part: {status.reason}"
    )


def _regimes(direction: str, regimes: tuple[RowRegime, ...]) -> Table:
    table = Table(title=f"{direction}, row regimes", title_justify="left", box=None)
    table.add_column("regime", no_wrap=True)
    table.add_column("waits in", no_wrap=True)
    table.add_column("rows", min_width=8)
    for heading in ("bytes\nup to", "rows\nfrom", "blocks\n/row", "threads\n× rows", "blocks\n/SM"):
        table.add_column(heading, justify="right", no_wrap=True)
    for regime in regimes:
        table.add_row(
            regime.name,
            regime.storage,
            ", ".join(regime.serves),
            "any" if regime.max_chunks is None else f"{regime.max_chunks * PACK_BYTES:,}",
            f"{regime.min_rows:,}",
            "all" if regime.blocks_per_row is None else str(regime.blocks_per_row),
            *(() if regime.storage == "tile" else _shape(regime)),
        )
    return table


def _shape(regime: RowRegime) -> tuple[str, str]:
    return f"{regime.threads_per_row} × {regime.rows_per_block}", str(regime.blocks_per_sm)


if __name__ == "__main__":
    app(prog_name="python -m megasoftmax")
