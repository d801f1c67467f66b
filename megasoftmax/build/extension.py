"""Compiles the CUDA part with torch.utils.cpp_extension and ninja: sources, flags, architectures.

setup.py loads this file by its path, in an environment that may lack torch. So only the standard
library is imported at the top.
"""

import ctypes
import hashlib
import heapq
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

PACKAGE = Path(__file__).absolute().parents[1]  # links are not followed: caches link single files
CSRC = PACKAGE / "csrc"
if not (CSRC / "common").is_dir():  # a checkout has it beside the package
    CSRC = PACKAGE.parent / "csrc"
LIBRARY_NAME = "_C.abi3.so"

MIN_TORCH = (2, 11)  # the stable ABI that the bindings are compiled against
MIN_NVCC = (12, 0)  # C++20
MIN_CAPABILITY = (7, 5)  # the first that nvcc 13 knows

# Architecture -> first nvcc that knows it. Code for each runs on later GPUs of its major version
# too, but code for 9.0a on 9.0 alone. 7.5 has no kernels of attention.
DEFAULT_ARCHITECTURES = {
    "7.5": (12, 0),
    "8.0": (12, 0),
    "9.0a": (12, 0),
    "10.0": (12, 8),
    "12.0": (12, 8),
}

CXX_FLAGS = (
    "-std=c++20",
    "-O3",
    "-g0",  # some Pythons ask for debug information, which holds paths of this machine
    "-fvisibility=hidden",
    "-DUSE_CUDA",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # MIN_TORCH
)
# Of csrc/host, which is compiled against all of torch's C++.
HOST_FLAGS = ("-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS")
NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "-Xcompiler=-fvisibility=hidden",
    # cpp_extension forbids arithmetic and conversions of halves, which kernels use.
    *("-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__"),
    *("-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"),
    "-Xptxas=-v",  # the report of registers and spills goes to ninja's output
    "-Xfatbin=-compress-all",  # a fifth of the size
)
# The CUDA runtime is the static one, and hidden, so that it never meets the one that torch loads.
# libtorch has no symbol that the bindings call, but it brings in libtorch_cuda where there is one.
LINK_FLAGS = (
    "-Wl,--exclude-libs,ALL",
    *("-lcudart_static", "-lrt", "-ldl", "-lpthread"),
    *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--as-needed"),
)


class BuildError(RuntimeError):
    """The compiled part cannot be built; the message says why."""


class Nvcc(NamedTuple):
    """A CUDA compiler."""

    path: Path
    version: tuple[int, int]


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


