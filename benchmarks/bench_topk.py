"""softmax_topk and sample beside their peers, on one GPU; writes results/topk.csv.

A case is logits [rows, columns], a k and what they hold. Where `data` is one of CALLS_OF, they are
normal, and the call is another: "limits" has a scale of each row, top_k and top_p, "router" has
sigmoids and a selection bias, "softcap" one of 30, and "sample" draws with top_k and top_p.
Forward, the fewest bytes are those of one read of the logits and one write of probabilities, int64
indices and three statistics per row; backward, of one read of the logits and one write of their
gradient. The copy, of a tensor of the size of the logits, is timed in the same rounds.

`timing` says how: "call" is a call from Python with the L2 cache flushed before it. Cases below
32 MiB have a further line, "graph": a CUDA graph of 20 calls, of which each counts for a twentieth.
What the host needs for a launch is not in it, and the logits may stay in the L2 cache.
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

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
STATISTICS = 3 * 4  # bytes of a row
TOP_P = 0.9
CALLS_OF = ("limits", "router", "sample", "softcap")
VOCABULARIES = range(10_000, 1_000_000)  # columns, for which FlashInfer is made


@dataclass(frozen=True)
class Case(measure.Case):
    written = ("rows", "columns", "dtype", "k", "data")

    rows: int
    columns: int
    dtype: torch.dtype
    k: int
    data: str = "normal"
    compiled: bool = False  # beside torch.compile, which costs seconds
    backward: bool = False

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def fewest(self) -> dict[str, int]:
        """By pass."""
        result = self.rows * (self.k * (self.dtype.itemsize + 8) + STATISTICS)
        forward = {"forward": self.bytes + result}
        return forward | ({"backward": 2 * self.bytes} if self.backward else {})

    def logits(self) -> Tensor:
        """On the default device."""
        logits = torch.empty(self.rows, self.columns, dtype=self.dtype)
        if self.data == "normal" or self.data in CALLS_OF:
            return logits.normal_()
        if self.data == "constant":
            return logits.fill_(1)
        rising = torch.linspace(-4, 4, self.columns).to(self.dtype)
        return logits.copy_(rising if self.data == "sorted" else rising.flip(0))

    def __str__(self) -> str:
        dtype = measure.dtype_name(self.dtype)
        return f"{self.rows}x{self.columns} {dtype} k={self.k} {self.data}"


CASES = [
    Case(8192, 50257, FLOAT, 10, compiled=True, backward=True),
    Case(8192, 50257, BFLOAT, 10, compiled=True, backward=True),
    Case(8192, 50257, BFLOAT, 64),
    Case(8192, 50257, BFLOAT, 256),
    Case(8192, 128256, BFLOAT, 10, compiled=True),
    Case(8192, 128256, BFLOAT, 64),
    Case(2048, 151936, BFLOAT, 20),
    Case(64, 128256, BFLOAT, 32, compiled=True),
    Case(16, 128256, BFLOAT, 50),
    Case(1, 151936, FLOAT, 10, compiled=True),
    Case(1, 201088, BFLOAT, 50),
    Case(1, 8388608, HALF, 10),
    Case(4, 33554432, HALF, 10),
    Case(65536, 4096, BFLOAT, 8, backward=True),
    Case(262144, 1024, BFLOAT, 8),
    Case(262144, 256, BFLOAT, 8, compiled=True),
    Case(262144, 256, FLOAT, 8),
    Case(2**20, 128, BFLOAT, 8),
    Case(2**20, 64, BFLOAT, 6, compiled=True, backward=True),
    Case(2**20, 64, FLOAT, 6),
    Case(2**20, 8, BFLOAT, 2, compiled=True),
    Case(4096, 64, BFLOAT, 6),
    Case(64, 128256, BFLOAT, 50),
    Case(64, 128256, BFLOAT, 50, data="limits"),
    Case(64, 128256, BFLOAT, 50, data="softcap"),
    Case(8192, 50257, BFLOAT, 10, data="softcap", backward=True),
    Case(64, 128256, BFLOAT, 50, data="sample"),
    Case(1, 151936, BFLOAT, 50, data="sample"),
    Case(256, 151936, FLOAT, 50, data="sample"),
    Case(2**20, 256, BFLOAT, 8),
    Case(2**20, 256, BFLOAT, 8, data="router", backward=True),
    Case(2**20, 256, FLOAT, 8, data="router"),
    Case(262144, 64, BFLOAT, 6, data="router"),
    *(
        Case(rows, columns, BFLOAT, k, data)
        for rows, columns, k in [(8192, 50257, 10), (8192, 128256, 64), (64, 128256, 32)]
        for data in ("sorted", "reversed", "constant")
    ),
]


def routers_and_samplers(case: Case, logits: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Those of calls with more options than k."""
    fused, k, device = logits.is_cuda or None, case.k, logits.device
    scale = torch.rand(case.rows, device=device) + 0.5
    bias = torch.rand(case.columns, device=device) / 8
    seed = torch.tensor([1], device=device)
    limits = {"top_k": k, "top_p": TOP_P}

    def ours(**options: Any) -> Callable[[], Tensor]:
        return lambda: megasoftmax.softmax_topk(logits, k, fused=fused, **options)[0]

    def drawn() -> Tensor:
        return megasoftmax.sample(logits, k, **limits, seed=seed, fused=fused)

    def routed_by_torch() -> Tensor:
        scores = logits.float().sigmoid()
        chosen = (scores + bias).topk(k, sorted=False).indices
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True)

    if case.data == "limits":
        return {OURS: ours(scale=scale, renormalize=True, **limits)}
    if case.data == "softcap":
        return {OURS: ours(softcap=30.0)}
    if case.data == "router":
        routed = ours(score="sigmoid", selection_bias=bias, renormalize=True)
        return {OURS: routed, "sigmoid, topk": routed_by_torch}
    samplers = {"topk, multinomial": peers.sample_torch, "warpers": peers.sample_by_warpers}
    if peers.is_there("FlashInfer"):
        samplers["FlashInfer"] = peers.sample_flashinfer()
    by_peers = {name: partial(sampler, logits, k, TOP_P) for name, sampler in samplers.items()}
    return {OURS: drawn, **by_peers}


