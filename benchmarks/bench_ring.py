"""Attention over a sequence that is split among GPUs; writes results/ring.csv.

ring_attention in both orders beside torch's own context_parallel, and beside attention of the whole
sequence on one GPU. `efficiency` is the time of that one, divided by the number of GPUs, over the
time of the ring: 1 is as many times the speed of one GPU as there are. A time is that of the
slowest rank. `extra_bytes` is the peak of a rank beside its inputs.

torchrun --nproc-per-node 2 benchmarks/bench_ring.py                    # all GPUs of a host
torchrun --nproc-per-node 2 benchmarks/bench_ring.py --trace folder    # with timelines
torchrun --nproc-per-node 2 benchmarks/bench_ring.py --device cpu       # tiny, to try it
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import measure
import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import profile

import megasoftmax

SHAPES = {"cuda": (1, 16, 0, 128), "cpu": (1, 2, 0, 8)}  # batch, heads, tokens, head dimension
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


def passes(attention: Attention, parts: list[Tensor]) -> dict[str, Callable[[], object]]:
    inputs = [each.detach().requires_grad_() for each in parts]
    gradient = torch.randn_like(inputs[0])

    def both() -> object:
        return torch.autograd.grad(attention(*inputs), inputs, gradient)

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*inputs)

    return {"forward": forward, "forward+backward": both}


def slowest(call: Callable[[], object], device: str, rounds: int) -> tuple[float, int]:
    """Median milliseconds of the slowest rank, and the bytes that this one takes at most."""
    peak, times = 0, []
    for _ in range(2 + rounds):  # the first two do not count
        dist.barrier()
        if device == "cpu":
            times.append(measure.host_milliseconds(call))
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
    found = torch.tensor([sorted(times[2:])[rounds // 2]], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item(), peak


@measure.benchmark("ring.csv", rounds=10)
def main(
    run: measure.Run,
    trace: Annotated[Path | None, typer.Option(help="A folder for timelines of zigzag.")] = None,
) -> None:
    """Times attention over a sequence that is split."""
    device = run.device
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    ranks, dtype = dist.get_world_size(), torch.bfloat16 if device == "cuda" else torch.float32
    with run.writer(fields=FIELDS) if rank == 0 else nullcontext(lambda row: None) as write:
        for tokens, (name, limits) in product(LENGTHS[device], LIMITS.items()):
            batch, heads, _, dim = SHAPES[device]
            torch.manual_seed(0)
            shape = (batch, heads, tokens, dim)
            whole = [torch.randn(shape, device=device, dtype=dtype) for _ in "qkv"]
            of_one: dict[str, float] = {}
            for implementation, way in ways(limits, rank, ranks).items():
                parts = [way.part(each) for each in whole]
                row = {
                    "gpus": ranks,
                    "tokens": tokens,
                    "limits": name,
                    "implementation": implementation,
                }
                try:
                    with way.context(parts):
                        for which, call in passes(way.attention, parts).items():
                            milliseconds, peak = slowest(call, device, run.turns)
                            efficiency = (
                                of_one.setdefault(which, milliseconds) / ranks / milliseconds
                            )
                            found = {
                                **row,
                                "pass": which,
                                "milliseconds": f"{milliseconds:.3f}",
                                "efficiency": f"{efficiency:.3f}",
                                "extra_bytes": peak,
                            }
                            write(found)
                            if trace is not None and implementation == "zigzag":
                                with profile() as timeline:
                                    call()
                                name_of_file = f"{tokens}_{name}_{which}_{rank}.json"
                                timeline.export_chrome_trace(str(trace / name_of_file))
                except (RuntimeError, ValueError) as error:  # of torch, which is experimental
                    write(row | {"note": str(error).splitlines()[0]})
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
