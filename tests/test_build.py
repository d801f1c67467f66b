"""What gets built, found and loaded, and that no kernel spills."""

import ctypes
import functools
import hashlib
import inspect
import io
import itertools
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from inputs import command, record_calls
from processes import write_compilers
from sanitize_cases import table_of
from torch.utils import cpp_extension

from megasoftmax.build import extension, library
from megasoftmax.build.extension import CSRC, BuildError, Nvcc
from megasoftmax.build.library import Status
from megasoftmax.limits import kernel_limits, read_limits

NVCC = Nvcc(Path("nvcc"), (13, 0))
CUDA_TORCH = SimpleNamespace(__version__="2.13.0+cu130", version=SimpleNamespace(cuda="13.0"))
CPU_TORCH = SimpleNamespace(__version__="2.13.0+cpu", version=SimpleNamespace(cuda=None))
OLD_TORCH = SimpleNamespace(__version__="2.10.1", version=SimpleNamespace(cuda="13.0"))
OLD_NVCC = Nvcc(Path("nvcc"), (11, 8))
LIMITS_HEADER = (CSRC / "softmax/limits.h").read_text()
ZERO_BYTES = int(re.search(r"kZeroBytes = (\d+)", (CSRC / "common/limits.h").read_text())[1])
ATTENTION_TILES = {
    name.lower(): table_of("attention/limits.h", f"kAttention{name}Tiles")
    for name in ("Forward", "Backward")
}
# --fast-types looks at what kernels of bfloat16 spill, and not at those of other types. Float16's
# differ from them in single instructions. Of a row of float32 a thread has half as many elements.
# Kernels of float32 have spills of their own, which only a run without the option checks. None of
# another type declares a larger array in shared memory.
OTHER_TYPES = re.compile(r"\w+_(float16|float32|tf32)")
# ptxas reads these of them, because they have all instructions in assembly that no kernel of
# bfloat16 has. It parses all kernels of a file, and makes code of an empty one alone, which the
# script adds. Only the run without the option checks the shared memory that they declare.
# The others end when the compiler's front-end has instantiated their templates.
READ_BY_PTXAS = re.compile(
    r"attention_(\w+_)?backward_float16|attention_(portable|biased)_forward_float32"
)
# Files of bfloat16 that did not change pass the front-end alone, too. A line has what _digest
# returned when the kernels of a file passed this test, and its path in csrc.
CHECKED_KERNELS = Path(__file__).with_name("checked_kernels.txt")
EMPTY_KERNEL = """\
template <int>
__global__ void empty() {}
template __global__ void empty<0>();
"""
FAST_TYPES = """\
#!/bin/sh
case "$*" in
  {read_by_ptxas})
    set -- --Ofast-compile=max -include {empty} -Xptxas=--entry=_Z5emptyILi0EEvv "$@" ;;
  {fast}) set -- -fdevice-syntax-only "$@" ;;
esac
exec {nvcc} "$@"
"""
# Hopper's kernels for capped scores (HopperBias 3) at a head dimension of 64 (row 2 of the table)
# need more registers backward than there are.
SERIALIZED = re.compile(r"hopper_backward_kernel\w*HopperBiasE3\w*HopperMaskE0ELb[01]ELi2E")
# In the commands that ninja prints.
COMPILED = re.compile(rf"-c ({re.escape(str(CSRC))}\S+\.cu) -o ")


def _spills(log: str, allowed_bytes: int = 0, **of_others: int) -> tuple[list[str], int]:
    """The kernels that ptxas reports to spill more, and how many functions it reports on.

    Args:
        of_others: allowed in kernels that have such a word in their names.
    """
    architecture, found, count = "", [], 0
    lines = log.splitlines()
    for line, following in itertools.pairwise(lines):
        if entry := re.search(r"Compiling entry function '.*' for '(\w+)'", line):
            architecture = entry[1]
        if function := re.search(r"Function properties for (\S+)", line):
            count += 1
            sizes = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", following)
            assert len(sizes) == 3, f"ptxas's report is not understood: {following!r}"
            of_kernel = (most for word, most in of_others.items() if f"{word}_" in function[1])
            allowed = next(of_kernel, allowed_bytes)
            if any(int(size) > allowed for size, _ in sizes):
                found.append(f"{architecture}: {function[1]}: {following.strip()}")
    return found, count


def _allowed(source: Path, what: str, kernels: str = "") -> int:
    """In bytes: what limits.h says of some kernels of the family, or of the others, else none."""
    family = source.relative_to(CSRC).parts[0]
    header = (CSRC / family / "limits.h").read_text()
    limits = dict(re.findall(rf"int k(\w*)Max{what}Bytes = (\d+);", header))
    if kernels:
        return int(limits.get(kernels, 0))
    of_types = (("float32", "Float"), ("float32", "FloatRow"), ("tf32", "Float"))
    for name, prefix in (("hopper", "Hopper"), *of_types):
        of_kind = limits.get(prefix)
        if name in source.name and of_kind is not None:
            return int(of_kind)
    of_kinds = ("Hopper", "Float", "FloatRow", "Contiguous", "Small")
    limits = {name: limit for name, limit in limits.items() if name not in of_kinds}
    return int(next(iter(limits.values()), 0))


def _kernels(source: Path, objects: Path) -> set[str]:
    """Their names, as if float16 was bfloat16."""
    compiled = objects / source.relative_to("/").with_suffix(".o")
    names = re.findall(r" (_ZN11megasoftmaxL?\d+\w*_kernelI\w+)", _output("nm", compiled))
    return {name.replace("6__half", "13__nv_bfloat16") for name in names}


