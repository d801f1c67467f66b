"""Attention and softmax with dropout 0.1 beside those without, and beside SDPA's flash-attention
and torch's softmax and dropout, on one GPU; writes results/dropout.csv.

bfloat16. forward+backward is one call and the gradients of query, key, value and, where there is
one, the bias; or of the scores. Of causal softmax, torch adds a mask of -inf first.
"""

from collections.abc import Callable
from pathlib import Path

import bench_ranges
import measure
import torch
import typer
from torch import Tensor

import megasoftmax

RESULTS = Path(__file__).parent / "results" / "dropout.csv"
# Batch, heads, tokens, head dimension, causal, a bias [1, heads, tokens, tokens].
CASES = [
    (8, 16, 1024, 64, True, False),
    (4, 16, 4096, 128, True, False),
    (4, 16, 4096, 64, False, False),
    (4, 16, 4096, 64, False, True),
]

# Batch, heads, queries and keys, causal.
SOFTMAX_CASES = [(8, 16, 1024, True), (8, 16, 1024, False), (4, 16, 4096, True)]


def torch_softmax(scores: Tensor, causal: Tensor | None, dropout: float) -> Tensor:
    p = (scores if causal is None else scores + causal).softmax(-1)
    return torch.nn.functional.dropout(p, dropout) if dropout else p


def softmax_ways(tokens: int, causal: bool) -> dict[str, Callable[..., Tensor]]:
    hidden = None
    if causal:
        lowest = torch.full((tokens, tokens), -torch.inf, device="cuda", dtype=torch.bfloat16)
        hidden = lowest.triu(1)
    ways: dict[str, Callable[..., Tensor]] = {}
    for dropout in (0.0, 0.1):
        options = {"causal": causal, "dropout": dropout, "fused": True}
        ways[f"megasoftmax|{dropout}"] = lambda x, options=options: megasoftmax.softmax(
            x, **options
        )
        ways[f"torch|{dropout}"] = lambda x, dropout=dropout: torch_softmax(x, hidden, dropout)
    return ways


def main(
    rounds: measure.Rounds = 10, out: measure.Out = RESULTS, commit: measure.Commit = ""
) -> None:
    """Time dropout."""
    torch.manual_seed(0)
    with measure.results(out, measure.provenance(commit)) as write_row:

        def write(
            name: str, leaves: tuple[Tensor, ...], ways: dict[str, Callable[..., Tensor]]
        ) -> None:
            for row in bench_ranges.time_ways(name, leaves, ways, rounds, compare=False):
                implementation, _, dropout = str(row["implementation"]).partition("|")
                row = {
                    "case": row["case"],
                    "pass": row["pass"],
                    "implementation": implementation,
                    "dropout": dropout,
                    "microseconds": row["microseconds"],
                }
                write_row(row)
                print(*row.values(), sep="  ")

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
            write(name, leaves, ways)
        for batch, heads, tokens, causal in SOFTMAX_CASES:
            shape = (batch, heads, tokens, tokens)
            scores = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
            name = f"softmax {'x'.join(map(str, shape))} {'causal' if causal else 'full'}"
            write(name, (scores,), softmax_ways(tokens, causal))


if __name__ == "__main__":
    typer.run(main)
