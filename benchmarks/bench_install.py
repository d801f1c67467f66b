"""From `pip install` of a wheel to the first fused results; writes results/install.csv.

The environment is new but for the packages of this Python, and its PATH has no compiler. MB are
1,000,000 bytes of the wheel.

python benchmarks/bench_install.py dist/megasoftmax-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import measure
import torch
import typer

FIRST_CALLS = """
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
megasoftmax.softmax(scores, causal=True, fused=True)
torch.cuda.synchronize()
lap("first softmax")
megasoftmax.attention(query, key, value, bias=bias, fused=True).sum().backward()
torch.cuda.synchronize()
lap("first attention, forward and backward")
"""


def main(
    wheel: Path, out: Path = measure.RESULTS / "install.csv", commit: measure.Commit = ""
) -> None:
    megabytes = f"{wheel.stat().st_size / 1e6:.1f}"
    with (
        measure.results(out, measure.provenance(commit)) as write,
        tempfile.TemporaryDirectory() as folder,
    ):
        for step, seconds in steps(wheel.resolve(), Path(folder)):
            write({"mb": megabytes, "step": step, "seconds": f"{seconds:.2f}"})
            print(f"{seconds:8.2f} s  {step}", flush=True)


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
    found = subprocess.run(
        [python, "-c", FIRST_CALLS],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in found.stdout.splitlines():
        step, _, seconds = line.partition("\t")
        yield step, float(seconds)
    yield "all", time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