def _declared(log: str, besides: int = 0, *, contiguous: bool = False) -> int:
    """The most shared memory that a kernel declares itself, as ptxas reports it.

    Args:
        besides: an array that some of the kernels have besides, larger than all that others have.
        contiguous: only kernels of contiguous rows, else the others.
    """
    pattern = r"Function properties for (\S+)\n.*\n.*?(\d+) bytes smem"
    sizes = [
        int(size)
        for name, size in re.findall(pattern, log)
        if ("contiguous_" in name) == contiguous
    ]
    return max((size - besides if size >= besides else size for size in sizes), default=0)


def _without_registers(log: str) -> list[str]:
    """Kernels of attention's tables of which not as many blocks run at a time as the table says."""
    function = r"attention_(forward|backward)_kernelI\S*?ELb[01]ELi(\d+)EEE"
    found = []
    for name, direction, row, registers in re.findall(
        rf"Function properties for (\S*{function}\S*)\n.*\n.*Used (\d+) registers", log
    ):
        _, warps, _, _, blocks, *_ = ATTENTION_TILES[direction][int(row)]
        if -(-int(registers) // 8) * 8 * 32 * int(warps) * int(blocks) > 65536:  # of all GPUs
            found.append(name)
    return found


def _logs(printed: str) -> dict[Path, str]:
    """What the compiler said about each source, in what ninja printed."""
    parts = COMPILED.split(printed)
    return dict(zip(map(Path, parts[1::2]), parts[2::2], strict=True))


def _digest(source: Path, nvcc: Nvcc, architectures: tuple[str, ...]) -> str:
    """Changes when nvcc, its flags, the code of a file or the rules of this test change."""
    flags = [*cpp_extension.COMMON_NVCC_FLAGS, *extension.nvcc_flags(architectures)]
    given = [os.environ.get(f"NVCC_{when}_FLAGS", "") for when in ("PREPEND", "APPEND")]
    rules = map(inspect.getsource, (_spills, _allowed, _declared, _without_registers))
    lines = _output(nvcc.path, *flags, "-E", source).splitlines()
    # Without the lines that tell the names of files. Those of #pragma count.
    code = [line for line in lines if line and not line.startswith("# ")]
    text = [_output(nvcc.path, "--version"), *flags, *given, *rules, SERIALIZED.pattern, *code]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


@pytest.mark.nvcc
def test_library_builds_with_any_torch_and_no_kernel_spills_more_than_allowed(
    tmp_path, pytestconfig
):
    """For 9.0a, which has all kernels, or for what TORCH_CUDA_ARCH_LIST says."""
    # nvcc 13 knows --Ofast-compile and -fdevice-syntax-only.
    nvcc = extension.find_nvcc()
    is_fast = pytestconfig.getoption("--fast-types") and nvcc.version >= (13, 0)
    sources = [*CSRC.rglob("*.cu")]
    of_other_types = [each for each in sources if OTHER_TYPES.fullmatch(each.stem)]
    environment = {"TORCH_CUDA_ARCH_LIST": "9.0a", **os.environ}
    architectures = extension.architectures(nvcc.version, environment["TORCH_CUDA_ARCH_LIST"])
    has_record = is_fast and architectures == ("9.0a",)
    records = pytestconfig.getoption("--record-kernels")
    assert has_record or not records, "only with --fast-types, nvcc 13 and code for 9.0a"
    fast = [*of_other_types] if is_fast else []
    lines: dict[Path, str] = {}
    if has_record:
        of_bfloat16 = sorted(CSRC.rglob("*_bfloat16.cu"))
        with ThreadPoolExecutor() as pool:
            digests = pool.map(lambda each: _digest(each, nvcc, architectures), of_bfloat16)
        for path, digest in zip(of_bfloat16, digests, strict=True):
            lines[path] = f"{digest} {path.relative_to(CSRC).as_posix()}\n"
        checked = CHECKED_KERNELS.read_text().splitlines(keepends=True)
        fast += [path for path, line in lines.items() if line in checked]
        if changed := [path.name for path in of_bfloat16 if path not in fast]:
            warnings.warn(f"compiled, since they changed: {', '.join(changed)}", stacklevel=1)
    # Objects of an earlier run may be of another nvcc, or of the front-end alone.
    name = "fast_objects" if is_fast else "objects"
    objects = tmp_path / name if records else Path(pytestconfig.cache.mkdir(name))
    objects.mkdir(exist_ok=True)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "megasoftmax", "build"]
    command += ["--out", str(out), "--objects", str(objects)]
    if is_fast:
        script = objects / "nvcc"
        read = [each for each in of_other_types if READ_BY_PTXAS.fullmatch(each.stem)]
        read_names, names = ("|".join(f"*/{f.name}*" for f in files) for files in (read, fast))
        nvcc_name = shlex.quote(str(nvcc.path))
        empty = objects / "empty.cuh"
        empty.write_text(EMPTY_KERNEL)
        os.utime(empty, (0, 0))  # ninja compares times: with a new one a later build compiles all
        given = {"empty": shlex.quote(str(empty)), "nvcc": nvcc_name}
        text = FAST_TYPES.format(read_by_ptxas=read_names, fast=names, **given)
        script.write_text(text)
        script.chmod(0o755)
        environment["PYTORCH_NVCC"] = shlex.quote(str(script))
    # Elsewhere, so that an installed package is not passed over for that of the checkout.
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    assert len(done.stdout.splitlines()) < 5
    log = objects / "log"  # a later build compiles only what changed, and adds to it

    binary = out / extension.LIBRARY_NAME
    assert [*out.iterdir()] == [binary]
    symbols = _output("nm", "-D", "--undefined-only", binary)
    assert "torch_library_impl" in symbols
    assert "w aoti_torch_get_current_cuda_stream" in symbols  # CPU builds of torch load it too
    # The CUDA runtime is inside, and no C++ symbol of torch's unstable ABI is asked for.
    assert "cudaLaunchKernel" not in symbols
    assert not re.findall(r"_ZNK?(?:2at|3c10|5torch)\w+|\bPy\w+", symbols)
    dynamic = _output("readelf", "-d", binary)
    assert not re.search("cuda|python|RUNPATH|RPATH", dynamic)
    assert str(Path(torch.__file__).parent).encode() not in binary.read_bytes()

    logs = _logs(log.read_text())
    found = []
    for source in sources:
        if source.stem.endswith("_float16"):
            other = source.with_name(source.name.replace("_float16", "_bfloat16"))
            kernels = _kernels(source, objects)
            assert kernels == _kernels(other, objects)
            assert kernels
        # Plans count on it: see tests/test_gpus.py.
        zeros = ZERO_BYTES if source.name.startswith("softmax_") else 0
        assert _declared(logs[source], zeros) <= _allowed(source, "Declared"), source
        of_contiguous = _declared(logs[source], contiguous=True)
        assert of_contiguous <= _allowed(source, "Declared", "Contiguous"), source
        # If registers do not suffice, or for other reasons, ptxas lets each product of a warpgroup
        # wait for the one before.
        serialized = re.findall(r"instructions are serialized.*function '(\S+)'", logs[source])
        assert all(SERIALIZED.search(name) for name in serialized), serialized
        if source in fast:
            continue
        of_others = {
            word: _allowed(source, "Spilled", word.title()) for word in ("contiguous", "small")
        }
        spilled, count = _spills(logs[source], _allowed(source, "Spilled"), **of_others)
        assert not _without_registers(logs[source])
        # Functions that are not inlined are reported too.
        assert count >= logs[source].count("Compiling entry function")
        assert count > 0, f"{source}: ptxas reported nothing; run pytest --cache-clear"
        found += spilled
    if found:
        text = "\n".join(found)
        pytest.fail(subprocess.run(["c++filt"], input=text, capture_output=True, text=True).stdout)
    if records:
        CHECKED_KERNELS.write_text("".join(lines.values()))


