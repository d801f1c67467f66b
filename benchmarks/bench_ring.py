"""Attention over a sequence that is split among GPUs; writes results/ring.csv.

ring_attention in both orders beside torch's own context_parallel, and beside attention of the whole
sequence on one GPU. `efficiency` is the time of that one, divided by the number of GPUs, over the
time of the ring: 1 is as many times the speed of one GPU as there are. A time is that of the
slowest rank. `extra_bytes` is the peak of a rank beside its inputs.

torchrun --nproc-per-node 2 benchmarks/bench_ring.py                    # all GPUs of a host
torchrun --nproc-per-node 2 benchmarks/bench_ring.py --device cpu       # tiny, to try it
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import measure
import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import megasoftmax

SHAPES = {"cuda": (1, 16, 128), "cpu": (1, 2, 8)}  # batch, heads, head dimension
LENGTHS = {"cuda": (16384, 65536, 262144), "cpu": (64,)}
LIMITS = {"causal": {"causal": True}, "window 4096": {"causal": True, "window": (4095, 0)}}
FIELDS = [
    *("gpus", "tokens", "limits", "implementation", "pass"),
    *("milliseconds", "efficiency", "extra_bytes", "note"),
]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Way(NamedTuple):
    """An implementation, what it takes of the whole sequence, and where it runs."""

    attention: Attention
    part: Callable[[Tensor], Tensor]
    context: Callable[[list[Tensor]], AbstractContextManager[Any]] = lambda parts: nullcontext()


def ways(limits: dict[str, Any], rank: int, ranks: int) -> dict[str, Way]:
    def ring(*tensors: Tensor, order: Any) -> Tensor:
        group = dist.group.WORLD
        return megasoftmax.ring_attention(*tensors, group=group, order=order, **limits)[0]

    def of_torch(*tensors: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return scaled_dot_product_attention(*tensors, is_causal=True)

    def in_torchs(parts: list[Tensor]) -> AbstractContextManager[Any]:
        """It replaces the tensors by the rank's parts."""
        mesh = dist.init_device_mesh("cuda", (ranks,))
        return context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * len(parts))

    found = {
        "one GPU": Way(partial(megasoftmax.attention, **limits), Tensor.clone),
        "contiguous": Way(
            partial(ring, order="contiguous"),
            lambda tensor: tensor.chunk(ranks, 2)[rank].contiguous(),
        ),
        "zigzag": Way(
            partial(ring, order="zigzag"),
            lambda tensor: megasoftmax.zigzag_chunk(tensor, ranks, 2)[rank],
        ),
    }
    if torch.cuda.is_available() and "window" not in limits:
        found["torch"] = Way(of_torch, Tensor.clone, in_torchs)
    return found


def passes(attention: Attention, parts: list[Tensor]) -> measure.Calls:
    inputs = [each.detach().requires_grad_() for each in parts]
    gradient = torch.randn_like(inputs[0])

    def both() -> object:
        return torch.autograd.grad(attention(*inputs), inputs, gradient)

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*inputs)

    return {"forward": forward, measure.BOTH: both}


def slowest(call: measure.Function, run: measure.Run) -> tuple[float, int]:
    """Median milliseconds of the slowest rank, and the bytes that this one takes at most."""
    peak, times, on_host = 0, [], measure.host_timer(1, "cpu")
    for _ in range(2 + run.turns):  # the first two do not count
        dist.barrier()
        if run.device == "cpu":
            times.append(on_host(call) / 1e3)
            continue
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
        peak = torch.cuda.max_memory_allocated() - before
    found = torch.tensor([sorted(times[2:])[run.turns // 2]], device=run.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item(), peak


def rows_of(run: measure.Run, tokens: int, name: str, rank: int) -> Iterator[measure.Row]:
    """Those of one length and one of LIMITS, in all implementations."""
    ranks, (batch, heads, dim) = dist.get_world_size(), SHAPES[run.device]
    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    torch.manual_seed(0)
    shape = (batch, heads, tokens, dim)
    whole = [torch.randn(shape, device=run.device, dtype=dtype) for _ in "qkv"]
    of_one: dict[str, float] = {}
    for implementation, way in ways(LIMITS[name], rank, ranks).items():
        parts = [way.part(each) for each in whole]
        row: measure.Row = {"gpus": ranks, "tokens": tokens, "limits": name}
        row["implementation"] = implementation
        try:
            with way.context(parts):
                for direction, call in passes(way.attention, parts).items():
                    milliseconds, peak = slowest(call, run)
                    share = of_one.setdefault(direction, milliseconds) / ranks / milliseconds
                    figures = {"milliseconds": f"{milliseconds:.3f}", "efficiency": f"{share:.3f}"}
                    yield {**row, "pass": direction, **figures, "extra_bytes": peak}
        except (RuntimeError, ValueError) as error:  # of torch, which is experimental
            yield row | {"note": str(error).splitlines()[0]}


@measure.benchmark("ring.csv", rounds=10)
def main(run: measure.Run) -> None:
    """Times attention over a sequence that is split."""
    rank = int(os.environ["LOCAL_RANK"])
    if run.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if run.device == "cuda" else "gloo")
    with run.writer(fields=FIELDS) if rank == 0 else nullcontext(lambda row: None) as write:
        for tokens, name in product(LENGTHS[run.device], LIMITS):
            for row in rows_of(run, tokens, name, rank):
                write(row)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
