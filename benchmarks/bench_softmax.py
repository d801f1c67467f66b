"""Attention-shaped softmax beside its peers, on one GPU; writes benchmarks/results/softmax.csv.

A case is a shape, a variant (causal, masked, ...) and a pass. Its fewest bytes are what the pass
must read and write once; the copy is a device-to-device copy of a tensor of the same shape.
The variants of a case are timed in turn, round after round, with the L2 cache flushed before
each call; a figure is the median over the rounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import measure
import torch
import torch._functorch.config as functorch_config
import typer
from bench_rows import Softmax, installed
from measured import OURS
from rich.progress import track
from torch import Tensor

import megasoftmax
from megasoftmax.explain.common import Window, visible_entries, window_of
from megasoftmax.reference.softmax import excluded_by_window

RESULTS = Path(__file__).parent / "results" / "softmax.csv"
SCALE = 0.125

TABLE = [
    ([8, 32, 2048, 2048], ["causal", "masked", "scaled"]),
    ([4, 16, 1024, 1024], ["causal", "masked", "scaled"]),
    ([32, 16, 512, 512], ["causal", "masked", "scaled"]),
    ([2, 32, 4096, 4096], ["causal", "masked", "scaled"]),
    ([1, 16, 8192, 8192], ["causal", "masked", "scaled"]),
    ([1, 8, 16384, 16384], ["causal", "scaled"]),
    ([8, 32, 2047, 2047], ["causal", "masked", "scaled"]),
    ([4, 16, 1023, 1023], ["causal", "masked", "scaled"]),
    ([2, 32, 4096, 4097], ["causal", "masked", "scaled"]),
    ([1, 16, 8192, 8192], ["window"]),
    ([8, 32, 2048, 2048], ["sink", "causal+sink", "key mask", "head bias", "bias", "float32"]),
]


@dataclass
class Case:
    """Inputs of one benchmark case, and what the arguments of the softmax are for it."""

    shape: list[int]
    variant: str
    scores: Tensor
    arguments: dict = field(default_factory=dict)
    extra_bytes: int = 0  # of mask or bias, read once

    @classmethod
    def make(cls, shape: list[int], variant: str) -> "Case":
        batch, heads, queries, keys = shape
        dtype = torch.float32 if variant == "float32" else torch.bfloat16
        case = cls(shape, variant, torch.randn(shape, device="cuda", dtype=dtype))
        arguments = case.arguments
        if variant.startswith("causal"):
            arguments["causal"] = True
        if variant.endswith("sink"):
            arguments["sink"] = torch.randn(heads, device="cuda")
        if variant == "window":
            arguments |= {"window": (256, 0)}
        if variant == "masked":
            arguments["mask"] = torch.rand(batch, 1, queries, keys, device="cuda") < 0.25
        if variant == "key mask":
            arguments["mask"] = torch.rand(batch, 1, 1, keys, device="cuda") < 0.25
        if variant in ("bias", "head bias"):
            size = (1 if variant == "head bias" else batch, heads, queries, keys)
            arguments["bias"] = torch.randn(size, device="cuda", dtype=dtype)
        for name in ("mask", "bias"):
            if name in arguments:
                case.extra_bytes += arguments[name].numel() * arguments[name].element_size()
        return case

    def visible(self) -> float:
        """The share of scores that causality and window leave."""
        queries, keys = self.shape[-2:]
        return visible_entries(self.limits, queries, keys) / (queries * keys)

    @property
    def limits(self) -> Window:
        """The sides of causality and window."""
        return window_of(self.arguments.get("causal", False), self.arguments.get("window"))

    def excluded(self) -> Tensor | None:
        """What a peer without windows and causality needs as a mask."""
        if "mask" in self.arguments:
            return self.arguments["mask"]
        return excluded_by_window(*self.shape[-2:], False, *self.limits, self.scores.device)


def eager(case: Case, excluded: Tensor | None) -> Softmax:
    """What a model without fused kernels runs: scale, bias, masked_fill, softmax, cast."""
    bias, sink = case.arguments.get("bias"), case.arguments.get("sink")

    def softmax(scores: Tensor) -> Tensor:
        logits = scores * SCALE
        if bias is not None:
            logits = logits + bias
        if excluded is not None:
            logits = logits.masked_fill(excluded, torch.finfo(logits.dtype).min)
        if sink is None:
            return logits.softmax(-1, dtype=torch.float32).to(scores.dtype)
        column = sink.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        joined = torch.cat([logits, column], -1).softmax(-1, dtype=torch.float32)
        return joined[..., :-1].to(scores.dtype)

    return softmax


def implementations(case: Case) -> Iterator[tuple[str, Softmax]]:
    """Every softmax that takes the case: ours, eager torch, torch.compile, and installed ones."""
    yield (
        OURS,
        lambda scores: megasoftmax.softmax(scores, scale=SCALE, fused=True, **case.arguments),
    )
    plain = eager(case, case.excluded())
    yield "eager", plain
    torch._dynamo.reset()
    yield "torch.compile", torch.compile(plain, dynamic=False)
    if case.variant == "scaled":
        yield "torch.softmax", lambda scores: scores.softmax(-1)
        yield from installed().items()


def run_case(case: Case, rounds: int, peers: bool) -> Iterator[dict]:
    """The rows of one case: forward, backward and both through autograd, with the copy."""
    scores = case.scores
    gradient = torch.randn_like(scores)
    target = torch.empty_like(scores)
    size = scores.numel() * scores.element_size()
    share = case.visible()
    fewest = {
        "forward": round((1 + share) * size) + case.extra_bytes,
        "backward": round((1 + 2 * share) * size),
    }
    fewest["forward+backward"] = sum(fewest.values())

    timer = measure.gpu_timer()
    calls: dict[str, dict[str, measure.Function]] = {name: {} for name in fewest}
    for name, softmax in implementations(case):
        if not peers and name != OURS:
            continue
        leaf = scores.detach().requires_grad_()

        def both(softmax=softmax, leaf=leaf) -> None:
            leaf.grad = None
            softmax(leaf).backward(gradient)

        try:
            output = softmax(leaf)
            both()
        except Exception as error:  # a peer that refuses the case is a result too
            print(f"{name} refuses {case.shape} {case.variant}: {error!r}"[:200])
            continue
        calls["forward"][name] = lambda softmax=softmax: softmax(scores)
        calls["backward"][name] = lambda output=output, leaf=leaf: torch.autograd.grad(
            output, leaf, gradient, retain_graph=True
        )
        calls["forward+backward"][name] = both
    for direction, functions in calls.items():
        with torch.set_grad_enabled(direction != "forward"):
            copy = {"copy": lambda: target.copy_(scores)}
            times = measure.interleaved(copy | functions, rounds, timer)
        for columns in measure.beside_copy(times, 2 * size, fewest[direction]):
            yield {
                "shape": "x".join(map(str, case.shape)),
                "dtype": measure.dtype_name(scores.dtype),
                "variant": case.variant,
                "pass": direction,
                **columns,
            }


def main(
    rounds: measure.Rounds = 15,
    peers: Annotated[bool, typer.Option(help="Others than megasoftmax too.")] = True,
    out: measure.Out = RESULTS,
    only: Annotated[str, typer.Option(help='Cases whose "shape variant" has it.')] = "",
    commit: measure.Commit = "",
) -> None:
    """Runs the table."""
    functorch_config.donated_buffer = False  # one output is differentiated many times
    common = measure.provenance(commit)
    cases = [(shape, variant) for shape, variants in TABLE for variant in variants]
    cases = [case for case in cases if only in f"{'x'.join(map(str, case[0]))} {case[1]}"]
    with measure.results(out, common) as write:
        for shape, variant in track(cases, "softmax"):
            for row in run_case(Case.make(shape, variant), rounds, peers):
                write(row)
                if row["implementation"] == OURS:
                    print(*row.values())


if __name__ == "__main__":
    typer.run(main)
