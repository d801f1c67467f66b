"""Biases that rows share, in the shapes of those who train them, on one GPU, beside SDPA,
FlexAttention, and cuEquivariance and trifast where they are installed; writes results/bias.csv.

Rows of pairs, samples of a pair representation, windows of images, and T5. bfloat16; a bias
[1, heads, n, n]; in some cases a tenth of the keys of each row is masked. forward+backward is one
call and the gradients of query, key, value and bias. "deterministic" is under
torch.use_deterministic_algorithms, where torch fills each new tensor; "unfilled" is the same with
torch.utils.deterministic.fill_uninitialized_memory = False. `error` is that of the gradient of the
bias, relative to the norm of the gradient in float32.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import measure
import peers
import torch
import typer
from measured import OURS
from torch import Tensor
from torch.nn.functional import pad

import megasoftmax

FIELDS = ["case", "pass", "implementation", "microseconds", "error", "note"]
MEM_EFFICIENT = "SDPA mem-efficient"


@dataclass(frozen=True)
class Case(measure.Case):
    name: str
    rows: int
    heads: int
    length: int
    dim: int
    has_mask: bool = False

    def __str__(self) -> str:
        return self.name


CASES = [
    *(Case(f"triangle-{n}", n, 4, n, 32, True) for n in (256, 384, 512, 768)),
    Case("triangle-384-d16", 384, 4, 384, 16, True),
    Case("pair-384", 48, 16, 384, 24),
    Case("pair-768", 48, 16, 768, 48),
    Case("trunk-768", 1, 16, 768, 24, True),
    Case("swin-49", 4096, 4, 49, 32),
    Case("swin-64", 4096, 4, 64, 32),
    Case("swin-144", 1024, 8, 144, 32),
    Case("beit-197", 128, 12, 197, 64),
    Case("t5-1024", 8, 16, 1024, 64),
    Case("t5-512", 32, 12, 512, 64, True),
]


class Inputs:
    """Of a case, as a projection lays them out, on the default device."""

    def __init__(self, case: Case) -> None:
        lengths = [case.length] * 4
        *tensors, gradient = peers.projected(case.heads, case.dim, lengths, case.rows)
        self.tensors, self.gradient = tensors, gradient.detach()
        bias = torch.randn(1, case.heads, case.length, case.length, dtype=torch.bfloat16)
        self.bias = bias.requires_grad_()
        self.mask = torch.rand(case.rows, 1, 1, case.length) < 0.1 if case.has_mask else None

    def bias_gradient(self) -> Tensor:
        """In float32, some rows at a time."""
        total = torch.zeros_like(self.bias, dtype=torch.float64)
        bias = self.bias.detach().float().requires_grad_()
        step = max(1, (1 << 28) // bias.numel())
        for begin in range(0, len(self.gradient), step):
            part = slice(begin, begin + step)
            tensors = (each[part].detach().float() for each in self.tensors)
            mask = None if self.mask is None else self.mask[part]
            output = megasoftmax.attention(*tensors, bias=bias, mask=mask, fused=False)
            (found,) = torch.autograd.grad(output, bias, self.gradient[part].float())
            total += found
        return total

    def padded_bias(self) -> Tensor:
        """Of all rows, with the mask; its rows begin at multiples of 16 bytes."""
        length = self.bias.shape[-1]
        bias = pad(self.bias, (0, -length % 8))[..., :length].expand(len(self.gradient), -1, -1, -1)
        return bias if self.mask is None else bias.masked_fill(self.mask, -torch.inf)


@contextmanager
def deterministic(fill: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def implementations(inputs: Inputs) -> dict[str, measure.Build]:
    bias, mask = inputs.bias, inputs.mask
    keys = None if mask is None else mask[:, 0, 0]

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score + bias[0, h, i, j]
        return score if keys is None else torch.where(keys[b, j], -torch.inf, score)

    def way(attend: peers.Attend, leaves: tuple[Tensor, ...] = (bias,), **rest) -> measure.Way:
        return measure.Way(lambda: attend(*inputs.tensors), (*inputs.tensors, *leaves), **rest)

    def ours(fill: bool | None = None) -> measure.Way:
        during = None if fill is None else functools.partial(deterministic, fill)
        return way(peers.ours(bias=bias, mask=mask), during=during)

    backend = peers.BACKENDS[MEM_EFFICIENT]
    is_square = len(inputs.gradient) == bias.shape[-1]
    of_rows = {peers.TRIFAST: lambda: way(peers.trifast(bias, mask))} if is_square else {}
    ways: dict[str, measure.Build] = {
        OURS: ours,
        f"{OURS} deterministic": lambda: ours(fill=True),
        f"{OURS} deterministic, unfilled": lambda: ours(fill=False),
        f"{OURS} without bias": lambda: way(peers.ours(mask=mask), ()),
        MEM_EFFICIENT: lambda: way(peers.sdpa(backend, inputs.padded_bias)),
        peers.FLEX: lambda: way(peers.flex(score_mod=modify)),
        peers.CUEQUIVARIANCE: lambda: way(peers.cuequivariance(bias, mask)),
        **of_rows,
    }
    return peers.only_there(ways)


def rows_of(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    with run.on_device():
        inputs = Inputs(case)
    expected, errors = inputs.bias_gradient(), {}

    def look(name: str, output: Tensor, calls: measure.Calls) -> None:
        gradients = calls[measure.BOTH]() if measure.BOTH in calls else ()
        if len(gradients) == 4:
            distance = (gradients[3].double() - expected).norm() / expected.norm()
            errors[name] = f"{distance.item():.1e}"

    def figures(direction: str, name: str, times: measure.Times) -> measure.Row:
        error = errors.get(name, "") if direction == measure.BOTH else ""
        return {"microseconds": round(times[name], 1), "error": error}

    return run.rows(
        implementations(inputs),
        ("forward", measure.BOTH),
        figures,
        gradient=lambda output: inputs.gradient,
        head_start=measure.LONG_START,
        look=look,
        noted=True,
    )


main = measure.command("bias.csv", CASES, rows_of, FIELDS, rounds=10)

if __name__ == "__main__":
    typer.run(main)