@pytest.mark.nvcc
def test_digest_is_of_what_nvcc_compiles(tmp_path: Path) -> None:
    nvcc = extension.find_nvcc()
    copy = shutil.copytree(CSRC, tmp_path / "csrc")
    name = "attention/instances/attention_hopper_forward_bfloat16.cu"
    before = _digest(CSRC / name, nvcc, ("9.0a",))
    assert _digest(copy / name, nvcc, ("9.0a",)) == before
    assert _digest(copy / name, nvcc, ("9.0",)) != before
    header = copy / "attention/sm90/forward.cuh"
    code = header.read_text()
    header.write_text(f"{code}\n// A comment.\n")
    assert _digest(copy / name, nvcc, ("9.0a",)) == before
    # Of a kernel that only code for 9.0a has.
    for old, new in (
        ("#pragma unroll\n", "#pragma unroll 1\n"),
        ("first_step = 0", "first_step = 1"),
    ):
        header.write_text(code.replace(old, new))
        assert _digest(copy / name, nvcc, ("9.0a",)) != before, old


def _output(*command: object) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_spill_report_is_understood():
    log = """\
ptxas info    : Compiling entry function '_Z1fv' for 'sm_80'
ptxas info    : Function properties for _Z1fv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z1gv' for 'sm_90a'
ptxas info    : Function properties for _Z1gv
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
"""
    found, count = _spills(log)
    assert count == 2
    assert found == [
        "sm_90a: _Z1gv: 16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads"
    ]
    as_contiguous = log.replace("_Z1gv", "_Z18contiguous_forwardv")
    assert _spills(as_contiguous, contiguous=16) == ([], 2)
    assert _spills(as_contiguous, 16, contiguous=0)[0]
    assert _spills(log, contiguous=16) == (found, 2)
    assert _declared(log) == 0
    with_array = log + "ptxas info : Used 9 registers, 1 barriers, 24 bytes smem"
    assert _declared(with_array) == _declared(with_array, 25) == 24
    assert _declared(with_array, 20) == 4
    assert _declared(with_array, contiguous=True) == 0
    name = (
        "_ZN11megasoftmax24attention_forward_kernelI6__halfLNS_8BiasKindE0ELb1ELi1EEEvNS_6ParamsE"
    )
    for registers, is_found in ((168, False), (169, True)):  # 3 blocks of 4 warps
        report = f"ptxas info    : Function properties for {name}\n    0 bytes stack frame\n"
        report += f"ptxas info    : Used {registers} registers, used 1 barriers"
        assert _without_registers(report) == [name] * is_found
    assert _spills(log, 15)[0] == found
    assert _spills(log, 16)[0] == []


@pytest.fixture
def tools(monkeypatch):
    """Pretends that a machine has these tools."""

    def pretend(nvcc, torch_install, missing=None):
        monkeypatch.setattr(extension, "find_nvcc", lambda: nvcc)
        monkeypatch.setattr(extension, "find_torch", lambda: torch_install)
        monkeypatch.setattr(extension, "find_missing", lambda: missing)

    return pretend