def find_torch() -> Any:
    """The torch of this interpreter, or None."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch


def find_missing() -> str | None:
    """A package that builds need beside torch and that is not installed, or None."""
    if find_spec("setuptools") is None:
        return "setuptools"
    return None if shutil.which("ninja", path=_programs()) else "ninja"


def how_to_install(missing: str) -> str:
    """What the lack of a package means, and the command against it."""
    return f"{missing} is not installed, which compiles (pip install ninja 'setuptools>=77')"


def check_tools() -> Nvcc:
    """The nvcc that builds the compiled part, once torch and other tools are found too.

    Raises:
        BuildError: one is missing or too old; says how to get it.
    """
    nvcc, torch, missing = find_nvcc(), find_torch(), find_missing()
    if torch is None:
        raise BuildError("torch is not importable here (pip needs --no-build-isolation to see it)")
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < MIN_TORCH:
        raise BuildError(f"torch {torch.__version__} is older than {_dotted(MIN_TORCH)}")
    if nvcc is None:
        raise BuildError("no nvcc runs here (install the CUDA toolkit, or point CUDA_HOME to it)")
    if nvcc.version < MIN_NVCC:
        raise BuildError(f"nvcc {_dotted(nvcc.version)} is older than {_dotted(MIN_NVCC)}")
    if missing is not None:
        raise BuildError(how_to_install(missing))
    return nvcc


def why_not_compile(mode: str) -> str | None:
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
        check_tools()
    except BuildError as error:
        if mode == "cuda":
            raise BuildError(f"MEGASOFTMAX_BUILD=cuda, but {error}") from error
        return str(error)
    if mode == "auto" and find_torch().version.cuda is None:
        return "torch is a CPU build (MEGASOFTMAX_BUILD=cuda compiles all the same)"
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


PROGRESS_LINES = 10  # where stderr is no terminal
MOST_FAILURE_LINES = 40  # of an error; the log has all

# Seconds to compile files of kernels on one core of a server, for one architecture, by their names
# without the element type.
_SECONDS = {
    "attention_biased_backward": 15,
    "attention_biased_dense_backward": 15,
    "attention_biased_forward": 20,
    "attention_biased_bias_gradient": 20,
    "attention_biased_hopper_backward": 20,
    "attention_biased_hopper_forward": 14,
    "attention_biased_hopper_bias_gradient": 8,
    "attention_biased_hopper_heads_forward": 20,
    "attention_biased_hopper_keys_backward": 10,
    "attention_biased_hopper_keys_forward": 8,
    "attention_biased_hopper_masked_backward": 14,
    "attention_biased_hopper_rows_backward": 14,
    "attention_biased_hopper_rows_forward": 10,
    "attention_biased_hopper_table_backward": 30,
    "attention_biased_hopper_table_forward": 20,
    "attention_capped_backward": 15,
    "attention_capped_forward": 6,
    "attention_capped_hopper_backward": 10,
    "attention_capped_hopper_forward": 9,
    "attention_hopper_backward": 25,
    "attention_hopper_forward": 22,
    "attention_hopper_heads_backward": 20,
    "attention_portable_backward": 14,
    "attention_portable_forward": 13,
    "attention_steps": 6,
    "columns": 9,
    "softmax_backward": 30,
    "softmax_biased_forward": 25,
    "softmax_biased_masked_forward": 35,
    "softmax_capped_backward": 30,
    "softmax_capped_forward": 25,
    "softmax_dropout_backward": 15,
    "softmax_dropout_biased_backward": 35,
    "softmax_dropout_forward": 25,
    "softmax_forward": 25,
    "softmax_masked_forward": 15,
    "topk_backward": 20,
    "topk_capped_forward": 15,
    "topk_forward": 15,
    "topk_tiles_forward": 10,
}


# The library of all sources outside instances/.
OPERATORS = "operators"
# Each prefix of launchers' names has one library of kernels for each element type. The longest
# prefix that fits counts.
_GROUPS = (
    *("attention", "attention_biased", "attention_biased_hopper_keys"),
    *("attention_biased_hopper_masked", "attention_biased_hopper_rows"),
    *("attention_biased_hopper_table", "attention_capped", "attention_hopper_heads"),
    "attention_steps",  # launches before and after those of tiles
    *("columns", "softmax", "softmax_biased", "softmax_capped", "softmax_dropout"),
    *("topk", "topk_capped", "topk_tiles"),
)
# Every library of kernels has these files, too.
_COMMON = ("common/device.cu", "common/kernels.cpp")


def sources(component: str | None = None) -> list[Path]:
    """The files to compile, the slowest first, so that no slow one is left for the end.

    Args:
        component: OPERATORS, or one of `libraries_of_kernels`; None: all files.
    """
    files = [*CSRC.rglob("*.cu"), *CSRC.rglob("*.cpp")]
    files = [path for path in files if path.parent != CSRC / "host"]
    if component is not None:
        files = [path for path in files if _component_of(path) == component]
        if component != OPERATORS:
            files += [CSRC / name for name in _COMMON]
    return sorted(sorted(files), key=seconds_to_compile, reverse=True)


def libraries_of_kernels() -> list[str]:
    """The libraries of kernels, such as softmax_float16."""
    return sorted({_component_of(path) for path in sources()} - {OPERATORS})


def library_of(launcher: str) -> str:
    """The library of kernels that has a launcher: softmax_float16 of softmax_forward_float16."""
    name, _, element_type = launcher.rpartition("_")
    fitting = (each for each in _GROUPS if f"{name}_".startswith(f"{each}_"))
    group = max(fitting, key=len, default=name)
    return f"{group}_{element_type}"


def _component_of(source: Path) -> str:
    return library_of(source.stem) if source.parent.name == "instances" else OPERATORS


def seconds_to_compile(source: Path) -> float:
    """A rough estimate, for the progress of a build."""
    if source.stem.startswith("host"):
        return 20
    if source.suffix != ".cu":
        return 3
    return _SECONDS.get(re.sub(r"_(b?float\d+|tf32)$", "", source.stem), 3)


def cxx_flags() -> list[str]:
    """The C++ compiler's flags. Messages do not name the folder of torch on this machine."""
    import torch

    return [*CXX_FLAGS, f"-fmacro-prefix-map={Path(torch.__file__).parent}=torch"]


