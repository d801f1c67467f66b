"""Skips what this machine cannot run, with the reason; order, threads, fixtures of many files."""

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed
from inputs import KERNELS, attention_kernels, gpu_like, why_no_attention
from processes import Forks

from megasoftmax import dispatch
from megasoftmax.build import extension, library

MISSING = {
    "gpu": None if torch.cuda.is_available() else "torch sees no CUDA GPU",
    "nvcc": None if extension.find_nvcc() else "no nvcc runs here",
}

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # tests import those

KEPT_BYTES = 1 << 30  # of the GPU's memory, by a worker between tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-like", help="compute capability whose kernels tests take, such as 8.6")
    parser.addoption(
        "--fast-types",
        action="store_true",
        help="compile kernels of other types than bfloat16 in part, and those that "
        "tests/checked_kernels.txt names, unless they changed",
    )
    parser.addoption(
        "--record-kernels",
        action="store_true",
        help="write the files of bfloat16 that passed, with digests, to tests/checked_kernels.txt",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The workers of pytest-xdist share the cores: more threads than cores wait for each other."""
    if worker := getattr(config, "workerinput", None):
        threads = max(1, len(os.sched_getaffinity(0)) // worker["workercount"])
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of processes that tests start


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: the garbage collector does not look at it again."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels first: they compile for minutes, beside which other workers run all else."""
    items.sort(key=lambda item: item.get_closest_marker("nvcc") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, reason in MISSING.items():
        if reason is not None and item.get_closest_marker(marker) is not None:
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Where attention cannot run fused, as on compute capability 7.5, tests that need it skip."""
    try:
        yield
    except Exception as error:
        reason = why_no_attention()
        # The reason of `fused=True`, or of an op that is called by itself.
        if reason is not None and reason.partition(", got")[0] in str(error):
            pytest.skip(reason)
        raise


@pytest.fixture(scope="session", autouse=True)
def _operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """Builds the compiled part, which takes minutes, in no test."""
    capability = request.config.getoption("--gpu-like")
    if torch.cuda.is_available():
        library.load()
    with gpu_like(capability) if capability else nullcontext():
        yield


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    found = Forks()
    yield found
    found.close()


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a process that has no library beside the package, no cache and nothing loaded yet."""
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "_LIBRARY", tmp_path / extension.LIBRARY_NAME)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MEGASOFTMAX_HOST", "0")  # no process for the host's part
    monkeypatch.delenv("MEGASOFTMAX_JIT", raising=False)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """`register` of the adapter of transformers; what a test registers by it does not last."""
    from megasoftmax.integrations import transformers

    yield transformers.register
    monkeypatch.undo()
    transformers.register()


@pytest.fixture
def group_of_one() -> Iterator[torch.distributed.ProcessGroup]:
    """A process group that has this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    """Workers share the GPU: what the allocator of one keeps, the tests of others lack."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """What a test draws without a generator of its own is the same in each run."""
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A test marked with `on_all_kernels` gets "cuda" with each kind of kernels."""
    device, _, kind = request.param.partition(" ")
    with _attention_kernels(kind or "own"):
        yield device


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """For tests of attention that need a GPU: they run on each kind of kernels."""
    with _attention_kernels(request.param):
        yield request.param


def _attention_kernels(kind: str) -> AbstractContextManager[None]:
    if kind != "own" and (reason := why_no_attention()) is not None:
        pytest.skip(reason)
    major, minor = torch.cuda.get_device_capability() if kind != "own" else (0, 0)
    if kind == "portable" and major != 9:
        pytest.skip("this GPU has portable kernels alone, which another test runs")
    if kind == "small" and (major == 12 or (major, minor) in ((8, 6), (8, 9))):
        pytest.skip("this GPU has small blocks alone, with which another test runs")
    return attention_kernels(kind)


@pytest.fixture(params=["reference", "fused"])
def through_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether public functions are to run fused: then through the ops for CPU tensors too.

    Attention in float32 as well.
    """
    torch.compiler.reset()
    if request.param == "fused":
        compiled_part = dispatch._compiled_part
        against_attention = dispatch.reasons_against_fused_attention
        monkeypatch.setattr(dispatch, "_device", lambda scores: None)
        monkeypatch.setattr(
            dispatch, "_compiled_part", lambda s: compiled_part(s) if s.is_cuda else None
        )
        monkeypatch.setattr(
            dispatch,
            "reasons_against_fused_attention",
            lambda query, *rest: against_attention(query, *rest) if query.is_cuda else (),
        )
    return request.param == "fused"


@pytest.fixture
def as_if_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the constraints only those that are about a GPU hold on any machine."""
    for name in ("_device", "_compiled_part", "_compute_capability"):
        monkeypatch.setattr(dispatch, name, lambda *given: None)
