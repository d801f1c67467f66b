"""Attention over a sequence that is split among GPUs; writes results/ring.csv.

ring_attention in both orders beside torch's own context_parallel, and beside attention of the whole
sequence on one GPU. `efficiency` is the time of that one, divided by the number of GPUs, over the
time of the ring: 1 is as many times the speed of one GPU as there are. A time is that of the
slowest rank. `milliseconds` begin with an idle GPU, as the host calls; `queued_milliseconds` when
the host has had a start, as in a model, which launches many layers; that is left out where it makes
no difference. `extra_bytes` is the peak of a rank beside its inputs. `error` is the largest
difference of the output of the first rank from that of one GPU.

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
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import megasoftmax

SHAPES = {"cuda": (1, 16, 128), "cpu": (1, 2, 8)}  # batch, heads, head dimension
LENGTHS = {"cuda": (16384, 65536, 262144), "cpu": (64,)}
LIMITS = {"causal": {"causal": True}, "window 4096": {"causal": True, "window": (4095, 0)}}
ONE = "one GPU"
HEAD_START = 4 * measure.LONG_START  # torch's own takes the host longest
LONG = 20.0  # milliseconds
FIELDS = [
    *("gpus", "tokens", "limits", "implementation", "pass"),
    *("milliseconds", "efficiency", "queued_milliseconds", "queued_efficiency"),
    *("extra_bytes", "error", "note"),
]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Way(NamedTuple):
    """An implementation, what it takes and returns of the whole sequence, and where it runs."""

    attention: Attention
    part: Callable[[Tensor], Tensor]
    part_of_output: Callable[[Tensor], Tensor]
    context: Callable[[list[Tensor]], AbstractContextManager[Any]] = lambda parts: nullcontext()


def ways(limits: dict[str, Any], rank: int, ranks: int) -> dict[str, Way]:
    def ring(*tensors: Tensor, order: Any) -> Tensor:
        group = dist.group.WORLD
        return megasoftmax.ring_attention(*tensors, group=group, order=order, **limits)[0]

    def of_torch(*tensors: Tensor, backend: SDPBackend) -> Tensor:
        with sdpa_kernel([backend]):
            # By its module, where context_parallel replaces it.
            return functional.scaled_dot_product_attention(*tensors, is_causal=True)

    def in_torchs(parts: list[Tensor]) -> AbstractContextManager[Any]:
        """It replaces the tensors by the rank's parts."""
        mesh = dist.init_device_mesh("cuda", (ranks,))
        return context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * len(parts))

    def in_order(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks, 2)[rank].contiguous()

    def in_zigzag(tensor: Tensor) -> Tensor:
        return megasoftmax.zigzag_chunk(tensor, ranks, 2)[rank]

    found = {
        ONE: Way(partial(megasoftmax.attention, **limits), Tensor.clone, Tensor.clone),
        "contiguous": Way(partial(ring, order="contiguous"), in_order, in_order),
        "zigzag": Way(partial(ring, order="zigzag"), in_zigzag, in_zigzag),
    }
    if torch.cuda.is_available() and "window" not in limits:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            attention = partial(of_torch, backend=backend)
            found[f"torch {backend.name}"] = Way(attention, Tensor.clone, in_zigzag, in_torchs)
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


def slowest(call: measure.Function, run: measure.Run, head_start: int) -> tuple[float, int]:
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
        if head_start:
            torch.cuda._sleep(head_start)
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
    wanted = ways(LIMITS[name], rank, ranks)[ONE].attention(*whole)
    for implementation, way in ways(LIMITS[name], rank, ranks).items():
        parts = [way.part(each) for each in whole]
        row: measure.Row = {"gpus": ranks, "tokens": tokens, "limits": name}
        row["implementation"] = implementation
        try:
            with way.context(parts):
                difference = (way.attention(*parts) - way.part_of_output(wanted)).abs().max()
                for direction, call in passes(way.attention, parts).items():
                    figures: measure.Row = {"pass": direction, "error": f"{difference.item():.1e}"}
                    for prefix, head_start in (("", 0), ("queued_", HEAD_START)):
                        milliseconds, peak = slowest(call, run, head_start)
                        of_whole = of_one.setdefault(prefix + direction, milliseconds)
                        figures[f"{prefix}milliseconds"] = f"{milliseconds:.3f}"
                        figures[f"{prefix}efficiency"] = f"{of_whole / ranks / milliseconds:.3f}"
                        if of_one[direction] > LONG or run.device == "cpu":
                            break
                    yield row | figures | {"extra_bytes": peak}
        except (RuntimeError, ValueError) as error:  # of torch, which is experimental
            yield row | {"note": str(error).splitlines()[0]}


@measure.benchmark("ring.csv", rounds=10, chooses=False)
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
