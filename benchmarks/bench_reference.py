"""Plain torch of megasoftmax beside other code, on a CPU; writes results/reference_cpu.csv.

* softmax beside eager, which models run without fused kernels: scale, masked_fill, softmax in
  float32, cast, drop.
* attention with a bias that learns beside torch's scaled_dot_product_attention.
* softmax_topk beside torch.softmax with torch.topk.

One thread, and the fewest seconds that this thread ran: others on the machine disturb that least.
"""

import platform
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product

import measure
import peers
import torch
import typer
from measure import BOTH, Way
from measured import OURS

import megasoftmax

SCALE = 0.125
EAGER, SDPA, TOPK = "eager", "SDPA", "torch.topk"
Ways = dict[str, measure.Build]


@dataclass(frozen=True)
class Case(measure.Case):
    """shape: of the scores, or of the query."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    variant: str
    direction: str
    peer: str = EAGER
    k: int = 0

    def __str__(self) -> str:
        dtype = measure.dtype_name(self.dtype)
        return f"{list(self.shape)} {dtype} {self.variant} {self.direction}"


PASSES = ("forward", BOTH)
DTYPES = (torch.float32, torch.bfloat16)
SCORES = (4, 8, 512, 512)
QUERIES = ((16, 4, 64, 32), (8, 8, 128, 32), (2, 8, 256, 64), (1, 8, 512, 64), (4, 8, 512, 64))
LOGITS = (  # shape and k
    *(((16, 8), 4), ((256, 128), 4), ((4096, 64), 8)),
    *(((64, 4096), 4), ((4, 50257), 50), ((64, 50257), 50)),
)
VARIANTS = ("masked", "causal", "causal, dropout")
BIASES = ("bias", "causal, bias")  # [1, heads, tokens, tokens]
CASES = [
    *(Case(SCORES, *each) for each in product(DTYPES, VARIANTS, PASSES)),
    *(Case(*each, SDPA) for each in product(QUERIES, DTYPES[:1], BIASES[:1], PASSES)),
    *(Case(QUERIES[2], *each, SDPA) for each in product(DTYPES[:1], BIASES[1:], PASSES)),
    *(Case(QUERIES[2], *each, SDPA) for each in product(DTYPES[1:], BIASES[:1], PASSES)),
    *(
        Case(shape, DTYPES[0], f"top {k}", direction, TOPK, k)
        for shape, k in LOGITS
        for direction in PASSES
    ),
]


def softmax(case: Case) -> Ways:
    scores = torch.randn(case.shape).to(case.dtype).requires_grad_()
    excluded = torch.rand(case.shape[0], 1, *case.shape[-2:]) < 0.25
    options = {"mask": excluded}
    if case.variant != "masked":
        excluded = torch.ones(case.shape[-2:], dtype=torch.bool).triu(1)
        options = {"causal": True, "dropout": 0.1 if "dropout" in case.variant else 0.0}
    eager = peers.eager(SCALE, excluded, dropout=options.get("dropout", 0.0))
    return {
        EAGER: lambda: peers.rows(eager, scores),
        OURS: lambda: peers.rows(megasoftmax.softmax, scores, scale=SCALE, **options),
    }


def attention(case: Case) -> Ways:
    _, heads, tokens, _ = case.shape
    given = [torch.randn(case.shape).to(case.dtype).requires_grad_() for _ in range(3)]
    bias = torch.randn(1, heads, tokens, tokens).to(case.dtype).requires_grad_()
    causal = "causal" in case.variant
    excluded = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    sdpa = peers.sdpa(mask=lambda: bias.masked_fill(excluded, -torch.inf) if causal else bias)
    ours = peers.ours(bias=bias, causal=causal)
    leaves = (*given, bias)
    return {
        SDPA: lambda: Way(lambda: sdpa(*given), leaves),
        OURS: lambda: Way(lambda: ours(*given), leaves),
    }


def softmax_topk(case: Case) -> Ways:
    logits, k = torch.randn(case.shape).to(case.dtype).requires_grad_(), case.k
    return {
        TOPK: lambda: Way(lambda: peers.softmax_then_topk(logits, k)[0], (logits,)),
        OURS: lambda: Way(lambda: megasoftmax.softmax_topk(logits, k)[0], (logits,)),
    }


WAYS = {EAGER: softmax, SDPA: attention, TOPK: softmax_topk}


def rows_of(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    mode = torch.no_grad if case.direction == "forward" else nullcontext
    calls = {}
    for name, build in WAYS[case.peer](case).items():
        ready, _, refusal = measure.prepare(build, (case.direction,), forward_mode=mode)
        if refusal:
            raise RuntimeError(f"{name}: {refusal}")
        calls[name] = ready[case.direction]
    count = 1 if run.is_small else max(1, 2**18 // torch.Size(case.shape).numel())
    timer = measure.host_timer(count, "cpu", time.thread_time)
    with mode():
        found = measure.interleaved(calls, run.turns, timer, warm_up=2, choose=min)
    theirs, ours = (found[name] / 1e3 for name in (case.peer, OURS))
    milliseconds = {"peer_ms": f"{theirs:.4g}", "ours_ms": f"{ours:.4g}"}
    yield {"peer": case.peer, **milliseconds, "ratio": f"{ours / theirs:.2f}"}


@measure.benchmark("reference_cpu.csv", rounds=15, device="cpu", chooses=False, measures_host=True)
def main(run: measure.Run) -> None:
    """Softmax beside eager code, attention with a bias that learns, and softmax with top-k."""
    torch.set_num_threads(1)
    place = f"{platform.machine()}, 1 thread"
    common = measure.provenance(run.commit, place)
    run.cases(CASES, partial(rows_of, run), common=common)


if __name__ == "__main__":
    typer.run(main)