@pytest.mark.parametrize(
    ("mode", "found", "reason"),
    [
        ("none", (NVCC, CUDA_TORCH), "MEGASOFTMAX_BUILD=none"),
        ("auto", (NVCC, CUDA_TORCH), None),
        ("auto", (NVCC, CPU_TORCH), "CPU build"),
        ("auto", (NVCC, None), "--no-build-isolation"),
        ("auto", (NVCC, OLD_TORCH), "older than 2.11"),
        ("auto", (None, CUDA_TORCH), "no nvcc runs here"),
        ("auto", (OLD_NVCC, CUDA_TORCH), "older than 12.0"),
        ("auto", (NVCC, CUDA_TORCH, "ninja"), "pip install ninja"),
        ("cuda", (NVCC, CUDA_TORCH), None),
        ("cuda", (NVCC, CPU_TORCH), None),
    ],
)
def test_installation_compiles_or_says_why_not(tools, mode, found, reason):
    tools(*found)
    answer = extension.why_not_compile(mode)
    assert (answer is None) == (reason is None)
    assert reason is None or reason in answer


@pytest.mark.parametrize(
    ("mode", "found", "message"),
    [
        ("cuda", (None, CUDA_TORCH), "MEGASOFTMAX_BUILD=cuda, but no nvcc runs here"),
        ("cuda", (NVCC, None), "MEGASOFTMAX_BUILD=cuda, but torch is not importable"),
        ("cuda", (NVCC, OLD_TORCH), "torch 2.10.1 is older than 2.11"),
        ("gpu", (NVCC, CUDA_TORCH), "must be auto, cuda or none, not 'gpu'"),
    ],
)
def test_installation_that_cannot_compile_fails(tools, mode, found, message):
    tools(*found)
    with pytest.raises(BuildError, match=message):
        extension.why_not_compile(mode)


def test_installation_with_an_old_setuptools_says_so(tmp_path):
    (tmp_path / "setuptools.py").write_text("__version__ = '65.5.0'\nsetup = None\n")
    setup = Path(__file__).parents[1] / "setup.py"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, setup, "--version"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stderr == (
        "megasoftmax: setuptools 65.5.0 is older than 77 (pip install --upgrade setuptools)\n"
    )


@pytest.mark.parametrize(
    ("version", "requested", "names"),
    [
        ((13, 0), None, ("7.5", "8.0", "9.0a", "10.0", "12.0+PTX")),
        ((12, 8), "", ("7.5", "8.0", "9.0a", "10.0", "12.0+PTX")),
        ((12, 7), None, ("7.5", "8.0", "9.0a+PTX")),
        ((13, 0), "9.0a", ("9.0a",)),
        ((13, 0), "7.0 8.0;8.6 9.0 12.0+PTX", ("8.0", "8.6", "9.0a", "12.0+PTX")),
        ((13, 0), "7.5+PTX", ("7.5+PTX",)),
    ],
)
def test_architectures(version, requested, names):
    assert extension.architectures(version, requested) == names


@pytest.mark.parametrize("requested", ["Hopper", "sm_90", "7.0"])
def test_architectures_without_kernels_are_refused(requested):
    with pytest.raises(BuildError, match=requested):
        extension.architectures((13, 0), requested)


def test_architecture_flags():
    assert extension.nvcc_flags(("7.5+PTX",))[-2:] == [
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_75,code=compute_75",
    ]
    assert extension.nvcc_flags(("8.0", "9.0a+PTX"))[-3:] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    ]


@pytest.mark.parametrize(
    ("gpu", "jit", "nvcc", "reason"),
    [
        (False, "1", NVCC, "torch sees no CUDA GPU"),
        (True, "0", NVCC, "MEGASOFTMAX_JIT=0"),
        (True, "1", None, "no nvcc runs here"),
    ],
)
def test_load_warns_once_and_says_why(nothing_loaded, monkeypatch, tools, gpu, jit, nvcc, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    tools(nvcc, CUDA_TORCH)
    monkeypatch.setenv("MEGASOFTMAX_JIT", jit)
    assert reason in library.status().reason
    with pytest.warns(RuntimeWarning, match=reason) as warned:
        first, second = library.load(), library.load()
    assert len(warned) == 1
    assert second is first
    assert not first.available
    assert library.status() is first


def test_library_that_cannot_be_loaded_is_a_reason(nothing_loaded):
    library._LIBRARY.write_text("not a library")
    with pytest.warns(RuntimeWarning, match="plain-torch path.* build --package` compiles them"):
        status = library.load()
    assert not status.available
    assert extension.LIBRARY_NAME in status.reason


def test_library_of_other_sources_is_a_reason(nothing_loaded):
    library._LIBRARY.symlink_to(Path(torch.__file__).parent / "lib" / "libc10.so")
    with pytest.warns(RuntimeWarning, match="megasoftmax_register"):
        assert not library.load().available


def test_load_is_a_constant_to_torch_compile(nothing_loaded, monkeypatch):
    calls = []
    monkeypatch.setattr(library, "_load", lambda: calls.append("load") or Status(True))

    @torch.compile(fullgraph=True, backend="eager")
    def double_when_available(x):
        return 2 * x if library.load().available else x

    assert double_when_available(torch.ones(1)).item() == 2
    assert calls == ["load"]


@pytest.fixture
def small_sources(nothing_loaded, monkeypatch, tmp_path):
    """A GPU, as far as Python knows, and sources that compile in seconds with any torch."""
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "kernel.cu").write_text(
        '#include "value.h"\n'
        "__global__ void kernel(int* x) { *x = VALUE; }\n"
        "void launch(int* x) { kernel<<<1, 1>>>(x); }\n"
    )
    (csrc / "value.h").write_text("#define VALUE 1\n")
    (csrc / "register.cpp").write_text(
        "void launch(int*);\n"
        '#define EXPORTED __attribute__((visibility("default")))\n'
        "EXPORTED void (*used)(int*) = launch;\n"
        'extern "C" EXPORTED void megasoftmax_register(char*) {}\n'
        'extern "C" EXPORTED void megasoftmax_set_kernel_finder(void*) {}\n'
    )
    monkeypatch.setattr(extension, "CSRC", csrc)
    sources = [csrc / "kernel.cu", csrc / "register.cpp"]
    monkeypatch.setattr(extension, "sources", lambda kernels=None: sources)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    return csrc


