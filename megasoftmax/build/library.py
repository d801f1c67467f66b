"""Finds the compiled part, builds it on first use where that is possible, and loads it."""

import atexit
import ctypes
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch

from megasoftmax.build import cache, extension, tuned
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
_compiling = threading.Lock()  # compilation changes what cpp_extension and the environment have
_loaded: Status | None = None


def _after_fork() -> None:
    """A process that is forked while a thread loads does not have that thread."""
    global _lock, _compiling
    _lock, _compiling = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def load() -> Status:
    """Loads the compiled part, building it first where that is possible; at most once per process.

    The first CUDA tensor calls it. Warns when nothing can be loaded. Builds the operators alone.
    Kernels are built when a call first needs them.
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
    """What `load` found, or what is known without building or loading anything."""
    if _loaded is not None:
        return _loaded
    try:
        path = find_whole() or _find_component(extension.OPERATORS)
        if path is not None:
            return Status(True, path)
        _check_first_use()
    except BuildError as error:
        return Status(False, reason=str(error))
    return Status(False, reason="it is built when the first CUDA tensor comes")


status._dynamo_marked_constant = True  # type: ignore[attr-defined]  # likewise


def capability(index: int) -> tuple[int, int] | None:
    """The compute capability whose kernels serve a GPU.

    It is not the GPU's own where the compiled part has code for 7.5 alone. None without a compiled
    part, or where that was compiled from other sources and does not tell.
    """
    found = load()
    if found.path is None:
        return None
    try:
        ask = ctypes.CDLL(str(found.path)).megasoftmax_capability
    except AttributeError:
        return None
    with torch.cuda.device(index):
        major, minor = divmod(ask(), 10)
    return major, minor


def plans() -> ctypes.CDLL:
    """The library that plans launches: the compiled part, or its plans compiled without CUDA.

    Raises:
        BuildError: there is no compiled part and no C++ compiler, or no ninja.
    """
    compiled = status()
    if compiled.path is not None:
        with suppress(OSError, AttributeError):  # it was compiled from other sources
            whole = ctypes.CDLL(str(compiled.path))
            for family in ("softmax", "topk", "attention"):
                getattr(whole, f"megasoftmax_{family}_plan")
            if _loaded is None:
                tuned.load(whole, compiled.path)
            return whole
    sources = sorted(extension.CSRC.glob("*/explain*.cpp"))
    flags = [*extension.CXX_FLAGS]

    def compile_into(folder: Path) -> Path:
        with _compiling, extension.programs():
            return _compile("megasoftmax_plans", sources, folder, extra_cflags=flags)

    key = extension.fingerprint(torch.__version__, *flags, has_kernels=False)
    return ctypes.CDLL(str(cache.keep("megasoftmax-plans", key, compile_into)))


def host() -> Path:
    """The C++ part of the host, a Python module, in the cache.

    Unless an earlier run did, it is unpacked into the cache from a wheel that has it, or else built
    there. Where the cache cannot be used, a wheel's part is unpacked into a temporary folder, which
    is removed when the process exits. A copy of the package has a part of its own.

    Raises:
        BuildError: it is not there, and cannot be built; or others could have written the cache,
            and no wheel has it.
    """

    def compile_into(folder: Path) -> Path:
        packed = _packed()
        if packed is not None:
            return _write_host(folder, packed)
        if os.environ.get("MEGASOFTMAX_JIT") == "0":
            raise BuildError("none is in the cache, and MEGASOFTMAX_JIT=0 forbids building")
        return _compile_host(folder)

    try:
        return cache.keep(_HOST, _host_key(), compile_into)
    except BuildError:
        packed = _packed()
        if packed is not None:
            with suppress(OSError):
                folder = Path(tempfile.mkdtemp(prefix=f"{_HOST}-"))  # with mode 0700
                atexit.register(rmtree, folder, ignore_errors=True)
                return _write_host(folder, packed)
        raise


def host_is_built() -> bool:
    """Whether it is in the cache."""
    with suppress(BuildError):
        return cache.find(_HOST, _host_key()) is not None
    return False


def host_is_packed() -> bool:
    """Whether a wheel has it, so that nothing is compiled."""
    return _packed() is not None


def build_host_into(folder: Path) -> Path:
    """Builds the C++ part of the host for this torch and this Python, as wheels have it.

    setup.py packs all that lie in build/hosts into a wheel with kernels.

    Args:
        folder: gets the library, with a name that says what it serves.

    Raises:
        BuildError: a tool is missing, or a compiler failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as objects:
        return _compile_host(Path(objects)).replace(folder / _name_of_host())


_HOST = "megasoftmax-host"
# Of a wheel. Compressed as one they take a fraction of what they take one by one.
_HOSTS = extension.PACKAGE / "hosts" / "hosts.tar.xz"


