"""Biases that rows share, in the shapes of those who train them, on one GPU, beside SDPA and
FlexAttention; writes results/bias.csv.

Rows of pairs, samples of a pair representation, windows of images, and T5. bfloat16; a bias
[1, heads, n, n]; in some cases a tenth of the keys of each row is masked. forward+backward is one
call and the gradients of query, key, value and bias. "deterministic" is under
torch.use_deterministic_algorithms, where torch fills each new tensor; "unfilled" is the same with
torch.utils.deterministic.fill_uninitialized_memory = False. `error` is that of the gradient of the
bias, relative to the norm of the gradient in float32.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import measure
import torch
import typer
from measured import OURS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

import megasoftmax

RESULTS = Path(__file__).parent / "results" / "bias.csv"
FIELDS = ["case", "pass", "implementation", "microseconds", "error", "note"]
DETERMINISTIC, UNFILLED = f"{OURS} deterministic", f"{OURS} deterministic, unfilled"
WITHOUT_BIAS = f"{OURS} without bias"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Case:
    rows: int
    heads: int
    length: int
    dim: int
    has_mask: bool = False


CASES = {
    **{f"triangle-{n}": Case(n, 4, n, 32, True) for n in (256, 384, 512, 768)},
    "triangle-384-d16": Case(384, 4, 384, 16, True),
    "pair-384": Case(48, 16, 384, 24),
    "pair-768": Case(48, 16, 768, 48),
    "trunk-768": Case(1, 16, 768, 24, True),
    "swin-49": Case(4096, 4, 49, 32),
    "swin-64": Case(4096, 4, 64, 32),
    "swin-144": Case(1024, 8, 144, 32),
    "beit-197": Case(128, 12, 197, 64),
    "t5-1024": Case(8, 16, 1024, 64),
    "t5-512": Case(32, 12, 512, 64, True),
}


class Inputs:
    """Of a case, as a projection lays them out."""

    def __init__(self, case: Case) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        shape = (case.rows, case.length, case.heads, case.dim)
        self.query, self.key, self.value = (
            normal(*shape).transpose(1, 2).requires_grad_() for _ in range(3)
        )
        self.gradient = normal(*shape).transpose(1, 2)
        self.bias = normal(1, case.heads, case.length, case.length).requires_grad_()
        self.mask = None
        if case.has_mask:
            self.mask = torch.rand(case.rows, 1, 1, case.length, device="cuda") < 0.1

    @property
    def leaves(self) -> list[Tensor]:
        return [self.query, self.key, self.value, self.bias]

    def bias_gradient(self) -> Tensor:
        """In float32, some rows at a time."""
        total = torch.zeros_like(self.bias, dtype=torch.float64)
        bias = self.bias.detach().float()
        step = max(1, (1 << 28) // bias.numel())
        for begin in range(0, len(self.query), step):
            query, key, value, gradient = (
                each[begin : begin + step].detach().float()
                for each in (self.query, self.key, self.value, self.gradient)
            )
            scores = query @ key.mT * query.shape[-1] ** -0.5 + bias
            if self.mask is not None:
                scores.masked_fill_(self.mask[begin : begin + step], -torch.inf)
            weights = scores.softmax(-1)
            of_weights = gradient @ value.mT
            of_weights -= (of_weights * weights).sum(-1, keepdim=True)
            total += (of_weights * weights).sum(0, keepdim=True, dtype=torch.float64)
        return total


def in_mode(implementation: str, function: Callable[[], Result]) -> Callable[[], Result]:
    """The function in the mode of torch that the implementation names."""
    if implementation not in (DETERMINISTIC, UNFILLED):
        return function

    def run() -> Result:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = implementation == DETERMINISTIC
        try:
            return function()
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = True

    return run


def ours(inputs: Inputs, bias: Tensor | None) -> Tensor:
    return megasoftmax.attention(
        inputs.query, inputs.key, inputs.value, bias=bias, mask=inputs.mask, fused=True
    )


def mem_efficient(inputs: Inputs) -> Tensor:
    """Its rows begin at multiples of 16 bytes."""
    length = inputs.bias.shape[-1]
    bias = pad(inputs.bias, (0, -length % 8))[..., :length]
    bias = bias.expand(len(inputs.query), -1, -1, -1)
    if inputs.mask is not None:
        bias = bias.masked_fill(inputs.mask, -torch.inf)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, attn_mask=bias)


def flex(inputs: Inputs) -> Callable[[], Tensor]:
    torch._dynamo.reset()  # cases before count towards its limit of recompilations
    compiled = torch.compile(flex_attention, dynamic=False)
    bias, mask = inputs.bias[0], inputs.mask
    keys = None if mask is None else mask[:, 0, 0]

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score + bias[h, i, j]
        return score if keys is None else torch.where(keys[b, j], -torch.inf, score)

    return lambda: compiled(inputs.query, inputs.key, inputs.value, score_mod=modify)


def implementations(inputs: Inputs, with_flex: bool) -> dict[str, Callable[[], Tensor]]:
    with_bias = functools.partial(ours, inputs, inputs.bias)
    found: dict[str, Callable[[], Tensor]] = {
        OURS: with_bias,
        DETERMINISTIC: with_bias,
        UNFILLED: with_bias,
        WITHOUT_BIAS: functools.partial(ours, inputs, None),
        "SDPA mem-efficient": functools.partial(mem_efficient, inputs),
    }
    return {**found, "FlexAttention": flex(inputs)} if with_flex else found


def time_case(name: str, rounds: int, with_flex: bool) -> Iterator[dict[str, object]]:
    torch.manual_seed(0)
    inputs = Inputs(CASES[name])
    expected = inputs.bias_gradient()
    passes: dict[str, measure.Function] = {}
    errors: dict[str, str] = {}
    for implementation, call in implementations(inputs, with_flex).items():
        leaves = inputs.leaves[: 3 if implementation == WITHOUT_BIAS else 4]

        def both(call: Callable[[], Tensor] = call, leaves: list[Tensor] = leaves) -> list[Tensor]:
            return list(torch.autograd.grad(call(), leaves, inputs.gradient))

        run = in_mode(implementation, both)
        try:
            gradients = run()
        except Exception as error:  # of any peer: a refusal
            row = {"case": name, "pass": "forward+backward", "implementation": implementation}
            yield {**dict.fromkeys(FIELDS, ""), **row, "note": str(error).splitlines()[0][:100]}
            continue
        if len(gradients) == 4:
            distance = (gradients[3].double() - expected).norm() / expected.norm()
            errors[implementation] = f"{distance.item():.1e}"
        del gradients
        passes[f"forward|{implementation}"] = in_mode(implementation, call)
        passes[f"forward+backward|{implementation}"] = run
    timer = measure.gpu_timer(4 * measure.HEAD_START)  # autograd's host takes longer than one
    times = measure.interleaved(passes, rounds, timer, warm_up=2)
    for key, microseconds in times.items():
        which, _, implementation = key.partition("|")
        yield {
            "case": name,
            "pass": which,
            "implementation": implementation,
            "microseconds": round(microseconds, 1),
            "error": errors.get(implementation, "") if which != "forward" else "",
            "note": "",
        }


def main(
    rounds: measure.Rounds = 10,
    only: Annotated[str, typer.Option(help="Names of cases, with commas.")] = "",
    flex: Annotated[str, typer.Option(help="Those with FlexAttention; all by default.")] = "",
    out: measure.Out = RESULTS,
    commit: measure.Commit = "",
) -> None:
    """Time biases that rows share."""
    with measure.results(out, measure.provenance(commit), FIELDS) as write:
        for name in only.split(",") if only else CASES:
            for row in time_case(name, rounds, not flex or name in flex.split(",")):
                write(row)
                print(*(f"{row[field]!s:<28}" for field in FIELDS), flush=True)
            measure.release()


if __name__ == "__main__":
    typer.run(main)