@pytest.mark.nvcc
def test_library_is_built_once_on_first_use(small_sources, monkeypatch, capfd):
    status = library.load()
    assert status.available, status.reason
    printed = capfd.readouterr()
    assert "megasoftmax: compiling operators, once: 0 of 2 files, about " in printed.err
    assert not printed.out
    names = {file.name for file in status.path.parent.iterdir()}
    assert names == {"lock", "log", "seal", status.path.name}
    assert not re.search("cuda|python|RUNPATH|RPATH", _output("readelf", "-d", status.path))
    assert stat.S_IMODE(status.path.parent.stat().st_mode) == 0o700
    assert library._find_or_build(extension.OPERATORS) == status.path
    assert not capfd.readouterr().err
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(extension, "find_nvcc", lambda: None)
    assert library.status() == status  # a build of another process needs no compiler
    assert library.load() == status


@pytest.mark.nvcc
def test_first_use_of_two_at_once_and_after_a_header_changed(small_sources, monkeypatch):
    compiled = record_calls(monkeypatch, "_compile", library)
    run, environment = cpp_extension._run_ninja_build, dict(os.environ)
    with ThreadPoolExecutor() as threads:
        names = ["softmax_float16", "softmax_float16", "topk_float32"]
        first, same, other = threads.map(library._find_or_build, names)
    assert same == first != other
    assert len(compiled) == 2
    assert (cpp_extension._run_ninja_build, dict(os.environ)) == (run, environment)
    (small_sources / "value.h").write_text("#define VALUE 2\n")
    second = library._find_or_build("softmax_float16")
    assert len(compiled) == 3
    assert first.exists()
    assert second.exists()
    assert first != second


@pytest.mark.nvcc
def test_command_builds_into_the_cache_for_this_gpu(small_sources, monkeypatch, capfd):
    """And prints what is left; the first CUDA tensor finds the library."""
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(extension, "PACKAGE", small_sources / "no such folder")
    first, second = (command("build") for _ in range(2))
    assert "Compiling for 9.0a with " in first.output
    assert "compiling all kernels, once: 0 of 2 files, about " in first.output
    assert ", once" not in second.output
    assert "kernel.cu" not in capfd.readouterr().out
    built = Path(re.search(r"Built (\S+)", second.output)[1])
    assert library.status() == Status(True, built)
    assert stat.S_IMODE(built.parent.stat().st_mode) == 0o700
    assert {file.name for file in built.parent.iterdir()} == {"lock", "log", "seal", built.name}
    assert not (small_sources / "no such folder").exists()

    (small_sources / "value.h").write_text("#error no value\n")
    result = command("build", code=1)
    assert "Error: FAILED:" in result.output
    assert "no value" in result.output


def test_command_asks_for_an_architecture_without_a_gpu(tools, monkeypatch):
    tools(NVCC, CPU_TORCH)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = command("build", code=1).output
    assert "no CUDA GPU to compile for: name an architecture, such as --arch 9.0a" in found
    command("build", "--package", "--out=x", code=2)


@pytest.mark.parametrize(
    ("option", "folder"), [("--package", extension.PACKAGE), ("--out=there", Path("there"))]
)
def test_command_builds_where_it_is_told(tools, monkeypatch, option, folder):
    tools(NVCC, CPU_TORCH)
    calls = []
    monkeypatch.setattr(library, "build_into", lambda *given: calls.append(given) or Path("built"))
    command("build", "--arch=8.0", option)
    objects = Path("build/objects")
    assert calls == [(folder, objects, NVCC, ("8.0",), objects / "log")]


def test_time_left():
    assert extension.seconds_left(0, 0, [100] * 8, 4) == 200  # as where the times were measured
    assert extension.seconds_left(50, 4, [100] * 8, 4) == 50
    # The longest file decides, and not how many are left.
    assert extension.seconds_left(20, 1, [100, 80, 60, 40], 4) == 30
    assert extension.seconds_left(50, 4, [100, 80, 60, 40], 4) == 0
    assert extension.seconds_left(1, 0, [], 4) == 0
    assert extension.duration(70) == "70 s"
    assert extension.duration(600) == "10 min"


