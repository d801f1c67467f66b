"""Two compiled libraries beside each other, on one GPU; writes results/builds.csv.

    python benchmarks/compare_builds.py OLD/_C.abi3.so NEW/_C.abi3.so

A change of the kernels must not slow down what it does not mean to change. Each library runs in
processes of its own, in turn; of each case the fewest microseconds count. `ratio` is new over old.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import measure
import peers
import torch
import typer
from torch import Tensor

import megasoftmax
from megasoftmax import RelativeBias
from megasoftmax.biases import alibi_bias
from megasoftmax.build import library as compiled_part

CALLS = 40  # of a case in a process
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32

# Batch, heads, length, head dimension; what is added to the scores; other options, `queries` where
# there are fewer of them than keys.
ATTENTION: list[tuple[tuple[int, int, int, int], str, dict[str, Any]]] = [
    ((4, 16, 4096, 128), "none", {}),
    ((4, 16, 4096, 128), "none", {"causal": True}),
    ((4, 16, 4096, 128), "[1, h]", {}),
    ((4, 16, 4096, 128), "[1, h]", {"causal": True}),
    ((4, 16, 4096, 64), "none", {}),
    ((4, 16, 4096, 64), "[1, h]", {}),
    ((4, 16, 4096, 64), "[1, h] float32", {}),
    ((4, 16, 4096, 64), "table", {}),
    ((4, 16, 4096, 64), "alibi", {"causal": True}),
    ((2, 8, 4096, 128), "[b, h]", {}),
    ((2, 8, 4096, 256), "none", {}),
    ((2, 8, 4096, 256), "[1, h]", {}),
    ((2, 16, 4095, 64), "[1, h]", {}),
    ((8, 16, 1024, 64), "[1, h]", {}),
    ((128, 4, 384, 32), "none", {}),
    ((128, 4, 384, 32), "[b, h]", {}),
    ((8, 32, 65536, 128), "none", {"queries": 1}),
    ((32, 32, 4096, 64), "none", {"queries": 4}),
    ((32, 8, 4096, 256), "none", {"queries": 1}),
    ((8, 32, 4096, 128), "[1, h]", {"queries": 1}),
]
# Scores, their type, the shape of a mask, other options.
SOFTMAX: list[tuple[tuple[int, ...], torch.dtype, tuple[int, ...] | None, dict[str, Any]]] = [
    *(((8, 32, 2048, 2048), BFLOAT, None, options) for options in ({"causal": True}, {})),
    *(((8, 32, n, n), BFLOAT, (8, 1, n, n), {}) for n in (1024, 2047, 2048)),
    *(((8, 32, n, n), BFLOAT, (8, 1, 1, n), {}) for n in (2047, 2048)),
    ((1, 32, 2047, 2047), BFLOAT, (1, 1, 1, 2047), {}),
    ((8, 32, 2047, 2047), BFLOAT, None, {"causal": True}),
    ((2, 32, 4096, 4096), BFLOAT, (2, 1, 4096, 4096), {}),
    ((2, 32, 4096, 4096), BFLOAT, None, {"window": (256, 0)}),
    ((32, 16, 512, 512), BFLOAT, (32, 1, 512, 512), {}),
    ((8192, 50257), HALF, None, {}),
    ((8192, 32768), HALF, None, {}),
    ((1024, 262144), HALF, None, {}),
    ((4, 8388608), HALF, None, {}),
    ((262144, 65), HALF, None, {}),
    ((32768, 1001), FLOAT, None, {}),
]
# Rows, vocabulary, type, K.
TOPK = [
    (8192, 50257, FLOAT, 10),
    (8192, 50257, BFLOAT, 10),
    (8192, 128256, BFLOAT, 64),
    (64, 128256, BFLOAT, 32),
    (1, 151936, FLOAT, 10),
    (1 << 20, 64, BFLOAT, 6),
]

Times = dict[str, float]


def bias_of(kind: str, shape: tuple[int, ...]) -> Tensor | RelativeBias | None:
    batch, heads, queries, length = shape
    if kind == "none":
        return None
    if kind == "table":
        table = torch.randn(heads, 2 * length - 1, dtype=BFLOAT)
        return RelativeBias(table.requires_grad_())
    if kind == "alibi":
        return alibi_bias(torch.linspace(0.01, 0.5, heads), length, length)
    dtype = FLOAT if "float32" in kind else BFLOAT
    sizes = (batch if "b" in kind else 1, heads, queries, length)
    return torch.randn(sizes, dtype=dtype).requires_grad_()


def ways(is_small: bool) -> Iterator[tuple[str, measure.Way]]:
    """(name, way) of each case, on the default device."""

    def sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(min(size, 24) for size in shape) if is_small else shape

    for shape, kind, options in ATTENTION:
        name = f"attention {'x'.join(map(str, shape))} {kind}"
        named = " ".join([name, *(f"{option} {value}" for option, value in options.items())])
        batch, heads, length, dim = sizes(shape)
        queries = min(options.get("queries", length), length)
        leaves = peers.projected(heads, dim, (queries, length, length), batch)
        bias = bias_of(kind, (batch, heads, queries, length))
        table = bias.table if isinstance(bias, RelativeBias) else bias
        if table is not None and table.requires_grad:
            leaves.append(table)
        attend = peers.ours(bias=bias, causal=options.get("causal", False))
        yield named, measure.Way(lambda a=attend, given=leaves[:3]: a(*given), leaves)
    for shape, dtype, mask_shape, options in SOFTMAX:
        scores = torch.randn(sizes(shape), dtype=dtype).requires_grad_()
        mask = None if mask_shape is None else torch.rand(sizes(mask_shape)) < 0.3
        name = f"softmax {'x'.join(map(str, shape))} {measure.dtype_name(dtype)}"
        masked = [] if mask_shape is None else [f"mask {'x'.join(map(str, mask_shape))}"]
        given = {"mask": mask, "fused": scores.is_cuda or None, **options}
        way = peers.rows(megasoftmax.softmax, scores, **given)
        yield " ".join([name, *masked, *options]), way
    for rows, columns, dtype, k in TOPK:
        logits = torch.randn(sizes((rows, columns)), dtype=dtype).requires_grad_()
        few = min(k, logits.shape[1])

        def topk(logits: Tensor, few: int = few) -> Tensor:
            return megasoftmax.softmax_topk(logits, few, fused=logits.is_cuda or None)[0]

        name = f"softmax_topk {rows}x{columns} {measure.dtype_name(dtype)} k={k}"
        yield name, peers.rows(topk, logits)


def times_of(run: measure.Run, library: Path) -> Times:
    """In this process: forward, and backward alone."""
    compiled_part._LIBRARY = library.absolute()
    if run.device == "cuda" and not compiled_part.load().available:
        raise SystemExit(f"{library} cannot be loaded")
    times: Times = {}
    torch.manual_seed(0)
    turns, timer = 1 if run.is_small else CALLS, run.timer()
    cases = ways(run.is_small)

    def made() -> tuple[str, measure.Way] | None:
        with run.on_device():
            return next(cases, None)

    for name, way in iter(made, None):
        if not re.search(run.only, name):
            continue
        passes, _, refusal = measure.prepare(lambda way=way: way, ("forward", "backward"))
        if refusal:
            raise SystemExit(f"{name}: {refusal}")
        for which, each in measure.interleaved(passes, turns, timer, warm_up=2).items():
            times[f"{name}, {which}"] = each
    return times


@measure.benchmark("builds.csv", rounds=2, chooses=False)
def main(
    run: measure.Run,
    old: Path,
    new: Annotated[
        Path | None, typer.Argument(help="None: print the times of `old` alone.")
    ] = None,
) -> None:
    """Compare the kernels of two libraries, in as many processes for each as there are rounds."""
    if run.listed:
        with torch.device("meta"):
            print(*(name for name, _ in ways(is_small=False)), sep="\n")
        return
    if new is None:
        print(json.dumps(times_of(run, old)))
        return
    fewest: dict[Path, Times] = {old: {}, new: {}}
    options = ["--device", run.device, *(["--quick"] if run.is_small else []), "--only", run.only]
    for _ in range(run.turns):
        for library, times in fewest.items():
            command = [sys.executable, __file__, str(library), *options]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            for name, microseconds in json.loads(answer.stdout.splitlines()[-1]).items():
                times[name] = min(microseconds, times.get(name, microseconds))
    with run.writer() as write:
        for name, before in fewest[old].items():
            case, which = name.rsplit(", ", 1)
            after = fewest[new][name]
            numbers = {"old_us": f"{before:.1f}", "new_us": f"{after:.1f}"}
            write({"case": case, "pass": which, **numbers, "ratio": f"{after / before:.3f}"})


if __name__ == "__main__":
    typer.run(main)
