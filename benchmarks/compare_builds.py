"""Two compiled libraries beside each other, on one GPU; writes results/builds.csv.

    python benchmarks/compare_builds.py OLD/_C.abi3.so NEW/_C.abi3.so

A change of the kernels must not slow down what it does not mean to change. Each library runs in
processes of its own, in turn; of each case the fewest microseconds count. `ratio` is new over old.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import measure
import torch
import typer
from torch import Tensor

import megasoftmax
from megasoftmax import RelativeBias
from megasoftmax.biases import alibi_bias
from megasoftmax.build import library as compiled_part

RESULTS = Path(__file__).parent / "results" / "builds.csv"
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


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def bias_of(
    kind: str, batch: int, heads: int, queries: int, length: int
) -> Tensor | RelativeBias | None:
    if kind == "none":
        return None
    if kind == "table":
        return RelativeBias(normal(heads, 2 * length - 1, dtype=BFLOAT).requires_grad_())
    if kind == "alibi":
        return alibi_bias(torch.linspace(0.01, 0.5, heads, device="cuda"), length, length)
    dtype = FLOAT if "float32" in kind else BFLOAT
    shape = (batch if "b" in kind else 1, heads, queries, length)
    return normal(*shape, dtype=dtype).requires_grad_()


def time_both(name: str, call: Callable[[], Tensor], leaves: list[Tensor], times: Times) -> None:
    """Forward, and backward alone."""
    timer = measure.gpu_timer()
    output = call()
    gradient = torch.randn_like(output)
    passes: dict[str, measure.Function] = {
        "forward": call,
        "backward": lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True),
    }
    for which, microseconds in measure.interleaved(passes, CALLS, timer, warm_up=2).items():
        times[f"{name}, {which}"] = microseconds


def run_attention(times: Times) -> None:
    for (batch, heads, length, dim), kind, options in ATTENTION:
        queries = options.get("queries", length)
        query, key, value = (
            normal(batch, rows, heads, dim, dtype=BFLOAT).transpose(1, 2).requires_grad_()
            for rows in (queries, length, length)
        )
        bias = bias_of(kind, batch, heads, queries, length)
        table = bias.table if isinstance(bias, RelativeBias) else bias
        leaves = [query, key, value]
        if table is not None and table.requires_grad:
            leaves.append(table)

        call = functools.partial(
            megasoftmax.attention,
            query,
            key,
            value,
            bias=bias,
            causal=options.get("causal", False),
            fused=True,
        )
        name = f"attention {batch}x{heads}x{length}x{dim} {kind}"
        with_options = (f"{option} {value}" for option, value in options.items())
        time_both(" ".join([name, *with_options]), call, leaves, times)


def run_rows(times: Times) -> None:
    for shape, dtype, mask_shape, options in SOFTMAX:
        scores = normal(*shape, dtype=dtype).requires_grad_()
        mask = None
        if mask_shape is not None:
            mask = torch.rand(mask_shape, device="cuda") < 0.3

        call = functools.partial(megasoftmax.softmax, scores, mask=mask, fused=True, **options)
        name = f"softmax {'x'.join(map(str, shape))} {dtype}".replace("torch.", "")
        masked = [] if mask_shape is None else [f"mask {'x'.join(map(str, mask_shape))}"]
        time_both(" ".join([name, *masked, *options]), call, [scores], times)
    for rows, columns, dtype, k in TOPK:
        logits = normal(rows, columns, dtype=dtype).requires_grad_()

        def topk(logits: Tensor = logits, k: int = k) -> Tensor:
            return megasoftmax.softmax_topk(logits, k, fused=True)[0]

        name = f"softmax_topk {rows}x{columns} {dtype} k={k}".replace("torch.", "")
        time_both(name, topk, [logits], times)


def run(library: Path) -> Times:
    """In this process."""
    compiled_part._LIBRARY = library.absolute()
    if not compiled_part.load().available:
        raise SystemExit(f"{library} cannot be loaded")
    times: Times = {}
    torch.manual_seed(0)
    run_attention(times)
    run_rows(times)
    return times


def main(
    old: Path,
    new: Annotated[
        Path | None, typer.Argument(help="None: print the times of `old` alone.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Processes for each library.")] = 2,
    out: measure.Out = RESULTS,
    commit: Annotated[str, typer.Option(help="Of the new library.")] = "",
) -> None:
    """Compare the kernels of two libraries."""
    if new is None:
        print(json.dumps(run(old)))
        return
    fewest: dict[Path, Times] = {old: {}, new: {}}
    for _ in range(rounds):
        for library, times in fewest.items():
            answer = subprocess.run(
                [sys.executable, __file__, str(library)], capture_output=True, text=True, check=True
            )
            for name, microseconds in json.loads(answer.stdout.splitlines()[-1]).items():
                times[name] = min(microseconds, times.get(name, microseconds))
    with measure.results(out, measure.provenance(commit)) as write:
        for name, before in fewest[old].items():
            case, which = name.rsplit(", ", 1)
            after = fewest[new][name]
            numbers = {
                "old_us": f"{before:.1f}",
                "new_us": f"{after:.1f}",
                "ratio": f"{after / before:.3f}",
            }
            write({"case": case, "pass": which} | numbers)
            print(f"{name:75}{before:10.1f}{after:10.1f}{100 * (after / before - 1):+7.1f}%")


if __name__ == "__main__":
    typer.run(main)
