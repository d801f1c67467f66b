"""``python -m megasoftmax`` tells what runs here; its command ``build`` compiles the CUDA part."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megasoftmax import _build, _extension

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


@app.callback(invoke_without_command=True)
def info(context: typer.Context) -> None:
    """Without a command: versions, GPUs, the compiled part and its limits."""
    if context.invoked_subcommand is None:
        console.print(_versions())
        console.print(_compiled_part())
        console.print(_regimes("Forward", _extension.LIMITS.forward))
        console.print(_regimes("Backward", _extension.LIMITS.backward))


@app.command()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Architecture, such as 9.0a; repeatable. Default: TORCH_CUDA_ARCH_LIST."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the library. Default: where the package looks for it.")
    ] = _build.PACKAGE,
    objects: Annotated[
        Path, typer.Option(help="Folder of the object files, reused by later builds.")
    ] = Path("build/objects"),
) -> None:
    """Compile the CUDA part: needs nvcc and any build of torch, but no GPU.

    MAX_JOBS limits the files compiled at a time.
    """
    try:
        nvcc, torch_install = _build.check_tools(_build.find_nvcc(), _build.find_torch())
        requested = " ".join(arch) if arch else os.environ.get("TORCH_CUDA_ARCH_LIST")
        names = _build.architectures(nvcc.version, requested)
        console.print(f"Compiling for {' '.join(names)} with {nvcc.path}")
        library = out / _build.LIBRARY_NAME
        _build.build(library, objects, nvcc, torch_install, names, report=typer.echo)
    except _build.BuildError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"Built {library}")


def _versions() -> Table:
    try:
        installed = metadata.version("megasoftmax")
    except metadata.PackageNotFoundError:
        installed = "not installed"
    nvcc = _build.find_nvcc()
    table = Table(show_header=False, box=None)
    table.add_row("megasoftmax", f"{installed}, {_build.PACKAGE}")
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
    status = _extension.status()
    return (
        f"Compiled part: {status.path}"
        if status.available
        else f"No compiled part: {status.reason}"
    )


def _regimes(direction: str, regimes: tuple[_extension.RowRegime, ...]) -> Table:
    table = Table(title=f"{direction}, row regimes", title_justify="left", box=box.SIMPLE)
    table.add_column("regime")
    table.add_column("row waits in")
    table.add_column("rows")
    for heading in ("bytes up to", "threads/row", "rows/block", "blocks/SM"):
        table.add_column(heading, justify="right")
    for regime in regimes:
        longest = "any" if regime.max_chunks is None else f"{regime.max_chunks * 16:,}"
        numbers = (regime.threads_per_row, regime.rows_per_block, regime.blocks_per_sm)
        table.add_row(
            regime.name, regime.storage, ", ".join(regime.serves), longest, *map(str, numbers)
        )
    return table


if __name__ == "__main__":
    app(prog_name="python -m megasoftmax")
