"""Attention and softmax with dropout 0.1 beside those without, and beside SDPA's flash-attention
and torch's softmax and dropout, on one GPU; writes results/dropout.csv.

bfloat16. forward+backward is one call and the gradients of query, key, value and, where there is
one, the bias; or of the scores. Of causal softmax, torch adds a mask of -inf first.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import measure
import peers
import torch
import typer
from measured import OURS
from torch import Tensor

import megasoftmax

RATES = (0.0, 0.1)


@dataclass(frozen=True)
class Case(measure.Case):
    """Attention of a head dimension; or, without one, softmax of tokens x tokens."""

    batch: int
    heads: int
    tokens: int
    head_dim: int | None
    causal: bool
    bias: bool = False  # [1, heads, tokens, tokens]

    def __str__(self) -> str:
        kind, last = ("", self.head_dim) if self.head_dim else ("softmax ", self.tokens)
        masking = "causal" if self.causal else "full"
        name = f"{kind}{self.batch}x{self.heads}x{self.tokens}x{last} {masking}"
        return f"{name} bias [1,h] gradient" if self.bias else name


CASES = [
    Case(8, 16, 1024, 64, True),
    Case(4, 16, 4096, 128, True),
    Case(4, 16, 4096, 64, False),
    Case(4, 16, 4096, 64, False, True),
    Case(8, 16, 1024, None, True),
    Case(8, 16, 1024, None, False),
    Case(4, 16, 4096, None, True),
]


def attention(case: Case) -> dict[str, measure.Build]:
    """Ways by "implementation|rate", on the default device."""
    tensors = peers.projected(case.heads, case.head_dim, [case.tokens] * 3, case.batch)
    leaves, options = tensors, {"causal": case.causal}
    if case.bias:
        bias = torch.randn(1, case.heads, case.tokens, case.tokens, dtype=torch.bfloat16)
        options["bias"] = bias.requires_grad_()
        leaves = [*tensors, bias]
    ways: dict[str, measure.Build] = {}
    for rate in RATES:
        calls = {OURS: peers.ours(dropout=rate, **options)}
        if not case.bias:
            backend = peers.BACKENDS["SDPA flash"]
            calls["SDPA flash"] = peers.sdpa(backend, is_causal=case.causal, dropout_p=rate)
        for name, attend in calls.items():
            way = measure.Way(lambda attend=attend: attend(*tensors), leaves)
            ways[f"{name}|{rate}"] = lambda way=way: way
    return ways


def softmax(case: Case) -> dict[str, measure.Build]:
    tokens = case.tokens
    scores = torch.randn(case.batch, case.heads, tokens, tokens, dtype=torch.bfloat16)
    scores.requires_grad_()
    lowest = torch.full((tokens, tokens), -torch.inf, dtype=torch.bfloat16) if case.causal else None
    hidden = None if lowest is None else lowest.triu(1)
    options = {"causal": case.causal, "fused": scores.is_cuda or None}

    def torchs(scores: Tensor, rate: float) -> Tensor:
        p = (scores if hidden is None else scores + hidden).softmax(-1)
        return torch.nn.functional.dropout(p, rate) if rate else p

    def ours(scores: Tensor, rate: float) -> Tensor:
        return megasoftmax.softmax(scores, dropout=rate, **options)

    return {
        f"{name}|{rate}": lambda function=function, rate=rate: peers.rows(function, scores, rate)
        for rate in RATES
        for name, function in ((OURS, ours), ("torch", torchs))
    }


@measure.benchmark("dropout.csv", rounds=10)
def main(run: measure.Run) -> None:
    """Times dropout."""

    def rows_of(case: Case) -> Iterator[measure.Row]:
        with run.on_device():
            ways = attention(case) if case.head_dim else softmax(case)
        for direction, _, times in run.time_ways(ways, ("forward", measure.BOTH)):
            for row in measure.rows_of_times(direction, times):
                name, _, rate = row["implementation"].partition("|")
                microseconds = row.pop("microseconds")
                yield row | {"implementation": name, "dropout": rate, "microseconds": microseconds}

    run.cases(CASES, rows_of)


if __name__ == "__main__":
    typer.run(main)
