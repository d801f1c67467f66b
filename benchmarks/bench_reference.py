"""The reference path beside the eager code it replaces, on a CPU; writes results/reference_cpu.csv.

Eager is what models run without fused kernels: scale, masked_fill, softmax in float32, cast, drop.
"""

import itertools
import platform
from contextlib import nullcontext

import measure
import peers
import torch
import typer

import megasoftmax

SCALE = 0.125


@measure.benchmark("reference_cpu.csv", rounds=15, device="cpu", measures_host=True)
def main(run: measure.Run, threads: int = 2) -> None:
    """Masked, causal and dropped, forward alone and with backward, float32 and bfloat16."""
    torch.set_num_threads(threads)
    shape = (4, 8, 24, 24) if run.quick else (4, 8, 512, 512)
    causal = torch.ones(shape[-2:], dtype=torch.bool).triu(1)
    masked = torch.rand(shape[0], 1, *shape[-2:]) < 0.25
    variants = {
        "masked": (masked, {"mask": masked}),
        "causal": (causal, {"causal": True}),
        "causal, dropout": (causal, {"causal": True, "dropout": 0.1}),
    }
    common = measure.provenance(run.commit, f"{platform.machine()}, {threads} threads")
    pairs = itertools.product((torch.float32, torch.bfloat16), variants)
    cases = {f"{measure.dtype_name(dtype)} {variant}": (dtype, variant) for dtype, variant in pairs}
    chosen = run.chosen(cases)
    if run.listed:
        return
    with run.writer(common) as write:
        for case in chosen:
            dtype, variant = cases[case]
            mask, arguments = variants[variant]
            scores = torch.randn(shape).to(dtype).requires_grad_()
            gradient, dropout = torch.randn(shape).to(dtype), arguments.get("dropout", 0.0)
            calls = {
                "eager": peers.rows(peers.eager(SCALE, mask, dropout=dropout), scores),
                "ours": peers.rows(megasoftmax.softmax, scores, scale=SCALE, **arguments),
            }
            for direction in ("forward", measure.BOTH):
                mode = torch.no_grad if direction == "forward" else nullcontext
                ready = {
                    name: measure.prepare(
                        lambda way=way: way, (direction,), lambda output, g=gradient: g, mode
                    )[0][direction]
                    for name, way in calls.items()
                }
                with mode():
                    times = measure.interleaved(
                        ready, run.turns, measure.host_milliseconds, warm_up=2
                    )
                name = f"{list(shape)} {case} {direction}"
                theirs, ours = times["eager"], times["ours"]
                row = {"case": name, "eager_ms": f"{theirs:.2f}", "reference_ms": f"{ours:.2f}"}
                write(row | {"ratio": f"{ours / theirs:.2f}"})


if __name__ == "__main__":
    typer.run(main)