@pytest.fixture
def scripted(nothing_loaded, monkeypatch, tmp_path):
    """An empty folder, sources, and compilers that are scripts; a function that changes them."""
    monkeypatch.chdir(tmp_path)
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    sources = [csrc / f"file{i}.cu" for i in range(30)] + [csrc / "bindings.cpp"]
    for source in sources:
        source.touch()

    monkeypatch.setattr(extension, "CSRC", csrc)
    monkeypatch.setattr(extension, "sources", lambda: sources)
    for name, value in write_compilers(tmp_path / "cuda").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return functools.partial(write_compilers, tmp_path / "cuda")


def test_command_prints_few_lines_and_keeps_the_log(scripted, tmp_path, capfd):
    result = command("build", "--arch=9.0a", "--out=out")
    assert (tmp_path / "out" / extension.LIBRARY_NAME).read_text() == "made\n"
    printed = capfd.readouterr()
    lines = (result.output + printed.out + printed.err).splitlines()
    assert len(lines) <= 3 + extension.PROGRESS_LINES
    assert "megasoftmax: compiling all kernels, once: 0 of 31 files, about " in result.output
    log = (tmp_path / "build/objects/log").read_text()
    assert log.count("ptxas info") == 32_000  # of 31 files and the linker


def test_error_of_the_command_is_short_and_names_the_log(scripted, tmp_path):
    scripted(broken="file7.cu")
    result = command("build", "--arch=9.0a", "--out=out", code=1)
    assert "Error: FAILED:" in result.output
    assert "file7.cu: error: no value" in result.output
    assert "more lines\nThe whole log: build/objects/log" in result.output
    assert len(result.output.splitlines()) < extension.MOST_FAILURE_LINES + 20
    assert "note 500" in (tmp_path / "build/objects/log").read_text()
    assert not (tmp_path / "out" / extension.LIBRARY_NAME).exists()


def test_compiler_that_torch_refuses_is_an_error(scripted):
    scripted(version="4.8.0")
    result = command("build", "--arch=9.0a", "--out=out", code=1)
    assert "Error: The current installed version of " in result.output
    assert "(4.8.0) is less than the minimum required version by CUDA 13.0" in result.output


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_a_bar_or_few_lines(monkeypatch, tmp_path, is_terminal):
    """Each of 50 files takes 6 seconds."""
    monkeypatch.setenv("MAX_JOBS", "1")
    told = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    clock = [0.0]
    monkeypatch.setattr(extension, "time", SimpleNamespace(time=lambda: clock[0]))
    sources = [tmp_path / f"file{i}.cu" for i in range(50)]
    seconds = iter(range(50))
    done = threading.Event()

    def wait(timeout):
        i = next(seconds, None)
        if i is None:
            done.set()
            return True
        sources[i].with_suffix(".o").touch()
        clock[0] += 6
        os.utime(sources[i].with_suffix(".o"), (clock[0], clock[0]))
        return False

    event = SimpleNamespace(wait=wait, set=int)
    own = SimpleNamespace(Event=lambda: event, Thread=threading.Thread)
    monkeypatch.setattr(extension, "threading", own)
    with extension.progress(tmp_path, sources, "files"):
        done.wait(10)
    text = told.getvalue()
    if is_terminal:
        lines = text.split("\r")[1:]
        assert len(lines) == 51
        assert lines[25].startswith(
            "[##########          ] megasoftmax: compiling files, once: 25 of 50 files, about 2 min"
        )
        assert text.count("\n") == 1
    else:
        lines = text.splitlines()
        assert len(lines) == extension.PROGRESS_LINES + 1
        assert lines[5] == "megasoftmax: compiling files, once: 25 of 50 files, about 2 min left"
    assert "50 of 50 files, linking" in lines[-1]


# Libraries of kernels

LAUNCHERS = """
#include "common/kernels.h"
#include "common/registration.h"

namespace megasoftmax {{
template <>
inline constexpr const char* kTypeName<float> = name_of(DType::kFloat32);
{}
}}  // namespace megasoftmax
"""
KERNEL_SOURCE = """
int answer() { return 42; }
const Registration<float, int()> registration("softmax_forward", answer);
"""
OPERATOR_SOURCE = """
Launchers<int()> answers("softmax_forward");

extern "C" __attribute__((visibility("default"))) int ask(char* text) {
  text[0] = 0;
  try {
    return answers.of(DType::kFloat32)();
  } catch (const std::exception& error) {
    text[std::string(error.what()).copy(text, 19999)] = 0;
    return -1;
  }
}
"""


@pytest.fixture(scope="module")
def small_libraries(tmp_path_factory):
    """One that has an operator, one that has its kernels, and one that has both."""
    folder = tmp_path_factory.mktemp("libraries")
    parts = {
        "operators": OPERATOR_SOURCE,
        "kernels": KERNEL_SOURCE,
        "both": KERNEL_SOURCE + OPERATOR_SOURCE,
    }
    for name, text in parts.items():
        (folder / f"{name}.cpp").write_text(LAUNCHERS.format(text))
        sources = [folder / f"{name}.cpp", CSRC / "common" / "kernels.cpp"]
        flags = ["-std=c++20", "-fvisibility=hidden", "-fPIC", "-shared", f"-I{CSRC}"]
        _output("c++", *flags, "-o", folder / f"{name}.so", *sources, "-ldl")
    return folder


@pytest.fixture
def ask(small_libraries, tmp_path, monkeypatch):
    """Loads a copy of one of them, which has its own state; returns its operator."""

    def load(name):
        copy = shutil.copy(small_libraries / f"{name}.so", tmp_path)
        operators = ctypes.CDLL(copy)
        text = ctypes.create_string_buffer(20000)

        def call(find=None):
            if find is not None:
                operators.megasoftmax_set_kernel_finder(find)
            return operators.ask(text), text.value.decode()

        return call

    monkeypatch.setattr(library, "_answers", {})
    return load


