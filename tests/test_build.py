"""What gets built, found and loaded, and that no kernel spills."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import torch

from megasoftmax import _build, _extension
from megasoftmax._build import BuildError, Nvcc, TorchInstall
from megasoftmax._extension import Status

ARCHITECTURES = ("8.0", "9.0a")
NVCC = Nvcc(Path("nvcc"), (13, 0))
CUDA_TORCH = TorchInstall(Path("torch"), "2.13.0+cu130", "13.0")
CPU_TORCH = TorchInstall(Path("torch"), "2.13.0+cpu", None)
OLD_TORCH = TorchInstall(Path("torch"), "2.10.1", "13.0")
OLD_NVCC = Nvcc(Path("nvcc"), (11, 8))
LIMITS_HEADER = (_build.CSRC / "kernels/softmax/limits.h").read_text()


def _object_folder(config: pytest.Config) -> Path:
    return config.cache.mkdir("objects")


def _spills(log: str, allowed_bytes: int = 0) -> tuple[list[str], int]:
    """The kernels that ptxas reports to spill more, and how many functions it reports on."""
    architecture, found, count = "", [], 0
    lines = log.splitlines()
    for line, following in itertools.pairwise(lines):
        if entry := re.search(r"Compiling entry function '.*' for '(\w+)'", line):
            architecture = entry[1]
        if function := re.search(r"Function properties for (\S+)", line):
            count += 1
            sizes = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", following)
            assert len(sizes) == 3, f"ptxas's report is not understood: {following!r}"
            if any(int(size) > allowed_bytes for size, _ in sizes):
                found.append(f"{architecture}: {function[1]}: {following.strip()}")
    return found, count


def _allowed_spills(source: Path) -> int:
    """Of a thread, in bytes: what limits.h of the family says, else none."""
    family = source.relative_to(_build.CSRC / "kernels").parts[0]
    header = (_build.CSRC / "kernels" / family / "limits.h").read_text()
    found = re.search(r"int kMaxSpilledBytes = (\d+);", header)
    return int(found[1]) if found else 0


@pytest.mark.nvcc
def test_library_builds_with_any_torch(tmp_path, pytestconfig):
    """Comes first: it compiles on all cores what the tests of the kernels then find compiled."""
    library = tmp_path / _build.LIBRARY_NAME
    lines = []
    _build.build(
        library,
        _object_folder(pytestconfig),
        _build.find_nvcc(),
        _build.find_torch(),
        ARCHITECTURES,
        lines.append,
    )
    assert len(lines) == len(_build.kernel_sources()) + len(_build.binding_sources())
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    assert "torch_library_impl" in symbols
    # The CUDA runtime is inside, and no C++ symbol of torch's unstable ABI is asked for.
    assert "cudaLaunchKernel" not in symbols
    assert not re.findall(r"_ZNK?(?:2at|3c10|5torch)\w+", symbols)


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "source",
    _build.kernel_sources(),
    ids=lambda path: str(path.relative_to(_build.CSRC / "kernels")),
)
def test_kernels_compile_and_spill_no_more_than_allowed(source, pytestconfig):
    flags = _build.kernel_flags(ARCHITECTURES)
    compiled = _build.compile_source(
        source, _build.find_nvcc(), flags, _object_folder(pytestconfig)
    )
    log = compiled.with_suffix(".log").read_text()
    found, count = _spills(log, _allowed_spills(source))
    assert count == log.count("Compiling entry function")
    assert count > 0 or source.parent.name != "instances"
    if found:
        text = "\n".join(found)
        pytest.fail(subprocess.run(["c++filt"], input=text, capture_output=True, text=True).stdout)


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
    assert _spills(log, 15)[0] == found
    assert _spills(log, 16)[0] == []


@pytest.mark.parametrize(
    ("mode", "nvcc", "torch_install", "reason"),
    [
        ("none", NVCC, CUDA_TORCH, "MEGASOFTMAX_BUILD=none"),
        ("auto", NVCC, CUDA_TORCH, None),
        ("auto", NVCC, CPU_TORCH, "CPU build"),
        ("auto", NVCC, None, "--no-build-isolation"),
        ("auto", NVCC, OLD_TORCH, "older than 2.11"),
        ("auto", None, CUDA_TORCH, "no nvcc runs here"),
        ("auto", OLD_NVCC, CUDA_TORCH, "older than 12.0"),
        ("cuda", NVCC, CUDA_TORCH, None),
        ("cuda", NVCC, CPU_TORCH, None),
    ],
)
def test_installation_compiles_or_says_why_not(mode, nvcc, torch_install, reason):
    answer = _build.why_not_compile(mode, nvcc, torch_install)
    assert (answer is None) == (reason is None)
    assert reason is None or reason in answer


@pytest.mark.parametrize(
    ("mode", "nvcc", "torch_install", "message"),
    [
        ("cuda", None, CUDA_TORCH, "MEGASOFTMAX_BUILD=cuda, but no nvcc runs here"),
        ("cuda", NVCC, None, "MEGASOFTMAX_BUILD=cuda, but torch is not importable"),
        ("cuda", NVCC, OLD_TORCH, "torch 2.10.1 is older than 2.11"),
        ("gpu", NVCC, CUDA_TORCH, "must be auto, cuda or none, not 'gpu'"),
    ],
)
def test_installation_that_cannot_compile_fails(mode, nvcc, torch_install, message):
    with pytest.raises(BuildError, match=message):
        _build.why_not_compile(mode, nvcc, torch_install)


@pytest.mark.parametrize(
    ("version", "requested", "names"),
    [
        ((13, 0), None, ("8.0", "9.0a", "10.0", "12.0+PTX")),
        ((12, 8), "", ("8.0", "9.0a", "10.0", "12.0+PTX")),
        ((12, 7), None, ("8.0", "9.0a+PTX")),
        ((13, 0), "9.0a", ("9.0a",)),
        ((13, 0), "7.5 8.0;8.6 9.0 12.0+PTX", ("8.0", "8.6", "9.0a", "12.0+PTX")),
    ],
)
def test_architectures(version, requested, names):
    assert _build.architectures(version, requested) == names


@pytest.mark.parametrize("requested", ["Hopper", "sm_90", "7.5"])
def test_architectures_without_kernels_are_refused(requested):
    with pytest.raises(BuildError, match=requested):
        _build.architectures((13, 0), requested)


def test_architecture_flags():
    assert _build.architecture_flags(("8.0", "9.0a+PTX")) == (
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    )


@pytest.fixture
def nothing_loaded(monkeypatch, tmp_path):
    """As in a process that has no library beside the package, no cache and nothing loaded yet."""
    monkeypatch.setattr(_extension, "_loaded", None)
    monkeypatch.setattr(_extension, "_LIBRARY", tmp_path / _build.LIBRARY_NAME)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MEGASOFTMAX_JIT", raising=False)


@pytest.mark.parametrize(
    ("gpu", "jit", "nvcc", "reason"),
    [
        (False, "1", NVCC, "torch sees no CUDA GPU"),
        (True, "0", NVCC, "MEGASOFTMAX_JIT=0"),
        (True, "1", None, "no nvcc runs here"),
    ],
)
def test_load_warns_once_and_says_why(nothing_loaded, monkeypatch, gpu, jit, nvcc, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(_build, "find_nvcc", lambda: nvcc)
    monkeypatch.setenv("MEGASOFTMAX_JIT", jit)
    assert reason in _extension.status().reason
    with pytest.warns(RuntimeWarning, match=reason) as warned:
        first, second = _extension.load(), _extension.load()
    assert len(warned) == 1
    assert second is first
    assert not first.available
    assert _extension.status() is first


def test_library_that_cannot_be_loaded_is_a_reason(nothing_loaded):
    _extension._LIBRARY.write_text("not a library")
    with pytest.warns(RuntimeWarning, match="plain-torch path"):
        status = _extension.load()
    assert not status.available
    assert _build.LIBRARY_NAME in status.reason


def test_library_of_other_sources_is_a_reason(nothing_loaded):
    _extension._LIBRARY.symlink_to(Path(torch.__file__).parent / "lib" / "libc10.so")
    with pytest.warns(RuntimeWarning, match="megasoftmax_register"):
        assert not _extension.load().available


def test_load_is_a_constant_to_torch_compile(nothing_loaded, monkeypatch):
    calls = []
    monkeypatch.setattr(_extension, "_load", lambda: calls.append("load") or Status(True))

    @torch.compile(fullgraph=True, backend="eager")
    def double_when_available(x):
        return 2 * x if _extension.load().available else x

    assert double_when_available(torch.ones(1)).item() == 2
    assert calls == ["load"]


@pytest.mark.gpu
@pytest.mark.nvcc
def test_library_is_built_once_on_first_use(nothing_loaded, capfd):
    library = _extension._build_for_these_gpus()
    assert library.exists()
    assert "building for this GPU" in capfd.readouterr().err
    assert _extension._build_for_these_gpus() == library
    assert not capfd.readouterr().err


def test_limits_are_those_of_the_header():
    limits = _extension.LIMITS
    for regimes in (limits.forward, limits.backward):
        last = regimes[-1]
        assert (last.max_chunks, last.min_rows) == (None, 0)
        for regime in regimes:
            assert regime.storage in ("tile", "registers", "shared", "reread")
            assert set(regime.serves) <= set(limits.kinds)
            if regime.storage == "registers":
                assert regime.max_chunks == regime.threads_per_row * regime.chunks_per_thread
                assert (regime.blocks_per_row, regime.min_rows) == (1, 0)
    names = re.findall(r"\{\"(\w+)\"", LIMITS_HEADER)
    assert [regime.name for regime in limits.forward + limits.backward] == names


def test_kinds_of_rows_are_those_of_the_header():
    kinds = _extension.LIMITS.kinds
    basic = {"plain", "uneven", "limited", "masked", "narrow", "bias gradient", "tiny"}
    assert {name for name, parts in kinds.items() if parts == (name,)} == basic
    assert kinds["spread"] == ("plain", "uneven", "limited", "masked")
    assert kinds["any"] == (*kinds["spread"], "bias gradient")


def test_constants_are_read_from_all_headers():
    other = "inline constexpr int kOne = 1, kTwo = 2 * 3;  // kThree = 3\nint four = 4;"
    constants = _extension.read_limits(LIMITS_HEADER, other).constants
    assert (constants["kOne"], constants["kTwo"]) == (1, 6)
    assert not {"kThree", "four", "kUnlimited"} & set(constants)
    assert "kChunksPerBatch" in constants
    assert "kOne" not in _extension.read_limits(LIMITS_HEADER).constants


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kForwardRegimes[] = {", "kOtherRegimes[] = {", "no table kForwardRegimes"),
        ("kUnlimited,", "kUnlimited + 1,", "cannot read the row"),
        ("kWholeGpu,", "kSomeGpu,", "cannot read the row"),
        ('{"', '{kName, "', "cannot read the row"),
        ("Storage::kShared,", "kShared,", "cannot read the row"),
        ("enum Rows", "enum Columns", "no enum Rows"),
        ("int rows_per_block;", "int rows_per_warp;", "members of RowRegime"),
    ],
)
def test_broken_limits_are_refused(old, new, message):
    assert old in LIMITS_HEADER
    with pytest.raises(ValueError, match=message):
        _extension.read_limits(LIMITS_HEADER.replace(old, new))
