"""What a call costs the host: tiny tensors, ours and torch's in turn; writes results/host.csv.

The least of many rounds, each of some calls. On a GPU nothing waits for it while a round is timed.
Rows of earlier commits stay: docs/host.svg draws how the ratios changed. A run replaces those of
its device and commit.
"""

from collections.abc import Callable
from typing import Annotated

import measure
import torch
import typer
from measured import OURS, read
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import megasoftmax
from megasoftmax.integrations.transformers import attention_forward

CALLS = 50  # of a round; with a backward pass about 1000 launches, for which a GPU's queue has room

Ways = dict[str, Callable[..., object]]


def cases(device: str) -> dict[str, tuple[tuple[Tensor, ...], Ways]]:
    """{case: (tensors, {implementation: what takes them})}; float32, on a GPU bfloat16."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def topk(logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(torch.softmax(logits, -1), 4)

    scores, mask = normal(2, 2, 4, 4), torch.zeros(2, 1, 4, 4, dtype=torch.bool, device=device)
    module = megasoftmax.FusedScaleMaskSoftmax(
        *(False, device == "cuda", "padding", True, torch.Tensor.masked_fill, True, 0.5)
    )

    def masked(scores: Tensor) -> Tensor:
        return torch.softmax((scores * 0.5).masked_fill(mask, -10000.0), -1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return megasoftmax.attention(query, key, value, causal=True)

    def attend_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, key, value, is_causal=True)

    def adapter(function: Callable[..., tuple[Tensor, object]]) -> Callable[..., Tensor]:
        layer = torch.nn.Module()
        layer.is_causal = True
        return lambda *tensors: function(layer, *tensors, None)[0]

    heads = tuple(normal(1, 4, 2, 8).transpose(1, 2) for _ in range(3))  # as projections leave them
    return {
        "softmax": ((scores,), {OURS: megasoftmax.softmax, "torch": lambda x: x.softmax(-1)}),
        "softmax_topk": (
            (normal(8, 64),),
            {OURS: lambda x: megasoftmax.softmax_topk(x, 4)[0], "torch": lambda x: topk(x)[0]},
        ),
        "FusedScaleMaskSoftmax": ((scores,), {OURS: lambda x: module(x, mask), "torch": masked}),
        "attention": (heads, {OURS: attend, "torch": attend_torch}),
        "attention of transformers": (
            heads,
            {OURS: adapter(attention_forward), "torch": adapter(sdpa_attention_forward)},
        ),
    }


def passes(tensors: tuple[Tensor, ...], ways: Ways) -> dict[str, dict[str, measure.Function]]:
    """{pass: {implementation: call}}; compiled anew, for code differs by case."""
    torch.compiler.reset()
    compiled = {name: torch.compile(way, dynamic=False) for name, way in ways.items()}
    leaves = tuple(each.detach().clone().requires_grad_() for each in tensors)
    gradient = torch.ones_like(next(iter(ways.values()))(*tensors))

    def both(way: Callable[..., Tensor]) -> measure.Function:
        return lambda: torch.autograd.grad(way(*leaves), leaves, gradient)

    return {
        "forward": {name: lambda way=way: way(*tensors) for name, way in ways.items()},
        "forward, compiled": {
            name: lambda way=way: way(*tensors) for name, way in compiled.items()
        },
        "forward, recorded": {name: lambda way=way: way(*leaves) for name, way in ways.items()},
        "forward+backward": {name: both(way) for name, way in ways.items()},
    }


@measure.benchmark("host.csv", rounds=200, device="cpu", measures_host=True)
def main(
    run: measure.Run,
    threads: Annotated[int, typer.Option(help="Of the CPU's kernels.")] = 1,
) -> None:
    """Times the host."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    found = cases("cpu" if run.listed else run.device)
    chosen = run.chosen(found)
    if run.listed:
        return
    place = torch.cuda.get_device_name() if run.device == "cuda" else "CPU"
    common = measure.provenance(run.commit, f"{place}, host {measure.host_name()}")
    measured = {name: common[name] for name in ("device", "commit")}
    earlier = [] if run.path is None else read(run.path.name)
    timer = measure.host_timer(1 if run.quick else CALLS, run.device)
    with measure.results(run.path, {}) as write:
        for row in earlier:
            if not measured.items() <= row.items():
                write(row)
        for case in chosen:
            for which, calls in passes(*found[case]).items():
                times = measure.interleaved(calls, run.turns, timer, warm_up=3, choose=min)
                for implementation, microseconds in times.items():
                    row = {"case": case, "pass": which, "implementation": implementation}
                    row = {**common, **row, "microseconds": f"{microseconds:.1f}"}
                    write(row)
                    print(*row.values(), sep="  ")


if __name__ == "__main__":
    typer.run(main)
