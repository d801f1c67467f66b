"""The time to the first fused results: of a wheel with kernels, or where they are compiled.

python benchmarks/bench_install.py dist/megasoftmax-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl
python benchmarks/bench_install.py

The first goes from `pip install` on and writes results/install.csv. The environment is new but for
the packages of this Python, and its PATH has no compiler. MB are 1,000,000 bytes of the wheel.

The second takes this checkout, and writes results/first_use.csv. Each call runs in a new process
with an empty cache, so that it compiles its kernels. `cores` are those that compile. Without a
GPU it compiles what these calls would, for GPUs of some architectures.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import measure
import measured
import torch
import typer

from megasoftmax.build import extension

START = """
import time
start = time.perf_counter()
def lap(step):
    global start
    print(step, time.perf_counter() - start, sep="\\t")
    start = time.perf_counter()

import torch
lap("import torch")
import megasoftmax
lap("import megasoftmax")
scores = torch.randn(4, 8, 512, 512, device="cuda", dtype=torch.bfloat16)
query, key, value = torch.randn(3, 2, 8, 512, 64, device="cuda", dtype=torch.bfloat16)
bias = torch.zeros(8, 512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.cuda.synchronize()
lap("start of CUDA")
"""
# Name of a first call -> its code.
CALLS = {
    "first softmax": "megasoftmax.softmax(scores, causal=True, fused=True)",
    "first softmax_topk": "megasoftmax.softmax_topk(scores, 8, fused=True)",
    "first attention, forward and backward": (
        "megasoftmax.attention(query.requires_grad_(), key, value, fused=True).sum().backward()"
    ),
    "first attention with a bias, forward and backward": (
        "megasoftmax.attention(query, key, value, bias=bias, fused=True).sum().backward()"
    ),
}
# Name of a first call -> groups of kernels that it compiles.
GROUPS = dict(
    zip(
        CALLS,
        ("softmax", "topk_tiles", "attention_steps attention", "attention_steps attention_biased"),
        strict=True,
    )
)
ARCHITECTURES = ("8.6", "9.0a")
BUILD = """
from megasoftmax.build import extension, library
for component in (extension.OPERATORS, *{names!r}):
    library.build_component(component, extension.check_tools(), ({architecture!r},))
"""
WHEEL_CALLS = ("first softmax", "first attention with a bias, forward and backward")


def main(
    wheel: Annotated[Path | None, typer.Argument()] = None,
    out: Path | None = None,
    commit: measure.Commit = "",
) -> None:
    if wheel is None and (extension.PACKAGE / extension.LIBRARY_NAME).exists():
        expected = f"expected no {extension.LIBRARY_NAME} beside the package, which has all kernels"
        raise typer.BadParameter(expected)
    out = out or measure.RESULTS / ("first_use.csv" if wheel is None else "install.csv")
    with (
        measure.results(out, measure.provenance(commit)) as write,
        tempfile.TemporaryDirectory() as folder,
    ):
        if wheel is None:
            columns, timings = {"cores": str(extension.jobs())}, first_uses(Path(folder))
        else:
            megabytes = f"{wheel.stat().st_size / 1e6:.1f}"
            columns, timings = {"mb": megabytes}, steps(wheel.resolve(), Path(folder))
        for step, seconds in timings:
            write(columns | {"step": step, "seconds": f"{seconds:.2f}"})
            print(f"{seconds:8.2f} s  {step}", flush=True)


def first_uses(folder: Path) -> Iterator[tuple[str, float]]:
    """The first call of each function where nothing was compiled before, and its seconds."""
    has_gpu = torch.cuda.is_available()
    for architecture, step in itertools.product([""] if has_gpu else ARCHITECTURES, CALLS):
        cache = tempfile.mkdtemp(dir=folder)
        environment = os.environ | {"TORCH_EXTENSIONS_DIR": cache, "PYTHONPATH": str(measured.ROOT)}
        if has_gpu:
            yield [*laps(sys.executable, [step], folder, environment)][-1]
            continue
        names = [f"{group}_bfloat16" for group in GROUPS[step].split()]
        script = BUILD.format(names=names, architecture=architecture)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, check=True)
        yield f"{step}, compiled for {architecture}", time.perf_counter() - began


def laps(
    python: Path | str, calls: Iterable[str], folder: Path, environment: dict[str, str]
) -> Iterator[tuple[str, float]]:
    """The steps of a new process that makes these calls, and their seconds."""
    script = START
    for call in calls:
        script += f"{CALLS[call]}\ntorch.cuda.synchronize()\nlap({call!r})\n"
    command = [python, "-c", script]
    found = subprocess.run(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    for line in found.stdout.splitlines():
        step, _, seconds = line.partition("\t")
        yield step, float(seconds)


def steps(wheel: Path, folder: Path) -> Iterator[tuple[str, float]]:
    """Each step of an installation into an environment in `folder`, and its seconds."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    # What this environment has. `--system-site-packages` would be that of its own base.
    (packages,) = folder.glob("lib/python*/site-packages")
    Path(packages, "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": str(python.parent), "TORCH_EXTENSIONS_DIR": f"{folder}/cache"}
    began = time.perf_counter()
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    install += ["--force-reinstall", wheel]  # though this environment has the same version
    subprocess.run(install, env=environment, check=True)
    yield "pip install", time.perf_counter() - began
    yield from laps(python, WHEEL_CALLS, folder, environment)
    yield "all", time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