def _compile_host(folder: Path) -> Path:
    sources = sorted(extension.CSRC.glob("host/*.cpp"))
    if not sources:
        raise BuildError(f"{extension.CSRC / 'host'} has no sources")
    with _compiling, extension.programs():
        # A file for each of at most two jobs includes the sources: reading torch's headers takes
        # longer than compiling what follows. So names that the sources keep to themselves differ
        # from each other.
        count = min(2, extension.jobs())
        units = [folder / f"host{i}.cpp" for i in range(count)]
        for i, unit in enumerate(units):
            unit.write_text("".join(f'#include "{source}"\n' for source in sources[i::count]))
        named = {extension.CSRC: "csrc", Path(torch.__file__).parent: "torch"}
        names = [f"-fmacro-prefix-map={path}={name}" for path, name in named.items()]
        flags = [*extension.HOST_FLAGS, *names]
        with extension.progress(folder, units, "the C++ part of calls"):
            return _compile(
                "megasoftmax_host", units, folder, extra_cflags=flags, extra_ldflags=["-s"]
            )


def _host_key() -> str:
    return extension.fingerprint(
        *(torch.__version__, _soabi(), _PACKAGE_NAME, *extension.HOST_FLAGS), has_kernels=False
    )


def _name_of_host() -> str:
    """Its file in a wheel, which another release of torch, Python or the sources would not find.

    Builds of a release of torch with CUDA and without have the same C++ ABI.
    """
    release = torch.__version__.partition("+")[0]
    key = extension.fingerprint(release, _soabi(), *extension.HOST_FLAGS, has_kernels=False)
    return f"torch-{release}-{_soabi()}-{key[:12]}.so"


def _packed() -> bytes | None:
    """The host part of a wheel for this torch and Python; None if it is not there or damaged."""
    try:
        import lzma
    except ImportError:  # some builds of Python lack it
        return None
    try:
        with lzma.open(_HOSTS) as file:
            whole = file.read()  # to its end, where its checksum is
        with tarfile.open(fileobj=io.BytesIO(whole), mode="r:") as archive:
            if _name_of_host() not in archive.getnames():
                return None
            member = archive.extractfile(_name_of_host())
            return None if member is None else member.read()
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError):
        return None


def _write_host(folder: Path, packed: bytes) -> Path:
    path = folder / _name_of_host()
    path.write_bytes(packed)
    return path


def _soabi() -> str:
    return str(sysconfig.get_config_var("SOABI"))


def _load() -> Status:
    try:
        path = find_whole() or _find_or_build(extension.OPERATORS)
        torch.ops.load_library(path)
        compiled = ctypes.CDLL(str(path))
        compiled.megasoftmax_register(_PACKAGE_NAME.encode())
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_find_kernels))  # for as long as the library
        compiled.megasoftmax_set_kernel_finder(_find_kernels)
    except (BuildError, OSError, AttributeError) as error:  # the last: compiled from other sources
        # One beside the package is taken before that of the cache.
        command = "build --package" if _LIBRARY.exists() else "build"
        warnings.warn(
            "megasoftmax has no compiled kernels here, and CUDA tensors take the slow plain-torch "
            f"path: {error}. `python -m megasoftmax {command}` compiles them.",
            RuntimeWarning,
            stacklevel=3,
        )
        return Status(False, reason=str(error))
    tuned.load(compiled, path)
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


def these_gpus() -> str:
    """The architectures of this machine's GPUs as in TORCH_CUDA_ARCH_LIST; "" without a GPU."""
    gpus = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return " ".join(f"{major}.{minor}" for major, minor in sorted(gpus))


def build_into_cache(nvcc: extension.Nvcc, names: Sequence[str]) -> Path:
    """Builds the library into torch's extension cache, unless an earlier run did, without a GPU.

    Args:
        names: architectures, as `extension.architectures` returns them. A process finds the library
            if these are the architectures of its GPUs.

    Raises:
        BuildError: a compiler failed; others could have written the cache.
    """

    def compile_into(folder: Path) -> Path:
        _start_host()
        log = folder.with_name("log")  # a failure removes the folder, and not the log
        return build_into(folder, folder / "objects", nvcc, names, log)

    return cache.keep("megasoftmax", _key(names), compile_into)


def build_into(
    folder: Path, objects: Path, nvcc: extension.Nvcc, names: Sequence[str], log: Path
) -> Path:
    """`extension.build` with the tools of this machine."""
    with extension.toolchain(nvcc):
        return extension.build(folder, objects, nvcc, names, log)


def build_component(component: str, nvcc: extension.Nvcc, names: Sequence[str]) -> Path:
    """Builds the operators, or a library of kernels, into the cache.

    Args:
        component: as `extension.sources` takes it.
        names: architectures, as `build_into_cache` takes them.

    Raises:
        BuildError: as of `build_into_cache`.
    """
    sources = extension.sources(component)

    def compile_into(folder: Path) -> Path:
        _start_host()
        with _compiling, extension.toolchain(nvcc), extension.progress(folder, sources, component):
            return _compile(
                "megasoftmax",
                sources,
                folder,
                extra_cflags=extension.cxx_flags(),
                extra_cuda_cflags=extension.nvcc_flags(names),
                extra_ldflags=[*extension.LINK_FLAGS],
            )

    return cache.keep(f"megasoftmax-{component}", _key(names), compile_into)