def test_kernels_are_built_when_a_call_first_needs_them(ask, small_libraries, monkeypatch):
    built = []

    def build(kernels):
        built.append(kernels)
        return small_libraries / ("operators.so" if len(built) == 1 else "kernels.so")

    monkeypatch.setattr(library, "_find_or_build", build)
    call = ask("operators")
    assert call() == (-1, "kernels of softmax_forward_float32: they are not in this library")
    text = "kernels of softmax_forward_float32: they are not in their library"
    assert call(library._find_kernels) == (-1, text)
    assert call() == (-1, text)
    assert built == ["softmax_float32"]  # the library is looked for once
    library._answers.clear()
    assert [call()[0] for _ in range(2)] == [42, 42]
    assert built == ["softmax_float32"] * 2


@pytest.mark.parametrize("reason", ["no compiler", "a path that is no text: \udcff", "‘" * 9000])
def test_kernels_that_cannot_be_built_are_an_error_and_tried_once(ask, monkeypatch, reason):
    built = []

    def build(kernels):
        built.append(kernels)
        raise BuildError(reason)

    monkeypatch.setattr(library, "_find_or_build", build)
    call = ask("operators")
    for find in (library._find_kernels, None):
        code, text = call(find)
        assert code == -1
        expected = (
            f"kernels of softmax_forward_float32: {reason}. `python -m megasoftmax build --only"
        )
        assert text.startswith(expected.encode(errors="replace").decode()[:200])
    assert len(built) == 1


