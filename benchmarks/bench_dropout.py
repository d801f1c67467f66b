"""Attention and softmax with dropout 0.1 beside those without, and beside SDPA's flash-attention
and torch's softmax and dropout, on one GPU; writes results/dropout.csv.

bfloat16. forward+backward is one call and the gradients of query, key, value and, where there is
one, the bias; or of the scores. Of causal softmax, torch adds a mask of -inf first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import measure
import peers
import torch
import typer
from measured import OURS
from torch import Tensor

import megasoftmax

RATES, FLASH = (0.0, 0.1), "SDPA flash"


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


def attention(case: Case) -> tuple[list[Tensor], dict[str, Callable[..., Tensor]]]:
    """Leaves, and what takes a rate and them, by implementation; on the default device."""
    tensors = peers.projected(case.heads, case.head_dim, [case.tokens] * 3, case.batch)

    def ours(rate: float, *tensors: Tensor, **options: Any) -> Tensor:
        return peers.ours(dropout=rate, causal=case.causal, **options)(*tensors)

    def flash(rate: float, *tensors: Tensor) -> Tensor:
        backend = peers.BACKENDS[FLASH]
        return peers.sdpa(backend, is_causal=case.causal, dropout_p=rate)(*tensors)

    if not case.bias:
        return tensors, {OURS: ours, FLASH: flash}
    bias = torch.randn(1, case.heads, case.tokens, case.tokens, dtype=torch.bfloat16)
    leaves = [*tensors, bias.requires_grad_()]
    return leaves, {OURS: lambda rate, q, k, v, bias: ours(rate, q, k, v, bias=bias)}


def softmax(case: Case) -> tuple[list[Tensor], dict[str, Callable[..., Tensor]]]:
    """As `attention`, of scores."""
    tokens = case.tokens
    scores = torch.randn(case.batch, case.heads, tokens, tokens, dtype=torch.bfloat16)
    lowest = torch.full((tokens, tokens), -torch.inf, dtype=torch.bfloat16) if case.causal else None
    hidden = None if lowest is None else lowest.triu(1)
    options = {"causal": case.causal, "fused": scores.is_cuda or None}

    def torchs(rate: float, scores: Tensor) -> Tensor:
        p = (scores if hidden is None else scores + hidden).softmax(-1)
        return torch.nn.functional.dropout(p, rate) if rate else p

    def ours(rate: float, scores: Tensor) -> Tensor:
        return megasoftmax.softmax(scores, dropout=rate, **options)

    return [scores.requires_grad_()], {OURS: ours, "torch": torchs}


def rows_of(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    with run.on_device():
        leaves, functions = attention(case) if case.head_dim else softmax(case)
    ways = {
        f"{name}|{rate}": partial(measure.Way, partial(function, rate, *leaves), leaves)
        for rate in RATES
        for name, function in functions.items()
    }

    def figures(direction: str, name: str, times: measure.Times) -> measure.Row:
        implementation, rate = name.split("|")
        microseconds = round(times[name], 1)
        return {"implementation": implementation, "dropout": rate, "microseconds": microseconds}

    return run.rows(ways, ("forward", measure.BOTH), figures)


main = measure.command("dropout.csv", CASES, rows_of, rounds=10)

if __name__ == "__main__":
    typer.run(main)
