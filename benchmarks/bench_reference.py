"""The reference path beside the eager code it replaces, on a CPU; writes results/reference_cpu.csv.

Eager is what models run without fused kernels: scale, masked_fill, softmax in float32, cast, drop.
"""

import platform
from pathlib import Path

import measure
import torch
import typer
from torch import Tensor

import megasoftmax

RESULTS = Path(__file__).parent / "results" / "reference_cpu.csv"
FIELDS = ["case", "eager_ms", "reference_ms", "ratio"]
SCALE = 0.125


def eager(scores: Tensor, mask: Tensor, dropout: float) -> Tensor:
    logits = (scores * SCALE).masked_fill(mask, torch.finfo(scores.dtype).min)
    probabilities = logits.softmax(-1, dtype=torch.float32).to(scores.dtype)
    return torch.nn.functional.dropout(probabilities, dropout) if dropout else probabilities


def main(rounds: measure.Rounds = 15, threads: int = 2, out: measure.Out = RESULTS) -> None:
    """Masked, causal and dropped, forward alone and with backward, float32 and bfloat16."""
    torch.set_num_threads(threads)
    shape = (4, 8, 512, 512)
    causal = torch.ones(shape[-2:], dtype=torch.bool).triu(1)
    masked = torch.rand(shape[0], 1, *shape[-2:]) < 0.25
    variants = {
        "masked": (masked, {"mask": masked}),
        "causal": (causal, {"causal": True}),
        "causal, dropout": (causal, {"causal": True, "dropout": 0.1}),
    }
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for variant, (mask, arguments) in variants.items():
            scores = torch.randn(shape).to(dtype).requires_grad_()
            gradient = torch.randn(shape).to(dtype)

            def ours(scores=scores, arguments=arguments) -> Tensor:
                return megasoftmax.softmax(scores, scale=SCALE, **arguments)

            def theirs(scores=scores, mask=mask, arguments=arguments) -> Tensor:
                return eager(scores, mask, arguments.get("dropout", 0.0))

            for direction in ("forward", "forward+backward"):
                with torch.set_grad_enabled(direction != "forward"):
                    functions: dict[str, measure.Function] = {"eager": theirs, "ours": ours}
                    if direction != "forward":
                        functions = {
                            name: lambda f=f, s=scores, g=gradient: torch.autograd.grad(f(), s, g)
                            for name, f in functions.items()
                        }
                    times = measure.interleaved(
                        functions, rounds, measure.host_milliseconds, warm_up=2
                    )
                name = f"{list(shape)} {measure.dtype_name(dtype)} {variant} {direction}"
                milliseconds = (f"{times['eager']:.2f}", f"{times['ours']:.2f}")
                rows.append((name, *milliseconds, f"{times['ours'] / times['eager']:.2f}"))
                print(*rows[-1])
    common = measure.provenance(device=f"{platform.machine()}, {threads} threads")
    with measure.results(out, common) as write:
        for row in rows:
            write(dict(zip(FIELDS, row, strict=True)))


if __name__ == "__main__":
    typer.run(main)