def test_interrupt_of_a_build_of_kernels_is_raised_again(ask, small_libraries, monkeypatch):
    def interrupt(kernels):
        raise KeyboardInterrupt

    call = ask("operators")
    monkeypatch.setattr(library, "_find_or_build", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            call(library._find_kernels)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.setattr(library, "_find_or_build", lambda _: small_libraries / "kernels.so")
    assert call()[0] == 42  # which is tried again


def test_kernels_of_the_same_library_are_not_looked_for(ask):
    assert ask("both")()[0] == 42


def test_library_of_kernels_that_cannot_be_loaded_is_an_error(ask, monkeypatch, tmp_path):
    missing = tmp_path / "no such.so"
    monkeypatch.setattr(library, "_find_or_build", lambda kernels: missing)
    code, text = ask("operators")(library._find_kernels)
    assert code == -1
    assert re.match(rf"kernels of softmax_forward_float32: {missing}: cannot open", text)


def test_each_launcher_is_registered_once_and_in_the_library_where_it_is_looked_for():
    types = {"__half": "float16", "__nv_bfloat16": "bfloat16", "float": "float32", "Tf32": "tf32"}
    files = [path for path in extension.sources() if path.parent.name == "instances"]
    registered, sources = [], functools.cache(extension.sources)
    for path in files:
        text = path.read_text()
        found = re.findall(r'Registration<(\w+), \w+> \w+\(\s*"(\w+)",\s*\w+<(\w+)', text)
        assert len(found) == text.count("Registration") > 0
        for name, launcher, argument in found:
            assert name == argument
            registered.append(f"{launcher}_{types[name]}")
            assert path in sources(extension.library_of(registered[-1]))
    assert len(registered) == len({*registered})
    asked = "".join(path.read_text() for path in CSRC.glob("*/launch_*.cpp"))
    names = {name.rpartition("_")[0] for name in registered}
    assert names == {*re.findall(r'"((?:softmax|columns|topk|attention)_\w+)"', asked)}
    libraries = [extension.OPERATORS, *extension.libraries_of_kernels()]
    split = [path for name in libraries for path in extension.sources(name)]
    assert {*split} == {*extension.sources()}
    assert all(split.count(path) == 1 for path in files)
    assert extension.library_of("attention_steps_bias_parts_tf32") == "attention_steps_tf32"
    biased = extension.library_of("attention_biased_hopper_forward_float16")
    assert biased == "attention_biased_float16"
    for kind in ("keys", "masked", "rows", "table"):
        group = f"attention_biased_hopper_{kind}"
        assert extension.library_of(f"{group}_backward_float16") == f"{group}_float16"
    capped = extension.library_of("attention_capped_hopper_forward_float16")
    assert capped == "attention_capped_float16"
    assert extension.library_of("topk_tiles_forward_float16") == "topk_tiles_float16"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_launchers_of_hoppers_tiles_lie_in_the_order_of_their_biases(direction):
    plan = (CSRC / "attention" / "sm90" / "plan.h").read_text()
    (enumerators,) = re.findall(r"enum class HopperBias {(.*?)};", plan, re.DOTALL)
    launches = (CSRC / "attention" / "launch_attention.cpp").read_text()
    (names,) = re.findall(rf"hopper_{direction}\[\] = {{(.*?)}};", launches, re.DOTALL)
    found = []
    for name in re.findall(r'"(\w+)"', names):
        instance = CSRC / "attention" / "instances" / f"{name}_bfloat16.cu"
        found += re.findall(r"HopperBias::(\w+)", instance.read_text())
    assert found == re.findall(r"^ *(k\w+),", enumerators, re.MULTILINE)


# The cache


@pytest.mark.parametrize(("name", "is_kernel"), [("a.cu", True), ("b.cuh", True), ("c.h", False)])
def test_change_of_kernels_alone_lets_the_host_be(monkeypatch, tmp_path, name, is_kernel):
    monkeypatch.setattr(extension, "CSRC", tmp_path)
    before = [extension.fingerprint("part", has_kernels=kind) for kind in (True, False)]
    (tmp_path / name).write_text("changed")
    after = [extension.fingerprint("part", has_kernels=kind) for kind in (True, False)]
    assert after[0] != before[0]
    assert (after[1] == before[1]) == is_kernel


def test_library_of_other_sources_tells_no_capability(monkeypatch):
    monkeypatch.setattr(library, "_loaded", Status(True, Path("libc.so.6")))
    assert library.capability(0) is None


@pytest.mark.nvcc
def test_command_compiles_what_changed(small_sources, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(torch.version, "cuda", "11.8")  # another than nvcc's does not matter
    nvcc, log = extension.check_tools(), tmp_path / "logs" / "log"
    arguments = tmp_path / "out", tmp_path / "objects", nvcc, ("9.0a",), log
    printed = [""]
    for value in (1, None, 2):
        if value is not None:
            (small_sources / "value.h").write_text(f"#define VALUE {value}\n")
        assert library.build_into(*arguments) == tmp_path / "out" / extension.LIBRARY_NAME
        printed.append(log.read_text())  # which grows
    told = [after.removeprefix(before) for before, after in pairwise(printed)]
    assert ["kernel.cu -o" in text for text in told] == [True, False, True]
    assert ["register.cpp -o" in text for text in told] == [True, False, False]
    found = capfd.readouterr()
    assert (found.out, " of 2 files, about " in found.err) == ("", True)
    (small_sources / "value.h").write_text("#error no value\n")
    with pytest.raises(BuildError, match=rf"(?s)^FAILED:.*no value.*The whole log: {log}$"):
        library.build_into(*arguments)


def test_files_that_take_long_are_compiled_first():
    sources = [each for each in extension.sources() if each.parent.name == "instances"]
    seconds = [extension.seconds_to_compile(source) for source in sources]
    assert seconds == sorted(seconds, reverse=True)
    assert min(seconds) > 3  # each has a time of its own


def test_limits_are_those_of_the_header():
    limits = kernel_limits()
    for regimes in (limits.forward, limits.backward):
        last = regimes[-1]
        assert (last.max_vectors, last.min_rows) == (None, 0)
        for regime in regimes:
            assert regime.storage in ("tile", "registers", "shared", "reread", "contiguous")
            assert set(regime.serves) <= set(limits.kinds)
            if regime.storage == "registers":
                assert regime.max_vectors == regime.threads_per_row * regime.vectors_per_thread
                assert (regime.blocks_per_row, regime.min_rows) == (1, 0)
    thresholds = re.findall(r"RowThreshold k\w+\[\] = \{\n(.*?)\n\};", LIMITS_HEADER, re.DOTALL)
    names = re.findall(r"\{\"(\w+)\"", "\n".join(thresholds))
    assert [regime.name for regime in limits.forward + limits.backward] == names


def test_kinds_of_rows_are_those_of_the_header():
    kinds = kernel_limits().kinds
    basic = {"unmasked", "ragged", "limited", "masked", "windowed", "bias gradient", "tiny"}
    basic |= {
        "dropped",
        "dropped bias gradient",
        "bias or ragged mask",
        "contiguous",
        "contiguous ragged",
    }
    assert {name for name, parts in kinds.items() if parts == (name,)} == basic
    assert kinds["common"] == ("unmasked", "ragged", "limited", "masked", "bias or ragged mask")
    assert kinds["spread"] == (*kinds["common"], "contiguous")
    assert kinds["any"] == (*kinds["common"], "bias gradient")


def test_gpus_are_read_from_their_header():
    found = [(gpu.major, gpu.minor) for gpu in kernel_limits().gpus]
    assert found == sorted(found)
    assert found[0] == extension.MIN_CAPABILITY
    with pytest.raises(ValueError, match="no table kGpus"):
        read_limits(LIMITS_HEADER, common="inline constexpr Gpu kOthers[] = {};")


def test_constants_are_read_from_all_headers():
    other = "inline constexpr int kOne = 1, kTwo = 2 * 3;  // kThree = 3\nint four = 4;"
    limits = read_limits(LIMITS_HEADER, topk=other)
    assert limits.topk == {"kOne": 1, "kTwo": 6}
    assert "kWarpTileVectors" in limits.constants
    assert "kUnlimited" not in limits.constants


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kForwardShapes[] = {", "kOtherShapes[] = {", "no table RowShape kForwardShapes"),
        ("kForwardThresholds[] = {", "kOthers[] = {", "no table RowThreshold kForwardThresholds"),
        ('{"tile",                          136', '{"tiles", 136', "cannot read the row"),
        ("kUnlimited,", "kUnlimited + 1,", "cannot read the row"),
        ("kWholeGpu}", "kSomeGpu}", "cannot read the row"),
        ('{"', '{kName, "', "cannot read the row"),
        ("Storage::kShared,", "kShared,", "cannot read the row"),
        ("enum Rows", "enum Columns", "no enum Rows"),
        ("int rows_per_block;", "int rows_per_warp;", "members of RowShape"),
    ],
)
def test_broken_limits_are_refused(old, new, message):
    assert old in LIMITS_HEADER
    with pytest.raises(ValueError, match=message):
        read_limits(LIMITS_HEADER.replace(old, new))
