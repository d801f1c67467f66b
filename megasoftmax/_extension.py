"""Finds, builds or refuses the compiled part, and reads the limits of its kernels."""

import ctypes
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
    storage: str  # where the row waits between the two passes: Storage in limits.h, in lower case
    threads_per_row: int
    rows_per_block: int
    chunks_per_thread: int
    blocks_per_sm: int
    takes_turns: bool  # blocks: of one row after the other
    blocks_per_row: int | None  # None: as many as the GPU runs at a time, for all rows together
    max_chunks: int | None  # None: any length
    min_rows: int  # fewer rows take a later regime
    serves: tuple[str, ...]  # names of Rows in limits.h, such as "plain" or "any"


@dataclass(frozen=True)
class Limits:
    """The row regimes of the softmax, shortest rows first, and what else the headers fix."""

    forward: tuple[RowRegime, ...]
    backward: tuple[RowRegime, ...]
    max_index: int  # the most rows or columns
    kinds: dict[str, tuple[str, ...]]  # a name of Rows -> the kinds of rows that it stands for
    constants: dict[str, int]  # by their names in the headers


_LIBRARY = _build.PACKAGE / _build.LIBRARY_NAME
_lock = threading.Lock()
_loaded: Status | None = None


def load() -> Status:
    """Loads the compiled part, building it first where that is possible; at most once per process.

    The first CUDA tensor calls it. Warns when nothing can be loaded.
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
        ctypes.CDLL(str(path)).megasoftmax_register(__package__.encode())
    except (_build.BuildError, OSError, AttributeError) as error:  # the last: of other sources
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


def read_limits(header: str, *others: str) -> Limits:
    """The tables of csrc/kernels/softmax/limits.h, and its constants with those of other headers.

    Raises:
        ValueError: the text is not laid out as expected; nothing is guessed.
    """
    names = [field.name for field in fields(RowRegime)]
    struct = re.search(r"struct RowRegime \{(.*?)\n\};", header, re.DOTALL)
    members = re.findall(r"^\s*\w+ (\w+)(?:\[\d+\])?;", struct[1] if struct else "", re.MULTILINE)
    if members != names:
        raise ValueError(f"limits.h: the members of RowRegime are {members}, expected {names}")
    return Limits(
        _read_table(header, "kForwardRegimes", members),
        _read_table(header, "kBackwardRegimes", members),
        _read_max_index(header),
        _read_kinds(header),
        _read_constants("\n".join([header, *others])),
    )


def _read_constants(text: str) -> dict[str, int]:
    found = re.findall(r"\b(k[A-Z]\w*) = (\d+)(?: \* (\d+))?[,;]", text)
    return {name: int(value) * int(factor or 1) for name, value, factor in found}


def _read_kinds(header: str) -> dict[str, tuple[str, ...]]:
    rows = re.search(r"enum Rows : unsigned \{\n(.*?)\n\};", header, re.DOTALL)
    if rows is None:
        raise ValueError("limits.h: no enum Rows")
    kinds: dict[str, tuple[str, ...]] = {}
    for name, value in re.findall(r"^\s*(k\w+) = ([^,]+),", rows[1], re.MULTILINE):
        parts = [] if value.isdigit() else _names_of_rows(value)  # combinations come after parts
        own = tuple(kind for part in parts for kind in kinds[part])
        kinds[_words(name)] = own or (_words(name),)
    return kinds


def _names_of_rows(text: str) -> tuple[str, ...]:
    return tuple(_words(name) for name in text.split(" | "))


def _words(name: str) -> str:
    """kBiasGradient -> "bias gradient", kAnyRows -> "any"."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removeprefix("k")).lower()
    return words.removesuffix(" rows")


def _read_max_index(header: str) -> int:
    margin = re.search(r"int64_t kMaxIndex = INT32_MAX - (\d+);", header)
    if margin is None:
        raise ValueError("limits.h: no kMaxIndex of the form INT32_MAX - <number>")
    return 2**31 - 1 - int(margin[1])


def read_limit(header: str, name: str) -> int:
    """A constant of csrc/kernels/topk/limits.h or csrc/kernels/attention/limits.h.

    Raises:
        ValueError: the text is not laid out as expected; nothing is guessed.
    """
    found = re.search(rf"\bint {name} = (\d+);", header)
    if found is None:
        raise ValueError(f"limits.h: no {name} of the form int {name} = 256;")
    return int(found[1])


def _read_table(header: str, name: str, members: list[str]) -> tuple[RowRegime, ...]:
    table = re.search(rf"RowRegime {name}\[\] = \{{\n(.*?)\n\}};", header, re.DOTALL)
    if table is None:
        raise ValueError(f"limits.h: no table {name}")
    lines = [line.split("//")[0].strip() for line in table[1].splitlines()]
    return tuple(_read_row(line, members) for line in lines if line)


_NAMED_NUMBERS = {"kUnlimited": 2**31 - 1, "kWholeGpu": 0}


def _read_row(line: str, members: list[str]) -> RowRegime:
    cells = re.sub(r"\s+", " ", line).removeprefix("{").removesuffix("},").split(", ")

    def read(member: str, pattern: str) -> str:
        position = members.index(member)
        cell = re.fullmatch(pattern, cells[position]) if len(cells) == len(members) else None
        if cell is None:
            raise ValueError(f"limits.h: cannot read the row {line!r}: {member}")
        return cell[1]

    def number(member: str) -> int:
        text = read(member, rf"(\d+|{'|'.join(_NAMED_NUMBERS)})")
        return _NAMED_NUMBERS[text] if text in _NAMED_NUMBERS else int(text)

    blocks_per_row, max_chunks = number("blocks_per_row"), number("max_chunks")
    return RowRegime(
        name=read("name", r'"(\w+)"'),
        storage=read("storage", r"Storage::k(\w+)").lower(),
        threads_per_row=number("threads_per_row"),
        rows_per_block=number("rows_per_block"),
        chunks_per_thread=number("chunks_per_thread"),
        blocks_per_sm=number("blocks_per_sm"),
        takes_turns=read("takes_turns", "(true|false)") == "true",
        blocks_per_row=None if blocks_per_row == _NAMED_NUMBERS["kWholeGpu"] else blocks_per_row,
        max_chunks=None if max_chunks == _NAMED_NUMBERS["kUnlimited"] else max_chunks,
        min_rows=number("min_rows"),
        serves=_names_of_rows(read("serves", r"(k\w+(?: \| k\w+)*)")),
    )


_KERNELS = _build.CSRC / "kernels"
LIMITS = read_limits(
    *((_KERNELS / "softmax" / name).read_text() for name in ("limits.h", "plan.h"))
)
MAX_K = read_limit((_KERNELS / "topk" / "limits.h").read_text(), "kMaxK")
_ATTENTION = (_KERNELS / "attention" / "limits.h").read_text()
MAX_HEAD_DIM = read_limit(_ATTENTION, "kMaxHeadDim")
MAX_ATTENTION_SCALE = read_limit(_ATTENTION, "kMaxScale")
MAX_POSITIONS = read_limit(_ATTENTION, "kMaxPositions")
MIN_SHARED_BYTES = read_limit(_ATTENTION, "kMinSharedBytes")
