"""Attention-shaped softmax beside its peers, on one GPU; writes benchmarks/results/softmax.csv.

A case is a shape, a variant (causal, masked, ...) and a pass. Its fewest bytes are what the pass
must read and write once; the copy is a device-to-device copy of a tensor of the same shape.
The variants of a case are timed in turn, round after round, with the L2 cache flushed before
each call; a figure is the median over the rounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import measure
import peers
import torch
import torch._functorch.config as functorch_config
import typer
from measured import OURS
from torch import Tensor

import megasoftmax
from megasoftmax.explain.common import Window, visible_entries, window_of
from megasoftmax.reference.softmax import excluded_by_window

SCALE = 0.125
USUAL = ("causal", "masked", "scaled")
TABLE = [
    *((shape, USUAL) for shape in ((8, 32, 2048, 2048), (4, 16, 1024, 1024), (32, 16, 512, 512))),
    *((shape, USUAL) for shape in ((2, 32, 4096, 4096), (1, 16, 8192, 8192))),
    ((1, 8, 16384, 16384), ("causal", "scaled")),
    *((shape, USUAL) for shape in ((8, 32, 2047, 2047), (4, 16, 1023, 1023), (2, 32, 4096, 4097))),
    ((1, 16, 8192, 8192), ("window",)),
    ((8, 32, 2048, 2048), ("sink", "causal+sink", "key mask", "head bias", "bias", "float32")),
    *(
        (shape, ("softcap", "causal+softcap"))
        for shape in ((8, 32, 2048, 2048), (1, 16, 8192, 8192))
    ),
    *((shape, ("scaled", "softcap")) for shape in ((1, 1, 64, 128256), (1, 1, 4096, 128256))),
]


@dataclass(frozen=True)
class Case(measure.Case):
    shape: tuple[int, ...]
    variant: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.variant == "float32" else torch.bfloat16

    def arguments(self) -> dict[str, Any]:
        """Those of the softmax, on the default device."""
        batch, heads, queries, keys = self.shape
        variant, found = self.variant, {}
        if variant.startswith("causal"):
            found["causal"] = True
        if variant.endswith("sink"):
            found["sink"] = torch.randn(heads)
        if variant.endswith("softcap"):
            found["softcap"] = 50.0
        if variant == "window":
            found["window"] = (256, 0)
        if variant in ("masked", "key mask"):
            rows = queries if variant == "masked" else 1
            found["mask"] = torch.rand(batch, 1, rows, keys) < 0.25
        if variant in ("bias", "head bias"):
            examples = 1 if variant == "head bias" else batch
            found["bias"] = torch.randn(examples, heads, queries, keys, dtype=self.dtype)
        return found

    def described(self) -> measure.Row:
        shape, dtype = "x".join(map(str, self.shape)), measure.dtype_name(self.dtype)
        return {"shape": shape, "dtype": dtype, "variant": self.variant}

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.variant}"


CASES = [Case(shape, variant) for shape, variants in TABLE for variant in variants]


def implementations(
    case: Case, scores: Tensor, arguments: dict[str, Any], limits: Window
) -> dict[str, measure.Build]:
    """Every softmax that takes the case: ours, eager torch, torch.compile, and installed ones."""
    excluded = excluded_by_window(*case.shape[-2:], False, *limits, scores.device)
    of_eager = {name: arguments.get(name) for name in ("bias", "sink", "softcap")}
    plain = peers.eager(SCALE, arguments.get("mask", excluded), **of_eager)
    options = arguments | {"scale": SCALE, "fused": scores.is_cuda or None}
    ways: dict[str, measure.Build] = {
        OURS: lambda: peers.rows(megasoftmax.softmax, scores, **options),
        "eager": lambda: peers.rows(plain, scores),
        "torch.compile": lambda: peers.rows(peers.compiled(plain), scores),
    }
    if case.variant == "scaled":
        ways["torch.softmax"] = lambda: peers.rows(torch.softmax, scores, -1)
        ways["liger"] = lambda: peers.rows(peers.liger(), scores)
        ways["quack"] = lambda: peers.rows(peers.quack(), scores)
    return peers.only_there(ways)


def rows_of(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    functorch_config.donated_buffer = False  # one output is differentiated many times
    with run.on_device():
        scores = torch.randn(case.shape, dtype=case.dtype).requires_grad_()
        arguments = case.arguments()
    limits = window_of(arguments.get("causal", False), arguments.get("window"))
    queries, keys = case.shape[-2:]
    share = visible_entries(limits, queries, keys) / (queries * keys)
    read_once = sum(arguments[name].nbytes for name in ("mask", "bias") if name in arguments)
    fewest = {"forward": round((1 + share) * scores.nbytes) + read_once}
    fewest["backward"] = round((1 + 2 * share) * scores.nbytes)
    fewest[measure.BOTH] = sum(fewest.values())
    ways = implementations(case, scores, arguments, limits)
    gradient = torch.randn_like(scores)
    return run.beside_copy(ways, scores, fewest, gradient=lambda output: gradient)


main = measure.command("softmax.csv", CASES, rows_of, rounds=15)

if __name__ == "__main__":
    typer.run(main)
