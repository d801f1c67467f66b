"""How the compiled part is built: its sources, flags and architectures, and the driver of nvcc.

setup.py, ``python -m megasoftmax build``, the build on first use and the tests share this file.
setup.py loads it by its path, in an environment that may lack torch: only the standard library is
imported at the top.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).absolute().parent  # not where a link leads: caches link single files
CSRC = PACKAGE / "csrc"
LIBRARY_NAME = "_C.abi3.so"

MIN_TORCH = (2, 11)  # the stable ABI that the bindings are compiled against
MIN_NVCC = (12, 0)  # C++20
MIN_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies

# Architecture -> first nvcc that knows it. Each serves later GPUs of its major version too, but for
# 9.0a, which serves its own alone.
DEFAULT_ARCHITECTURES = {"8.0": (12, 0), "9.0a": (12, 0), "10.0": (12, 8), "12.0": (12, 8)}

# nvcc compiles the bindings too: it brings the CUDA headers and one host compiler for both.
COMMON_FLAGS = ("-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden")
KERNEL_FLAGS = (
    "-lineinfo",
    "-Xptxas=-v",  # the report of registers and spills goes to the log
    "-Xfatbin=-compress-all",  # a fifth of the size
)
BINDING_FLAGS = ("-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000")
# libtorch has no symbol that the bindings call, but it brings in libtorch_cuda where there is one.
# The CUDA runtime is the static one, and hidden, so that it never meets the one that torch loads.
LINK_FLAGS = (
    "-shared",
    "-Xlinker=--exclude-libs,ALL",
    "-Xlinker=--no-as-needed",
    "-ltorch",
    "-ltorch_cpu",
    "-lc10",
)


class BuildError(RuntimeError):
    """The compiled part cannot be built; the message says why."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler."""

    path: Path
    version: tuple[int, int]


@dataclass(frozen=True)
class TorchInstall:
    """The torch to build against; ``cuda`` is None for a CPU build of torch."""

    root: Path
    version: str
    cuda: str | None


def find_nvcc() -> Nvcc | None:
    """The first nvcc of CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda; None if it does not run."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [f"{home}/bin" for home in homes if home]
    folders += [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    path = shutil.which("nvcc", path=os.pathsep.join(folders))
    if path is None:
        return None
    answer = subprocess.run([path, "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+)\.(\d+)", answer.stdout)
    if release is None:
        return None
    return Nvcc(Path(path), (int(release[1]), int(release[2])))


def find_torch() -> TorchInstall | None:
    """The torch of this interpreter, or None."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return TorchInstall(Path(torch.__file__).parent, str(torch.__version__), torch.version.cuda)


def check_tools(nvcc: Nvcc | None, torch: TorchInstall | None) -> tuple[Nvcc, TorchInstall]:
    """The tools, when the compiled part can be built with them.

    Raises:
        BuildError: one is missing or too old; says how to get it.
    """
    if torch is None:
        raise BuildError(
            "torch is not importable where the build runs "
            "(install it, and give pip the option --no-build-isolation)"
        )
    if _release(torch.version) < MIN_TORCH:
        raise BuildError(
            f"torch {torch.version} is older than {_dotted(MIN_TORCH)} (pip install -U torch)"
        )
    if nvcc is None:
        raise BuildError("no nvcc runs here (install the CUDA toolkit, or point CUDA_HOME to it)")
    if nvcc.version < MIN_NVCC:
        raise BuildError(
            f"nvcc {_dotted(nvcc.version)} is older than {_dotted(MIN_NVCC)} "
            "(install a newer CUDA toolkit, or point CUDA_HOME to it)"
        )
    return nvcc, torch


def why_not_compile(mode: str, nvcc: Nvcc | None, torch: TorchInstall | None) -> str | None:
    """Decides what an installation does under MEGASOFTMAX_BUILD = `mode`.

    ``none`` never compiles. ``auto`` compiles when nvcc and a CUDA build of torch are there.
    ``cuda`` compiles with any build of torch, which makes it the cross build too.

    Returns:
        None to compile, else the reason for a pure-Python installation.

    Raises:
        BuildError: `mode` is ``cuda`` and a tool is missing, or `mode` is unknown.
    """
    if mode not in ("auto", "cuda", "none"):
        raise BuildError(f"MEGASOFTMAX_BUILD must be auto, cuda or none, not {mode!r}")
    if mode == "none":
        return "MEGASOFTMAX_BUILD=none"
    try:
        check_tools(nvcc, torch)
    except BuildError as error:
        if mode == "cuda":
            raise BuildError(f"MEGASOFTMAX_BUILD=cuda, but {error}") from error
        return str(error)
    if mode == "auto" and torch is not None and torch.cuda is None:
        return (
            f"torch {torch.version} is a CPU build (MEGASOFTMAX_BUILD=cuda compiles all the same)"
        )
    return None