def nvcc_flags(names: Iterable[str]) -> list[str]:
    """nvcc's flags for names as `architectures` returns them."""
    flags = [*NVCC_FLAGS]
    for name in names:
        real = name.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{real},code=sm_{real}")
        if name.endswith("+PTX"):
            virtual = real.rstrip("af")  # PTX of a feature variant would serve no later GPU
            flags.append(f"-gencode=arch=compute_{virtual},code=compute_{virtual}")
    return flags


def fingerprint(*parts: str, has_kernels: bool = True) -> str:
    """A hash of `parts` and of all files of csrc, or of those without kernels."""
    digest = hashlib.sha256(repr(parts).encode())
    for path in sorted(CSRC.rglob("*")):
        if path.is_file() and (has_kernels or path.suffix not in (".cu", ".cuh")):
            digest.update(f"{path.relative_to(CSRC)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@contextmanager
def toolchain(nvcc: Nvcc) -> Iterator[None]:
    """Lets cpp_extension find the CUDA toolkit of `nvcc`, and ninja, until the block ends.

    `load` links the libraries that it is given alone: a CPU build of torch lacks others.
    """
    from torch.utils import cpp_extension

    def link_flags(given: Sequence[str], *others: object) -> list[str]:
        return [*given, *(f"-L{path}" for path in cpp_extension.library_paths("cuda"))]

    # The nvcc on the PATH may be a script or a link elsewhere, without headers beside it.
    dry = subprocess.run([nvcc.path, "--dryrun", "-c", "_.cu"], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", dry.stderr, re.MULTILINE)
    home = Path(top[1].strip()).resolve() if top else nvcc.path.parents[1]
    with (
        patch.object(cpp_extension, "CUDA_HOME", str(home)),
        patch.object(cpp_extension, "_prepare_ldflags", link_flags),
        programs(),
    ):
        yield


@contextmanager
def programs() -> Iterator[None]:
    """Lets cpp_extension find ninja, for as many jobs as there are cores, until the block ends."""
    given = {"PATH": _programs(), "MAX_JOBS": str(jobs())}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:  # other threads may have changed other variables
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def jobs() -> int:
    """How many files are compiled at a time: MAX_JOBS, or the number of cores.

    Raises:
        BuildError: MAX_JOBS is not a whole number from 1 on.
    """
    given = os.environ.get("MAX_JOBS", "").strip()
    if not given:
        return len(os.sched_getaffinity(0))  # ninja's own default is two more
    if not given.isdecimal() or int(given) == 0:
        raise BuildError(f"MAX_JOBS: expected a whole number from 1 on, got {given!r}")
    return int(given)


@contextmanager
def ninja(log: Path) -> Iterator[None]:
    """Lets cpp_extension run ninja so that it ends with this process, until the block ends.

    Args:
        log: a file to which what ninja prints is added.

    Raises:
        BuildError: a compiler failed; has what it printed, and names the log.
    """
    from torch.utils import cpp_extension

    def run(folder: str, verbose: bool, error_prefix: str) -> None:
        for path in (folder, str(CSRC)):
            if re.search(r"[$:\n]", path):
                raise BuildError(f"ninja: expected a path without '$' and ':', got {path}")
        with log.open("ab") as printed:
            before = printed.tell()
            process = subprocess.Popen(
                ["ninja", "-v", "-j", str(jobs())],
                cwd=folder,
                stdout=printed,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,
            )
            try:
                code = process.wait()
            except BaseException:
                process.terminate()  # which ends its compilers
                process.wait()
                raise
        if code != 0:
            text = log.read_bytes()[before:].decode(errors="replace")
            raise BuildError(f"{first_failure(text)}\nThe whole log: {log}")

    with patch.object(cpp_extension, "_run_ninja_build", run):
        yield


def _end_with_parent() -> None:
    """Asks Linux to end this process when its parent ends, however that ends."""
    if _prctl is not None:
        _prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM


_prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None


def setup_arguments(name: str, nvcc: Nvcc, architectures: Iterable[str]) -> dict[str, Any]:
    """What setuptools' setup takes to build the compiled part as the extension `name`."""
    import torch
    from setuptools import Extension
    from setuptools.errors import CCompilerError, CompileError
    from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths

    link = f"{os.environ.get('CXX', 'c++')} -shared"

    class BuildLibrary(BuildExtension):
        """Tells how far it is. `log` gets what the compilers print."""

        log: Path | None = None  # by default it lies beside the objects

        def run(self) -> None:
            objects = Path(self.build_temp)
            log = self.log or (objects / "log").absolute()
            log.parent.mkdir(parents=True, exist_ok=True)
            try:
                with progress(objects, sources()), ninja(log), _stdout_into(log):
                    self._compile()
            except RuntimeError as error:  # a BuildError, or torch refuses the C++ compiler
                raise CompileError(str(error)) from error
            except CCompilerError as error:  # of the linker
                raise CompileError(f"{error}\nThe whole log: {log}") from error

        def _compile(self) -> None:
            with (
                toolchain(nvcc),
                # cpp_extension refuses a CUDA of another major version than torch's, but the result
                # shares no CUDA library with torch. With a CPU build of torch, ninja would not
                # notice that a header changed.
                patch.object(torch.version, "cuda", _dotted(nvcc.version)),
                # Otherwise Python's own flags put the folder of its libraries into the result.
                patch.dict(os.environ, LDSHARED=link, LDCXXSHARED=link),
                locked(Path(self.build_temp, "lock")),
            ):
                super().run()

    with toolchain(nvcc):
        # No CUDAExtension: it links libraries that a CPU build of torch does not have.
        extension = Extension(
            name,
            [str(path) for path in sources()],
            include_dirs=include_paths("cuda"),
            library_dirs=library_paths("cuda"),
            extra_compile_args={"cxx": cxx_flags(), "nvcc": nvcc_flags(architectures)},
            extra_link_args=[*LINK_FLAGS],
            py_limited_api=True,
        )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildLibrary}}


