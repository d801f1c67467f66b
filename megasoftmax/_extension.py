"""Finds, builds or refuses the compiled part, and reads the limits of its kernels."""

import os
import re
import sys
import tempfile
import threading
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from megasoftmax import _build
from megasoftmax._build import MIN_CAPABILITY as MIN_CAPABILITY


@dataclass(frozen=True)
class Status:
    """Whether CUDA tensors have kernels: those of the library `path`, or none for a `reason`."""

    available: bool
    path: Path | None = None
    reason: str | None = None


@dataclass(frozen=True)
class RowRegime:
    """A row of a table in limits.h: which rows a kernel takes, and how. A chunk is 16 bytes."""

    name: str
    storage: str  # "registers", "shared" or "reread": where the row waits between the two passes
    threads_per_row: int
    rows_per_block: int
    chunks_per_thread: int
    max_chunks: int | None  # None: any length
    blocks_per_sm: int
    serves: tuple[str, ...]  # kinds of rows: "all", or some of Rows in limits.h


@dataclass(frozen=True)
class Limits:
    """The row regimes of the softmax, shortest rows first."""

    forward: tuple[RowRegime, ...]
    backward: tuple[RowRegime, ...]


_LIBRARY = _build.PACKAGE / _build.LIBRARY_NAME
_lock = threading.Lock()
_loaded: Status | None = None


def load() -> Status:
    """Loads the compiled part, building it first where that is possible; at most once per process.

    To be called before an operator meets its first CUDA tensor. Warns when nothing can be loaded.
    """
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _load()
    return _loaded


# torch.compile calls it while tracing and keeps the answer. This is what
# torch.compiler.assume_constant_result sets; calling it would import torch._dynamo, 1.3 s.
load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def status() -> Status:
    """What `load` found, or as much as can be told without building or loading anything."""
    if _loaded is not None:
        return _loaded
    if _LIBRARY.exists():
        return Status(True, _LIBRARY)
    return Status(False, reason=_why_not_build() or "it is built when the first CUDA tensor comes")


def _load() -> Status:
    try:
        path = _LIBRARY if _LIBRARY.exists() else _build_for_these_gpus()
        torch.ops.load_library(path)
    except (_build.BuildError, OSError) as error:
        warnings.warn(
            "megasoftmax has no compiled kernels here, and CUDA tensors take the slow plain-torch "
            f"path: {error}. `python -m megasoftmax build` compiles them.",
            RuntimeWarning,
            stacklevel=3,
        )
        return Status(False, reason=str(error))
    return Status(True, path)


def _why_not_build() -> str | None:
    try:
        _tools()
    except _build.BuildError as error:
        return str(error)
    return None


def _tools() -> tuple[_build.Nvcc, _build.TorchInstall]:
    if not torch.cuda.is_available():
        raise _build.BuildError("torch sees no CUDA GPU")
    if os.environ.get("MEGASOFTMAX_JIT") == "0":
        raise _build.BuildError(
            "none came with the package, and MEGASOFTMAX_JIT=0 forbids building on first use"
        )
    return _build.check_tools(_build.find_nvcc(), _build.find_torch())


def _build_for_these_gpus() -> Path:
    """Builds the library into torch's extension cache, or finds it there from an earlier run."""
    nvcc, torch_install = _tools()
    gpus = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    requested = " ".join(f"{major}.{minor}" for major, minor in sorted(gpus))
    names = _build.architectures(nvcc.version, requested)
    key = _build.fingerprint(
        _build.kernel_sources() + _build.binding_sources(),
        torch_install.version,
        str(nvcc.version),
        *_build.kernel_flags(names),
        *_build.binding_flags(torch_install),
    )
    folder = _cache_folder() / f"megasoftmax-{key[:16]}"
    library = folder / _LIBRARY.name
    with _build.locked(folder / "lock"):
        if not library.exists():
            with tempfile.TemporaryDirectory() as objects:
                _build.build(library, Path(objects), nvcc, torch_install, names, _report)
    return library


def _report(line: str) -> None:
    print(f"megasoftmax: building for this GPU, once: {line}", file=sys.stderr, flush=True)


def _cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "torch_extensions")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", default)).expanduser()


def read_limits(header: str) -> Limits:
    """The tables of csrc/kernels/softmax/limits.h.

    Raises:
        ValueError: the text is not laid out as expected; nothing is guessed.
    """
    names = [field.name for field in fields(RowRegime)]
    struct = re.search(r"struct RowRegime \{(.*?)\n\};", header, re.DOTALL)
    members = re.findall(r"^\s*\w+ (\w+)(?:\[\d+\])?;", struct[1] if struct else "", re.MULTILINE)
    if members != names:
        raise ValueError(f"limits.h: the members of RowRegime are {members}, expected {names}")
    return Limits(_read_table(header, "kForwardRegimes"), _read_table(header, "kBackwardRegimes"))


def _read_table(header: str, name: str) -> tuple[RowRegime, ...]:
    table = re.search(rf"RowRegime {name}\[\] = \{{\n(.*?)\n\}};", header, re.DOTALL)
    if table is None:
        raise ValueError(f"limits.h: no table {name}")
    lines = [line.split("//")[0].strip() for line in table[1].splitlines()]
    return tuple(_read_row(line) for line in lines if line)


def _read_row(line: str) -> RowRegime:
    number = r"(\d+), "
    longest = r"(\d+|kUnlimited), "
    pattern = rf'\{{"(\w+)", Storage::k(\w+), {number * 3}{longest}{number}([\w |]+)\}},'
    row = re.fullmatch(pattern, re.sub(r"\s+", " ", line))
    if row is None:
        raise ValueError(f"limits.h: cannot read the row {line!r}")
    name, storage, threads, rows, chunks, longest, blocks, serves = row.groups()
    max_chunks = None if longest == "kUnlimited" else int(longest)
    return RowRegime(
        name,
        storage.lower(),
        int(threads),
        int(rows),
        int(chunks),
        max_chunks,
        int(blocks),
        tuple(word.removeprefix("k").removesuffix("Rows").lower() for word in serves.split(" | ")),
    )


LIMITS = read_limits((_build.CSRC / "kernels/softmax/limits.h").read_text())