def implementations(case: Case, logits: Tensor) -> dict[str, measure.Build]:
    """All that are to be timed."""
    if case.data in CALLS_OF:
        return measure.ways_of(routers_and_samplers(case, logits), (logits,))

    def way(function: Callable[..., tuple[Tensor, Tensor]], has_backward: bool) -> measure.Way:
        passes = ("forward", "backward") if has_backward else ("forward",)
        return measure.Way(lambda: function(logits, case.k)[0], (logits,), passes=passes)

    ours = partial(megasoftmax.softmax_topk, fused=logits.is_cuda or None)
    ways: dict[str, measure.Build] = {OURS: lambda: way(ours, True)}
    if case.data == "normal":
        ways["softmax, topk"] = lambda: way(peers.softmax_then_topk, True)
        ways["topk, logsumexp"] = lambda: way(peers.topk_and_logsumexp, False)
        if case.columns in VOCABULARIES:
            ways["FlashInfer"] = lambda: way(peers.flashinfer(), False)
    if case.compiled:
        ways["torch.compile"] = lambda: way(peers.compiled(peers.softmax_then_topk), False)
    return peers.only_there(ways)


def rows_of(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    with run.on_device():
        logits = case.logits().requires_grad_(case.data != "sample")
    return run.beside_copy(implementations(case, logits), logits, case.fewest, graphs=True)


main = measure.command("topk.csv", CASES, rows_of, rounds=9, stream=measure.own_stream)

if __name__ == "__main__":
    typer.run(main)