def build(folder: Path, objects: Path, nvcc: Nvcc, architectures: Iterable[str], log: Path) -> Path:
    """Builds the library that torch.ops.load_library takes.

    Args:
        folder: gets the library, which appears complete or not at all.
        objects: folder of the object files, which a later build reuses.
        log: a file to which what ninja prints is added.

    Raises:
        BuildError: a compiler failed; has what it printed, and names the log.
    """
    from setuptools import Distribution
    from setuptools.errors import CCompilerError

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        distribution = Distribution(setup_arguments("_C", nvcc, architectures))
        command = distribution.get_command_obj("build_ext")
        command.build_lib, command.build_temp, command.log = partial, str(objects), log
        command.ensure_finalized()
        try:
            command.run()
        except CCompilerError as error:
            raise BuildError(str(error)) from error
        built = Path(partial, LIBRARY_NAME)
        sync(built)
        return built.replace(folder / LIBRARY_NAME)


def sync(path: Path) -> None:
    """Waits until a file is on the disk, so that no crash leaves a part of it under a new name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def progress(folder: Path, sources: Sequence[Path], what: str = "all kernels") -> Iterator[None]:
    """Tells on stderr how far a build is, until the block ends: a bar, or lines without a terminal.

    ninja itself could only write to stdout.

    Args:
        folder: gets the object files, each with the name of its source.
        sources: the files to compile.
        what: the name of the build in the messages.
    """
    ended, start = threading.Event(), time.time()
    seconds = {source.stem: seconds_to_compile(source) for source in sources}
    is_terminal = sys.stderr.isatty()

    def estimate(files: list[Path]) -> float:
        # Files of an earlier build do not show the speed of this one.
        compiled = [file for file in files if file.stat().st_mtime > start]
        earlier = {file.name.partition(".")[0] for file in {*files} - {*compiled}}
        taken = [seconds[name] for name in seconds if name not in earlier]
        return seconds_left(time.time() - start, len(compiled), taken, jobs())

    def tell(done: int, left: float) -> None:
        text = f"megasoftmax: compiling {what}, once: {done} of {len(sources)} files, "
        text += f"about {duration(left)} left" if done < len(sources) else "linking"
        if is_terminal:
            bar = "#" * (20 * done // len(sources))
            text = f"\r[{bar:20}] {text}\x1b[K"  # up to the end of the line
        print(text, end="" if is_terminal else "\n", file=sys.stderr, flush=True)

    def report() -> None:
        before, lines_before, left, changed = -1, -1, 0.0, start
        while before < 0 or not ended.wait(1):
            files = [*folder.rglob("*.o")]
            if len(files) != before:
                before, left, changed = len(files), estimate(files), time.time()
            lines = PROGRESS_LINES * before // len(sources)
            if is_terminal or lines > lines_before:
                tell(before, max(left - (time.time() - changed), 0))
                lines_before = lines
        if is_terminal:
            print(file=sys.stderr)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def seconds_left(elapsed: float, compiled: int, seconds: Sequence[float], jobs: int) -> float:
    """How long a build still takes, from the seconds that its files usually take.

    Before a file is compiled this is the time of a machine like that of `seconds_to_compile`.

    Args:
        elapsed: seconds until now, when the last file ended.
        compiled: how many files ended.
        seconds: of all files, in the order in which they begin.
        jobs: how many files are compiled at a time.
    """
    free, ends = [0.0] * jobs, []  # when a job begins its next file, and when files would end
    for each in seconds:
        ends.append(heapq.heappop(free) + each)
        heapq.heappush(free, ends[-1])
    ends.sort()
    if not 0 < compiled <= len(ends):
        return ends[-1] if ends else 0.0
    return elapsed * (ends[-1] / ends[compiled - 1] - 1)


def duration(seconds: float) -> str:
    """In words: seconds below a minute and a half, else minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def first_failure(printed: str) -> str:
    """What ninja printed of the first file that did not compile, and at most its first lines."""
    failed = printed[max(printed.find("FAILED:"), 0) :]
    lines = re.split(r"^\[\d+/\d+\] ", failed, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    more = len(lines) - MOST_FAILURE_LINES
    if more > 0:
        lines[MOST_FAILURE_LINES:] = [f"... {more:,} more lines"]
    return "\n".join(lines)


@contextmanager
def _stdout_into(file: Path) -> Iterator[None]:
    """Adds what this process and its children print to a file, until the block ends."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with file.open("ab") as opened:
        os.dup2(opened.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            os.close(stdout)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, created if need be, against other threads and processes.

    Says so on stderr if it waits for another one.
    """
    import fcntl  # not on Windows, where the package runs without a compiled part

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"megasoftmax: waiting for another process, which compiles into {path.parent}",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing does not unlock what a fork has open, too


def _programs() -> str:
    """PATH, and the folder where pip puts ninja, which PATH may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
