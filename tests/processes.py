"""Runs a function in several processes that form a process group."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from megasoftmax import dispatch

Worker = Callable[[int, int, str, Path], Any]
# What takes seconds to import. A package that is not installed is left out.
PRELOADED = [
    "torch.distributed.tensor",
    "torch._dynamo",
    "transformers",
    "megatron.core.models.gpt",
]


def spawn(worker: Worker, world: int, device: str, folder: Path) -> list[Any]:
    """What `worker(rank, world, device, folder)` returned in each of the processes.

    Args:
        worker: a function of a module. It finds torch.distributed initialised, gloo for "cpu" and
            NCCL for "cuda", and returns what torch.load reads without unpickling code.
        world: how many processes.
        device: "cpu", see `let_ops_serve_cpus`; or "cuda", of which each process gets its own.
        folder: an empty one for all.
    """
    arguments = worker, world, device, folder
    if device == "cpu":
        start(_run, arguments, world)
    else:  # a process that has asked for GPUs must not fork
        torch.multiprocessing.spawn(_run, arguments, world)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]


def start(function: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """Runs function(rank, *args) in so many processes, whose imports one process has made."""
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(function, args, count, start_method="forkserver")


def let_ops_serve_cpus(setattr: Callable[[Any, str, Any], None]) -> None:
    """Makes fused=True run through the ops where there are no kernels, in any type."""
    for constraint in ("_device", "_compiled_part", "_dtype"):
        setattr(dispatch, constraint, lambda *_: None)


def _run(rank: int, worker: Worker, world: int, device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    else:
        let_ops_serve_cpus(setattr)
    torch.distributed.init_process_group(
        "nccl" if device != "cpu" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),  # a deadlock is a failure
    )
    found = worker(rank, world, device, folder)
    torch.save(found, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
