"""What a call costs the host: tiny tensors, ours and torch's in turn; writes results/host.csv.

The least of many rounds, each of some calls. On a GPU nothing waits for it while a round is timed.
Rows of earlier commits stay: docs/host.svg draws how the ratios changed. A run replaces those of
its device and commit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import measure
import torch
import typer
from measured import OURS, read
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import megasoftmax
from megasoftmax.integrations.transformers import attention_forward

CALLS = 50  # of a round; with a backward pass about 1000 launches, for which a GPU's queue has room
FIELDS = ("case", "pass", "implementation", "microseconds")


@dataclass(frozen=True)
class Case(measure.Case):
    """Tensors, and what takes them."""

    name: str
    tensors: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]


def cases() -> list[Case]:
    """On the default device; float32, on a GPU bfloat16."""
    mask, layer = torch.zeros(2, 1, 4, 4, dtype=torch.bool), torch.nn.Module()
    dtype = torch.bfloat16 if mask.is_cuda else torch.float32
    scores, logits = torch.randn(2, 2, 4, 4, dtype=dtype), torch.randn(8, 64, dtype=dtype)
    # As projections leave them.
    heads = tuple(torch.randn(1, 4, 2, 8, dtype=dtype).transpose(1, 2) for _ in range(3))
    layer.is_causal = True
    module = megasoftmax.FusedScaleMaskSoftmax(
        *(False, mask.is_cuda, "padding", True, torch.Tensor.masked_fill, True, 0.5)
    )
    return [
        Case("softmax", (scores,), megasoftmax.softmax, lambda x: x.softmax(-1)),
        Case(
            *("softmax_topk", (logits,)),
            lambda x: megasoftmax.softmax_topk(x, 4)[0],
            lambda x: torch.topk(torch.softmax(x, -1), 4)[0],
        ),
        Case(
            *("FusedScaleMaskSoftmax", (scores,)),
            lambda x: module(x, mask),
            lambda x: torch.softmax((x * 0.5).masked_fill(mask, -10000.0), -1),
        ),
        Case(
            *("attention", heads),
            lambda q, k, v: megasoftmax.attention(q, k, v, causal=True),
            lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        Case(
            *("attention of transformers", heads),
            lambda *tensors: attention_forward(layer, *tensors, None)[0],
            lambda *tensors: sdpa_attention_forward(layer, *tensors, None)[0],
        ),
    ]


def rows_of(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    """Compiled anew, for code differs by case."""
    torch.compiler.reset()
    tensors, ways = case.tensors, {OURS: case.ours, "torch": case.torchs}
    compiled = {name: torch.compile(way, dynamic=False) for name, way in ways.items()}
    leaves = tuple(each.detach().clone().requires_grad_() for each in tensors)
    gradient = torch.ones_like(case.ours(*tensors))
    timer = measure.host_timer(1 if run.quick else CALLS, run.device)

    def both(way: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(way(*leaves), leaves, gradient)

    for direction, of_pass, call in (
        ("forward", ways, lambda way: way(*tensors)),
        ("forward, compiled", compiled, lambda way: way(*tensors)),
        ("forward, recorded", ways, lambda way: way(*leaves)),
        (measure.BOTH, ways, both),
    ):
        calls = {name: partial(call, way) for name, way in of_pass.items() if run.wants(name)}
        times = measure.interleaved(calls, run.turns, timer, warm_up=3, choose=min)
        for name, microseconds in times.items():
            place = {"pass": direction, "implementation": name}
            yield place | {"microseconds": f"{microseconds:.1f}"}


@measure.benchmark("host.csv", rounds=200, device="cpu", measures_host=True)
def main(run: measure.Run) -> None:
    """Times the host."""
    torch.set_num_threads(1)
    place = torch.cuda.get_device_name() if run.device == "cuda" else "CPU"
    common = measure.provenance(run.commit, f"{place}, host {measure.host_name()}")
    here = {name: common[name] for name in ("device", "commit")}
    rows = read(run.path) if run.path else []
    earlier = [row for row in rows if not here.items() <= row.items()]
    with run.on_device():
        found = cases()
    run.cases(found, partial(rows_of, run), FIELDS, common, before=lambda chosen: earlier)


if __name__ == "__main__":
    typer.run(main)
