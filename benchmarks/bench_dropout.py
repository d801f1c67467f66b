"""Attention with dropout 0.1 beside that without, and beside SDPA's flash-attention, on one GPU;
writes results/dropout.csv.

bfloat16. forward+backward is one call and the gradients of query, key, value and, where there is
one, the bias.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import bench_ranges
import measure
import torch
import typer
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "dropout.csv"
FIELDS = [
    *("gpu", "torch", "commit", "date", "case", "pass", "implementation", "dropout"),
    "microseconds",
]
# Batch, heads, tokens, head dimension, causal, a bias [1, heads, tokens, tokens].
CASES = [
    (8, 16, 1024, 64, True, False),
    (4, 16, 4096, 128, True, False),
    (4, 16, 4096, 64, False, False),
    (4, 16, 4096, 64, False, True),
]


def main(
    rounds: Annotated[int, typer.Option(help="How often each call is timed.")] = 10,
    out: Annotated[Path, typer.Option(help="The CSV to write.")] = RESULTS,
    commit: Annotated[str, typer.Option(help="Of a copy without git.")] = "",
) -> None:
    """Time dropout."""
    torch.manual_seed(0)
    common = measure.provenance(commit)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for batch, heads, tokens, dim, causal, has_bias in CASES:
            leaves: tuple[Tensor, ...] = bench_ranges.leaves_of(batch, heads, tokens, tokens, dim)
            options: dict[str, object] = {}
            if has_bias:
                bias = torch.randn(1, heads, tokens, tokens, device="cuda", dtype=torch.bfloat16)
                options["bias"] = bias.requires_grad_()
                leaves = (*leaves, bias)
            ways: dict[str, Callable[..., Tensor]] = {}
            for dropout in (0.0, 0.1):
                ours = bench_ranges.ours(causal=causal, dropout=dropout, **options)
                ways[f"megasoftmax|{dropout}"] = lambda q, k, v, *_, call=ours: call(q, k, v)
                if not has_bias:
                    flash = bench_ranges.flash(is_causal=causal, dropout_p=dropout)
                    ways[f"SDPA flash|{dropout}"] = flash
            name = f"{batch}x{heads}x{tokens}x{dim} {'causal' if causal else 'full'}"
            name += " bias [1,h] gradient" if has_bias else ""
            for row in bench_ranges.time_ways(name, leaves, ways, rounds, compare=False):
                implementation, _, dropout = str(row.pop("implementation")).partition("|")
                row |= {"implementation": implementation, "dropout": dropout}
                writer.writerow({**common, **row})
                print(*row.values(), sep="  ")


if __name__ == "__main__":
    typer.run(main)
