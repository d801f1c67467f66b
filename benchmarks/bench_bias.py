"""Biases that rows share, in the shapes of those who train them, on one GPU, beside SDPA,
FlexAttention, and cuEquivariance and trifast where they are installed; writes results/bias.csv.

Rows of pairs, samples of a pair representation, windows of images, T5, and speech, of lengths that
are multiples of 8 and others. bfloat16; a bias [1, heads, n, n]. Conformers have one for each
example, or a relative shift: a view of [rows, heads, n, 2n - 1] whose rows lie 2n - 2 entries
apart. ALiBi has one [1, heads, 1, n]. In some cases a tenth of the keys of each row is masked.
forward+backward is one
call and the gradients of query, key, value and bias. "deterministic" is under
torch.use_deterministic_algorithms, where torch fills each new tensor; "unfilled" is the same with
torch.utils.deterministic.fill_uninitialized_memory = False. `error` is that of the gradient of the
bias, relative to the norm of the gradient in float32.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import measure
import peers
import torch
import typer
from measured import DETERMINISTIC_UNFILLED, OURS
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
    kind: str = "shared"  # the bias: "shared", "own" of each row, "shift" or "keys"


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
    *(Case(f"conformer-{n}", 16, 8, n, 64, kind="own") for n in (375, 376, 750, 752, 1500, 1504)),
    *(Case(f"conformer-{n}-d128", 16, 8, n, 128, kind="own") for n in (750, 752)),
    Case("shift-750", 16, 8, 750, 64, kind="shift"),
    Case("alibi-key-4096", 4, 16, 4096, 64, kind="keys"),
]


class Inputs:
    """Of a case, as a projection lays them out, on the default device."""

    def __init__(self, case: Case) -> None:
        lengths = [case.length] * 4
        *tensors, gradient = peers.projected(case.heads, case.dim, lengths, case.rows)
        self.tensors, self.gradient = tensors, gradient.detach()
        rows, columns = case.length, case.length
        if case.kind == "shift":
            columns = 2 * case.length - 1
        if case.kind == "keys":
            rows = 1
        batch = case.rows if case.kind in ("own", "shift") else 1
        entries = torch.randn(batch, case.heads, rows, columns, dtype=torch.bfloat16)
        self.kind, self.entries = case.kind, entries.requires_grad_()
        self.mask = torch.rand(case.rows, 1, 1, case.length) < 0.1 if case.has_mask else None

    def bias(self, entries: Tensor | None = None) -> Tensor | megasoftmax.ShiftedBias:
        """What is added to the scores, from the tensor that learns."""
        entries = self.entries if entries is None else entries
        return megasoftmax.ShiftedBias(entries) if self.kind == "shift" else entries

    def bias_gradient(self) -> Tensor:
        """In float32, some rows at a time."""
        total = torch.zeros_like(self.entries, dtype=torch.float64)
        is_shared = len(self.entries) == 1
        of_row = self.entries[0].numel() if is_shared else 8 * self.entries[0].numel()
        step = max(1, (1 << 28) // of_row)
        for begin in range(0, len(self.gradient), step):
            part = slice(begin, begin + step)
            entries = self.entries if is_shared else self.entries[part]
            entries = entries.detach().float().contiguous().requires_grad_()
            tensors = (each[part].detach().float() for each in self.tensors)
            mask = None if self.mask is None else self.mask[part]
            bias = self.bias(entries)
            output = megasoftmax.attention(*tensors, bias=bias, mask=mask, fused=False)
            (found,) = torch.autograd.grad(output, entries, self.gradient[part].float())
            total[slice(None) if is_shared else part] += found
        return total

    def padded_bias(self) -> Tensor:
        """Of all rows, with the mask; its rows begin at multiples of 16 bytes."""
        length = self.gradient.shape[2]
        bias = self.bias()
        if isinstance(bias, megasoftmax.ShiftedBias):
            bias = bias.dense(length, length)
        bias = pad(bias, (0, -length % 8))[..., :length]
        bias = bias.expand(len(self.gradient), -1, length, -1)
        return bias if self.mask is None else bias.masked_fill(self.mask, -torch.inf)


def implementations(inputs: Inputs) -> dict[str, measure.Build]:
    bias, mask = inputs.entries, inputs.mask
    keys = None if mask is None else mask[:, 0, 0]

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score + bias[0 if len(bias) == 1 else b, h, i, j]
        return score if keys is None else torch.where(keys[b, j], -torch.inf, score)

    def way(attend: peers.Attend, leaves: tuple[Tensor, ...] = (bias,), **rest) -> measure.Way:
        return measure.Way(lambda: attend(*inputs.tensors), (*inputs.tensors, *leaves), **rest)

    def ours(fill: bool | None = None) -> measure.Way:
        during = None if fill is None else functools.partial(measure.deterministic, fill)

        def attend(*tensors: Tensor) -> Tensor:
            return peers.ours(bias=inputs.bias(), mask=mask)(*tensors)

        return way(attend, during=during)

    backend = peers.BACKENDS[MEM_EFFICIENT]
    if inputs.kind in ("shift", "keys"):
        of_others: dict[str, measure.Build] = {}
    else:
        of_others = {peers.FLEX: lambda: way(peers.flex(score_mod=modify))}
    if inputs.kind == "shared":
        of_others[peers.CUEQUIVARIANCE] = lambda: way(peers.cuequivariance(bias, mask))
        if len(inputs.gradient) == bias.shape[-1]:
            of_others[peers.TRIFAST] = lambda: way(peers.trifast(bias, mask))
    ways: dict[str, measure.Build] = {
        OURS: ours,
        f"{OURS} deterministic": lambda: ours(fill=True),
        DETERMINISTIC_UNFILLED: lambda: ours(fill=False),
        f"{OURS} without bias": lambda: way(peers.ours(mask=mask), ()),
        MEM_EFFICIENT: lambda: way(peers.sdpa(backend, inputs.padded_bias)),
        **of_others,
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