def architectures(nvcc_version: tuple[int, int], requested: str | None = None) -> tuple[str, ...]:
    """The architectures to compile for, such as ``("8.0", "9.0a+PTX")``.

    Args:
        nvcc_version: trims the default list to what this nvcc knows.
        requested: a list as in TORCH_CUDA_ARCH_LIST, separated by spaces or semicolons. 9.0 is
            taken as 9.0a, which every such GPU runs and which alone has its matrix instructions;
            what is older than MIN_CAPABILITY is left out. None or empty: the default list, with
            PTX of its last entry for GPUs to come.

    Raises:
        BuildError: an entry is not understood, or nothing is left.
    """
    if not requested:
        known = [name for name, first in DEFAULT_ARCHITECTURES.items() if first <= nvcc_version]
        return (*known[:-1], f"{known[-1]}+PTX")
    chosen = []
    for entry in re.split(r"[\s;]+", requested.strip()):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if match is None:
            raise BuildError(f"architecture {entry!r} is not of the form 8.0, 9.0a or 12.0+PTX")
        major, minor, feature, ptx = match.groups(default="")
        if (int(major), int(minor)) >= MIN_CAPABILITY:
            feature = "a" if (major, minor) == ("9", "0") else feature
            chosen.append(f"{major}.{minor}{feature}{ptx}")
    if not chosen:
        raise BuildError(f"none of {requested!r} is {_dotted(MIN_CAPABILITY)} or later")
    return tuple(chosen)


def architecture_flags(names: Iterable[str]) -> tuple[str, ...]:
    """nvcc's flags for names as `architectures` returns them."""
    flags = []
    for name in names:
        real = name.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{real},code=sm_{real}")
        if name.endswith("+PTX"):
            virtual = real.rstrip("af")  # PTX of a feature variant would serve no later GPU
            flags.append(f"-gencode=arch=compute_{virtual},code=compute_{virtual}")
    return tuple(flags)


def kernel_sources() -> tuple[Path, ...]:
    """The files that hold kernels and their launchers: no torch."""
    return tuple(sorted(CSRC.glob("kernels/**/*.cu")))


def binding_sources() -> tuple[Path, ...]:
    """The files that register the kernels as torch operators."""
    return tuple(sorted(CSRC.glob("bindings/*.cpp")))


def kernel_flags(names: Iterable[str]) -> tuple[str, ...]:
    """nvcc's flags for `kernel_sources`, for the architectures `names`."""
    return (*COMMON_FLAGS, *KERNEL_FLAGS, *architecture_flags(names))


def binding_flags(torch: TorchInstall) -> tuple[str, ...]:
    """nvcc's flags for `binding_sources`."""
    return (*COMMON_FLAGS, *BINDING_FLAGS, "-isystem", str(torch.root / "include"))


def fingerprint(sources: Iterable[Path], *parts: str) -> str:
    """A hash of the sources, of every file they include from csrc, and of `parts`."""
    digest = hashlib.sha256(repr(parts).encode())
    for path in sorted(_with_includes(sources)):
        digest.update(f"{path.relative_to(CSRC)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def compile_source(source: Path, nvcc: Nvcc, flags: Sequence[str], folder: Path) -> Path:
    """Compiles one file of csrc into `folder`, unless it holds the result for this text and flags.

    Returns:
        The object file; what the compiler printed lies beside it, with the suffix ``.log``.

    Raises:
        BuildError: the compiler failed; holds what it printed.
    """
    name = folder / f"{source.relative_to(CSRC)}.o"
    key = fingerprint([source], str(nvcc.version), *flags)
    stamp, log = name.with_suffix(".key"), name.with_suffix(".log")
    with locked(name.with_suffix(".lock")):
        if not stamp.exists() or stamp.read_text() != key:
            stamp.unlink(missing_ok=True)
            log.write_text(_run([nvcc.path, *flags, "-c", source, "-o", name]))
            stamp.write_text(key)
    return name


def build(
    library: Path,
    objects: Path,
    nvcc: Nvcc,
    torch: TorchInstall,
    names: Sequence[str],
    report: Callable[[str], None],
) -> None:
    """Builds the shared library that torch.ops.load_library takes.

    MAX_JOBS limits the files compiled at a time; by default it is the number of cores.

    Args:
        library: the file to write; it appears complete or not at all.
        objects: folder of the object files, which a later build reuses.
        names: architectures, as `architectures` returns them.
        report: called with a line of text per file.

    Raises:
        BuildError: a compiler failed.
    """
    kernels, bindings = kernel_sources(), binding_sources()
    flags = {source: kernel_flags(names) for source in kernels}
    flags |= {source: binding_flags(torch) for source in bindings}
    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(jobs)
    pending = {
        pool.submit(compile_source, source, nvcc, flags[source], objects): source
        for source in flags
    }
    try:
        for count, future in enumerate(as_completed(pending), 1):
            future.result()
            report(f"[{count}/{len(pending)}] {pending[future].relative_to(CSRC)}")
    finally:
        pool.shutdown(cancel_futures=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_name(f".{os.getpid()}.{library.name}")
    compiled = [future.result() for future in pending]
    _run([nvcc.path, "-o", partial, *compiled, f"-L{torch.root / 'lib'}", *LINK_FLAGS])
    partial.replace(library)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, created if need be, against other threads and processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _with_includes(sources: Iterable[Path]) -> set[Path]:
    found: set[Path] = set()
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path not in found and path.exists():
            found.add(path)
            names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
            waiting += [Path(os.path.normpath(path.parent / name)) for name in names]
    return found


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode != 0:
        line = " ".join(map(str, command))
        raise BuildError(f"{line}\nended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
