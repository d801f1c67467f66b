"""Finds the compiled part, builds it on first use where that is possible, and loads it."""

import ctypes
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megasoftmax.build import extension
from megasoftmax.build.extension import BuildError


@dataclass(frozen=True)
class Status:
    """Whether CUDA tensors have kernels: those of the library `path`, or none for a `reason`."""

    available: bool
    path: Path | None = None
    reason: str | None = None


_PACKAGE_NAME = __name__.removesuffix(".build.library")  # of a copy, another than megasoftmax
_LIBRARY = extension.PACKAGE / extension.LIBRARY_NAME
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
    try:
        _check_first_use()
    except BuildError as error:
        return Status(False, reason=str(error))
    return Status(False, reason="it is built when the first CUDA tensor comes")


def plans() -> ctypes.CDLL:
    """What tells how launches run: the compiled part, or its plans compiled alone, without CUDA.

    Raises:
        BuildError: there is no compiled part and no C++ compiler, or no ninja.
    """
    compiled = status()
    if compiled.path is not None:
        with suppress(OSError, AttributeError):  # it is of other sources
            whole = ctypes.CDLL(str(compiled.path))
            whole.megasoftmax_explain  # noqa: B018
            return whole
    sources = [extension.CSRC / "kernels" / "softmax" / "explain.cpp"]
    flags = [*extension.CXX_FLAGS]

    def compile_into(folder: Path) -> Path:
        with extension.programs():
            return _compile("megasoftmax_plans", sources, folder, extra_cflags=flags)

    key = extension.fingerprint(torch.__version__, *flags)
    return ctypes.CDLL(str(_kept("megasoftmax-plans", key, compile_into)))


def _load() -> Status:
    try:
        path = _LIBRARY if _LIBRARY.exists() else _build_for_these_gpus()
        torch.ops.load_library(path)
        ctypes.CDLL(str(path)).megasoftmax_register(_PACKAGE_NAME.encode())
    except (BuildError, OSError, AttributeError) as error:  # the last: of other sources
        warnings.warn(
            "megasoftmax has no compiled kernels here, and CUDA tensors take the slow plain-torch "
            f"path: {error}. `python -m megasoftmax build` compiles them.",
            RuntimeWarning,
            stacklevel=3,
        )
        return Status(False, reason=str(error))
    return Status(True, path)


def _check_first_use() -> extension.Nvcc:
    """The nvcc that builds on first use, or a BuildError that says why nothing is built."""
    if not torch.cuda.is_available():
        raise BuildError("torch sees no CUDA GPU")
    if os.environ.get("MEGASOFTMAX_JIT") == "0":
        raise BuildError(
            "none came with the package, and MEGASOFTMAX_JIT=0 forbids building on first use"
        )
    return extension.check_tools()


def _build_for_these_gpus() -> Path:
    """Builds the library into torch's extension cache, or finds it there from an earlier run."""
    nvcc = _check_first_use()
    gpus = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    requested = " ".join(f"{major}.{minor}" for major, minor in sorted(gpus))
    names = extension.architectures(nvcc.version, requested)
    flags = *extension.nvcc_flags(names), *extension.cxx_flags(), *extension.LINK_FLAGS
    key = extension.fingerprint(torch.__version__, str(nvcc.version), *flags)
    sources = extension.sources()

    def compile_into(folder: Path) -> Path:
        with extension.toolchain(nvcc), _progress(folder, len(sources)):
            return _compile(
                "megasoftmax",
                sources,
                folder,
                extra_cflags=extension.cxx_flags(),
                extra_cuda_cflags=extension.nvcc_flags(names),
                extra_ldflags=[*extension.LINK_FLAGS],
            )

    return _kept("megasoftmax", key, compile_into)


def _kept(name: str, key: str, compile_into: Callable[[Path], Path]) -> Path:
    """A library in torch's extension cache, compiled there unless an earlier run did."""
    folder = _cache_folder() / f"{name}-{key[:16]}"
    library = folder / _LIBRARY.name
    with extension.locked(folder / "lock"):
        if not library.exists():
            # A new folder each time. In that of a build that was killed, torch would wait for ever
            # for the end of that build, and ninja may still be at work.
            with tempfile.TemporaryDirectory(dir=folder) as objects:
                compile_into(Path(objects)).replace(library)
    return library


def _compile(name: str, sources: Sequence[Path], objects: Path, **flags: Any) -> Path:
    """Builds a library in the empty folder `objects`, and loads it."""
    from torch.utils import cpp_extension  # slow to import

    try:
        cpp_extension.load(
            name,
            [str(path) for path in sources],
            build_directory=str(objects),
            is_python_module=False,
            **flags,
        )
    except RuntimeError as error:
        text = str(error)  # with all that ninja printed, files that compiled included
        raise BuildError(text[max(text.find("FAILED:"), 0) :]) from error
    return next(objects.glob("*.so"))


@contextmanager
def _progress(objects: Path, files: int) -> Iterator[None]:
    """Tells on stderr how many files are compiled; ninja itself could only write to stdout."""
    ended = threading.Event()

    def report() -> None:
        before = None
        while before is None or not ended.wait(1):
            done = len([*objects.glob("*.o")])
            if done != before:
                line = f"megasoftmax: building for this GPU, once: {done} of {files} files"
                print(line, file=sys.stderr, flush=True)
            before = done

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "torch_extensions")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", default)).expanduser()
