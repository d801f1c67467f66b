"""Runs a function in several processes that form a process group, and code in a process alone.

Compilers that are scripts too.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
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


def spawn(
    worker: Worker, world: int, device: str, folder: Path, ops_on_cpus: bool = True
) -> list[Any]:
    """What `worker(rank, world, device, folder)` returned in each of the processes.

    Args:
        worker: a function of a module. It finds torch.distributed initialised, gloo for "cpu" and
            NCCL for "cuda", and returns what torch.load reads without unpickling code.
        world: how many processes.
        device: "cpu", see `let_ops_serve_cpus`; or "cuda", of which each process gets its own.
        folder: an empty one for all.
        ops_on_cpus: else CPUs compute as they do for users.
    """
    arguments = worker, world, device, folder, ops_on_cpus
    if device == "cpu":
        start(_run, arguments, world)
    else:  # a process that has asked for GPUs must not fork
        torch.multiprocessing.spawn(_run, arguments, world)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]


def spawned_once(worker: Worker, factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """What each of so many processes on CPUs returned; they run once for each number of them."""
    found: dict[int, list[Any]] = {}

    def get(world: int) -> list[Any]:
        if world not in found:
            found[world] = []  # should they fail
            found[world] = spawn(worker, world, "cpu", factory.mktemp(f"gloo{world}"))
        assert found[world], "the processes failed, see the first failure"
        return found[world]

    return get


def start(function: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """Runs function(rank, *args) in so many processes, whose imports one process has made."""
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(function, args, count, start_method="forkserver")


def let_ops_serve_cpus(setattr: Callable[[Any, str, Any], None]) -> None:
    """Makes fused=True run through the ops where there are no kernels, in any type."""
    for constraint in ("_device", "_compiled_part", "_dtype"):
        setattr(dispatch, constraint, lambda *_: None)


def _run(
    rank: int, worker: Worker, world: int, device: str, folder: Path, ops_on_cpus: bool
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    elif ops_on_cpus:
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


_FORKS = """
import json, os, signal, sys
import torch

for line in sys.stdin:
    code, arguments, folder, *files = json.loads(line)
    if (child := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # not what the next one is told
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(folder)
        sys.argv = ["-c", *arguments]
        signal.alarm(300)
        exec(code, {"__name__": "__main__"})
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)  # else forks print it too
"""


class Forks:
    """Runs code as `python -c` does, in forks of a process that has imported torch alone.

    Importing torch takes 2 s of a core. Forks have the environment that the process began with, and
    end after 300 s, by SIGALRM.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-c", _FORKS]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def run(
        self, code: str, *arguments: object, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("stdout", "stderr")]
            given = [code, [*map(str, arguments)], str(cwd or Path.cwd()), *map(str, files)]
            print(json.dumps(given), file=self._process.stdin, flush=True)
            exit_code = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(
                given[1], exit_code, *(file.read_text() for file in files)
            )

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


# A compiler that prints much and writes what is asked for.
COMPILER = """\
#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 13.0, V13.0.1"; exit ;;
  *--dryrun*) exit ;;
  *-dumpversion*) echo {version}; exit ;;
  *{broken}*) echo "{broken}: error: no value" >&2; seq -f "note %g" 500; exit 1 ;;
esac
seq -f "ptxas info : function %g" 1000
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made >"$2"; shift; done
"""


def write_compilers(
    home: Path, *, broken: str = "nothing.cu", version: str = "12.2.0"
) -> dict[str, str]:
    """nvcc and g++ as scripts in home/bin; variables with which builds take them."""
    programs = home / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name in ("nvcc", "g++"):
        (programs / name).write_text(COMPILER.format(broken=broken, version=version))
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {
        "CUDA_HOME": str(home),
        "CXX": str(programs / "g++"),
        "MAX_JOBS": "1",
        "PATH": path,
    }