def _find_component(component: str) -> Path | None:
    """What `build_component` built for this machine's GPUs."""
    return _find(f"megasoftmax-{component}")


def _find_or_build(component: str) -> Path:
    """`build_component` for this machine's GPUs, unless an earlier run did."""
    found = _find_component(component)
    if found is not None:
        return found
    nvcc = _check_first_use()
    return build_component(component, nvcc, extension.architectures(nvcc.version, these_gpus()))


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t)
def _find_kernels(name: bytes, text: Any, size: int) -> int:
    """For csrc/common/kernels.cpp: the library of a launcher, built first where that is needed.

    What it raised, ctypes would print and forget. A build that failed is not tried again. All
    launchers of a library come from one file, though the sources change meanwhile.

    Returns:
        1 and the path in `text`; 0 and the reason; or _INTERRUPTED.
    """
    kernels = extension.library_of(name.decode())
    if kernels not in _answers:
        try:
            _answers[kernels] = 1, os.fsencode(_find_or_build(kernels))
        except KeyboardInterrupt:
            return _INTERRUPTED
        except BaseException as error:
            why = f"{error}. `python -m megasoftmax build --only {kernels}` compiles them"
            # As much of it as there is room for, in whole characters.
            room = why.encode(errors="replace")[: size - 1]
            _answers[kernels] = 0, room.decode(errors="ignore").encode()
    code, answer = _answers[kernels]
    ctypes.memmove(text, answer + b"\0", len(answer) + 1)
    return code


_answers: dict[str, tuple[int, bytes]] = {}  # by library
_INTERRUPTED = 2  # the library raises the signal again, when Python's code has returned


_host_process: subprocess.Popen[bytes] | None = None


def host_is_coming() -> bool:
    """Whether a process that this one started still compiles the C++ part of the host."""
    return _host_process is not None and _host_process.poll() is None


def _start_host() -> None:
    """Has another process build the C++ part of the host, if need be.

    `host` waits for it, and tells what went wrong. This process could not tell two outputs of ninja
    apart.
    """
    global _host_process
    command = [sys.executable, "-c", "from megasoftmax.build import library; library.host()"]
    path = os.pathsep.join([str(extension.PACKAGE.parent), *filter(None, sys.path)])
    is_wanted = _PACKAGE_NAME == "megasoftmax" and os.environ.get("MEGASOFTMAX_HOST") != "0"
    if not is_wanted or host_is_coming() or host_is_built() or host_is_packed():
        return
    quiet = subprocess.DEVNULL
    environment = os.environ | {"PYTHONPATH": path}
    _host_process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment)
    atexit.register(_host_process.terminate)


def find_whole() -> Path | None:
    """The library that has all kernels, beside the package or in the cache; else None.

    Raises:
        BuildError: others could have written the one in the cache.
    """
    return _LIBRARY if _LIBRARY.exists() else _find("megasoftmax")


def _find(name: str) -> Path | None:
    """A library of the cache for this machine's GPUs."""
    names = _architectures_of_these_gpus()
    return cache.find(name, _key(names)) if names else None


def architectures_of(path: Path) -> tuple[str, ...]:
    """Of a compiled part, as far as they are known: of one in the cache those of these GPUs."""
    return () if path == _LIBRARY else _architectures_of_these_gpus()


def _architectures_of_these_gpus() -> tuple[str, ...]:
    """Empty if there is no GPU that the kernels serve."""
    requested = these_gpus() if torch.cuda.is_available() else ""
    try:
        return extension.architectures(extension.MIN_NVCC, requested) if requested else ()
    except BuildError:  # all are too old
        return ()


def _key(names: Sequence[str]) -> str:
    flags = *extension.nvcc_flags(names), *extension.cxx_flags(), *extension.LINK_FLAGS
    return extension.fingerprint(torch.__version__, *flags)


def _compile(name: str, sources: Sequence[Path], objects: Path, **flags: Any) -> Path:
    """Builds a library in the empty folder `objects`, and loads it."""
    missing = extension.find_missing()
    if missing is not None:
        raise BuildError(extension.how_to_install(missing))
    from torch.utils import cpp_extension  # slow to import

    try:
        with extension.ninja(objects.with_name("log")):
            cpp_extension.load(
                name,
                [str(path) for path in sources],
                build_directory=str(objects),
                is_python_module=False,
                **flags,
            )
    except RuntimeError as error:  # a BuildError, or torch refuses the C++ compiler
        raise BuildError(str(error)) from error
    return next(objects.glob("*.so"))
