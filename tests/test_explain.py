"""What megasoftmax.explain says: by hand for a small table, and as the compiled part decides."""

import ctypes
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from megasoftmax import __main__
from megasoftmax import explain as module
from megasoftmax.build import library
from megasoftmax.explain import H200, Explanation, current_gpu, explain
from megasoftmax.limits import RowRegime, kernel_limits

HALF, FLOAT = torch.float16, torch.float32

LIMITS = kernel_limits()
REGIMES = (
    RowRegime("tile", "tile", 0, 0, 0, 0, False, 1, 33, 0, ("tiny",)),
    RowRegime("lanes", "registers", 4, 16, 4, 16, False, 1, 32, 0, ("any",)),
    RowRegime("narrow", "registers", 256, 1, 1, 6, False, 1, 256, 0, ("narrow",)),
    RowRegime("shared", "shared", 64, 1, 2, 16, False, 1, 1024, 1000, ("any",)),
    RowRegime("cluster", "shared", 256, 1, 2, 3, False, 4, 1024, 40, ("spread",)),
    RowRegime("turns", "shared", 256, 1, 2, 3, True, 4, 8192, 40, ("spread",)),
    RowRegime("whole", "reread", 256, 1, 2, 3, False, None, None, 0, ("spread",)),
    RowRegime("last", "reread", 256, 1, 2, 3, False, 1, None, 0, ("any",)),
)
CONSTANTS = {
    "kLongRow": 512,
    "kNarrowRow": 256,
    "kTinyColumns": 128,
    "kTinyUnevenColumns": 512,
    "kChunksPerBatch": 64,
    "kUnitBatches": 2,
    "kMaxUnits": 512,
    "kBlocksPerSm": 3,
    "kRingBytes": 8192,
    "kResultBytes": 8,
}


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(LIMITS, forward=REGIMES, backward=REGIMES, constants=CONSTANTS)
    monkeypatch.setattr(module, "kernel_limits", lambda: limits)


def test_constants_are_those_of_the_headers() -> None:
    assert set(CONSTANTS) <= set(LIMITS.constants)


# By hand, from REGIMES


def _launch(found: Explanation) -> tuple[Any, ...]:
    return (
        *(found.regime.name, found.kind, found.chunks, found.blocks_per_row),
        *(found.units, found.batches_per_unit, found.threads, found.blocks),
        *(found.shared_bytes, found.workspace_bytes),
    )


@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        ((1000, 100, HALF), {}, ("tile", "tiny", 14, 1, 0, 0, None, None, None, 0)),
        # 16 rows fill a block.
        ((100, 200, HALF), {}, ("lanes", "plain", 25, 1, 0, 0, 64, 7, 0, 0)),
        # Rows of 66 chunks of 8 elements may touch 67, if they are odd.
        ((4000, 529, HALF), {}, ("shared", "uneven", 67, 1, 1, 2, 64, 4000, 2064, 0)),
        ((100, 100, HALF), {"masked": True}, ("lanes", "masked", 14, 1, 0, 0, 64, 7, 0, 0)),
        # Queries of another head start another block.
        (
            (96, 96, HALF),
            {"causal": True, "queries": 24},
            ("lanes", "limited", 12, 1, 0, 0, 64, 8, 0, 0),
        ),
        # 8 units of 2 batches of 64 chunks of 16 bytes; results of 8 bytes, for two rows.
        ((8192, 8192, HALF), {}, ("shared", "plain", 1024, 1, 8, 2, 64, 8192, 16512, 0)),
        # What the backward pass keeps of a chunk is 32 bytes.
        (
            (8192, 8192, HALF),
            {"backward": True},
            ("shared", "plain", 1024, 1, 8, 2, 64, 8192, 32896, 0),
        ),
        ((999, 8192, HALF), {}, ("cluster", "plain", 1024, 4, 8, 2, 256, 3996, 4224, 0)),
        ((999, 4096, FLOAT), {}, ("cluster", "plain", 1024, 4, 8, 2, 256, 3996, 4224, 0)),
        # 9 units, 3 of them in a block.
        ((8192, 8200, HALF), {}, ("turns", "plain", 1025, 4, 9, 2, 256, None, 6288, 0)),
        # 8 units are one for each warp of a block; each warp has 8192 bytes.
        (
            (100, 8192, HALF),
            {"max_cluster": 1},
            ("whole", "plain", 1024, 1, 8, 2, 256, 100, 65664, 0),
        ),
        (
            (100, 8192, HALF),
            {"max_cluster": 1, "multiprocessors": 66},
            ("whole", "plain", 1024, 1, 8, 2, 256, 100, 65664, 0),
        ),
        # Units of 16 batches, so that there are no more than 512, and a warp for each.
        (
            (4, 2**22, HALF),
            {},
            ("whole", "plain", 2**19, 64, 512, 16, 256, 256, 73728, 16384),
        ),
        # The mask matters forward only.
        (
            (999, 8192, HALF),
            {"masked": True, "causal": True},
            ("cluster", "masked", 1024, 4, 8, 2, 256, 3996, 4224, 0),
        ),
        (
            (999, 8192, HALF),
            {"masked": True, "backward": True},
            ("cluster", "plain", 1024, 4, 8, 2, 256, 3996, 8320, 0),
        ),
        # What takes the gradient of a bias stays in one block.
        (
            (3000, 5000, FLOAT),
            {"bias_gradient": True, "backward": True},
            ("last", "bias gradient", 1250, 1, 10, 2, 256, 3000, 65696, 0),
        ),
        # 256 visible columns touch up to 33 chunks, of 512.
        (
            (4096, 4096, HALF),
            {"window": (255, 0)},
            ("narrow", "narrow", 33, 1, 0, 0, 256, 4096, 0, 0),
        ),
        (
            (4096, 4088, HALF),
            {"window": (255, 0)},
            ("shared", "limited", 33, 1, 1, 2, 64, 4096, 2064, 0),
        ),
        # A window that limits nothing.
        (
            (8192, 8192, HALF),
            {"window": (8192, 8192)},
            ("shared", "plain", 1024, 1, 8, 2, 64, 8192, 16512, 0),
        ),
    ],
)
@pytest.mark.usefixtures("small_table")
def test_launch(
    call: tuple[int, int, torch.dtype], arguments: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert _launch(explain(*call, **arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "visible", "read", "written"),
    [
        ({}, 80, 160, 160),
        ({"backward": True}, 80, 320, 160),
        ({"masked": True}, 80, 240, 160),
        ({"masked": True, "backward": True}, 80, 320, 160),
        ({"bias_gradient": True, "backward": True}, 80, 320, 320),
        # 5 queries of 8 keys see 4, 5, 6, 7 and 8 of them, in two heads.
        ({"causal": True}, 60, 120, 160),
        ({"causal": True, "masked": True}, 60, 180, 160),
        ({"causal": True, "window": (2, -1)}, 30, 60, 160),
        ({"window": (-1, 1)}, 68, 136, 160),
        ({"window": (4, -1)}, 68, 136, 160),
    ],
)
def test_bytes(arguments: dict[str, Any], visible: int, read: int, written: int) -> None:
    found = explain(10, 8, HALF, queries=5, **arguments)
    assert (found.bytes_read, found.bytes_written) == (read, written)
    excluded = torch.ones(5, 8, dtype=torch.bool)
    left, right = arguments.get("window", (-1, -1))
    right = 0 if arguments.get("causal") else right
    if right >= 0:
        excluded = excluded.tril(3 + right)
    if left >= 0:
        excluded = excluded.triu(3 - left)
    assert visible == 2 * excluded.sum()
    fewest_time = 1e6 * (read + written) / 1e12 + module.LAUNCH_MICROSECONDS
    assert found.microseconds(1e12) == pytest.approx(fewest_time)


@pytest.mark.usefixtures("small_table")
def test_reasons() -> None:
    found = explain(300, 8192, HALF, max_cluster=16)
    assert found.regime.name == "cluster"
    assert found.index == 4
    assert [(skipped.index, skipped.name, skipped.why) for skipped in found.skipped] == [
        (0, "tile", "is not for plain rows; takes at most 33 chunks"),
        (1, "lanes", "takes at most 32 chunks"),
        (2, "narrow", "is not for plain rows; takes at most 256 chunks"),
        (3, "shared", "wants at least 1,000 rows"),
    ]
    assert found.reasons == (
        "serves plain rows",
        "takes rows of at most 1,024 chunks: these need up to 1,024",
        "wants at least 40 rows, so that 4 blocks each keep the GPU busy: there are 300",
    )
    without_clusters = explain(300, 8192, HALF, max_cluster=2)
    assert without_clusters.regime.name == "whole"
    assert "clusters of 4 blocks, more than the GPU's 2" in without_clusters.skipped[4].why


# From the tables of limits.h


@pytest.mark.parametrize("backward", [False, True])
def test_tiny_rows_form_tiles(backward: bool) -> None:
    edge = LIMITS.constants["kTinyColumns"]
    tile = explain(4096, edge - 1, FLOAT, backward=backward)
    assert (tile.kind, tile.regime.storage) == ("tiny", "tile")
    for columns, arguments in ((edge, {}), (edge - 1, {"causal": True})):
        found = explain(4096, columns, FLOAT, backward=backward, **arguments)
        assert found.regime.storage == "registers"


def test_few_long_rows_share_the_gpu() -> None:
    found = explain(4, 33554432, HALF)
    assert found.regime.blocks_per_row is None
    assert found.units == LIMITS.constants["kMaxUnits"]
    assert found.blocks_per_row == found.units // (found.regime.threads_per_row // 32)
    assert found.workspace_bytes == 4 * found.units * LIMITS.constants["kResultBytes"]


def test_long_rows_in_a_narrow_window() -> None:
    found = explain(8 * 8192, 8192, HALF, queries=8192, window=(256, 0))
    assert found.visible_columns == 257
    assert found.kind == "narrow"
    assert found.regime.serves == ("narrow",)


@pytest.mark.parametrize("backward", [False, True])
def test_every_regime_serves_some_call(backward: bool) -> None:
    table = LIMITS.backward if backward else LIMITS.forward
    edges = {regime.max_chunks for regime in table if regime.max_chunks is not None}
    chunks = {1} | {edge + extra for edge in edges for extra in (0, 1)}
    fewest = {regime.min_rows for regime in table}
    rows = {count - less for count in fewest for less in (0, 1)} | {1}
    kinds: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (0, 0)}]
    kinds.append({"bias_gradient": True} if backward else {"masked": True})
    reached = {
        explain(
            count, 8 * length, HALF, queries=1, backward=backward, max_cluster=clusters, **kind
        ).index
        for count in rows
        if 0 < count <= LIMITS.max_index
        for length, kind, clusters in itertools.product(chunks, kinds, (1, 16))
    }
    assert [
        f"row {index}: {regime.name}" for index, regime in enumerate(table) if index not in reached
    ] == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("backward", [False, True])
def test_library_takes_the_same_regimes(backward: bool, dtype: torch.dtype) -> None:
    path = library.load().path
    regime_of = ctypes.CDLL(str(path)).megasoftmax_regime
    integers = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_int] * 3)
    regime_of.argtypes, regime_of.restype = integers, ctypes.c_int
    max_cluster = current_gpu().max_cluster

    def agree(rows: int, columns: int, masked: bool, causal: bool) -> None:
        found = explain(
            rows,
            columns,
            dtype,
            queries=columns if causal else rows,
            causal=causal,
            masked=masked,
            backward=backward,
            max_cluster=max_cluster,
        )
        answer = regime_of(backward, rows, columns, dtype.itemsize, masked, causal)
        assert answer == found.index, f"{rows} x {columns}, masked {masked}, causal {causal}"

    regimes = LIMITS.forward + LIMITS.backward
    pack = 16 // dtype.itemsize
    edges = {pack * regime.max_chunks for regime in regimes if regime.max_chunks is not None}
    lengths = {edge + extra for edge in edges for extra in (-pack, 1 - pack, 0, 1)} | {1, 2**24}
    fewest = {regime.min_rows for regime in regimes}
    counts = {count - less for count in fewest for less in (0, 1)} | {1}
    for columns in lengths - {0}:
        for rows, masked in itertools.product(counts, (False, True)):
            if 0 < rows <= LIMITS.max_index:
                agree(rows, columns, masked, causal=False)
        for masked in (False, True):
            agree(2 * columns, columns, masked, causal=True)


# Errors


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ((0, 8, HALF), {}, "rows: expected at least 1, got 0"),
        ((8, 0, HALF), {}, "columns: expected at least 1, got 0"),
        ((8, 8, HALF), {"queries": 0}, "queries: expected at least 1, got 0"),
        ((8, 8, HALF), {"queries": 3}, "queries: expected a divisor of the 8 rows, got 3"),
        ((8, 8, torch.float64), {}, "dtype: expected float16, bfloat16 or float32"),
        ((8, 8, HALF), {"window": (-2, 0)}, "window: expected sides of -1"),
        ((8, 8, HALF), {"bias_gradient": True}, "bias_gradient: only the backward pass"),
        ((8, 2**31, HALF), {}, "the kernels take at most"),
        ((8, 2**30, HALF), {"causal": True}, "the kernels take at most"),
        ((2**31, 8, HALF), {}, "the kernels take at most"),
    ],
)
def test_calls_that_are_refused(
    call: tuple[int, int, torch.dtype], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        explain(*call, **arguments)


# The GPU


def _properties(**given: Any) -> SimpleNamespace:
    common = {"name": "GPU", "multi_processor_count": 100, "major": 9}
    return SimpleNamespace(**(common | given))


@pytest.mark.parametrize(
    ("properties", "max_cluster", "bytes_per_second"),
    [
        (_properties(memory_clock_rate=3_000_000, memory_bus_width=6144), 16, 0.88 * 4.608e12),
        (_properties(), 16, H200.bytes_per_second),
        (_properties(memory_clock_rate=0, memory_bus_width=6144), 16, H200.bytes_per_second),
        (_properties(major=8), 1, H200.bytes_per_second),
        (_properties(major=10), 16, H200.bytes_per_second),
        (_properties(major=12), 8, H200.bytes_per_second),
    ],
)
def test_current_gpu(
    properties: SimpleNamespace,
    max_cluster: int,
    bytes_per_second: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    gpu = current_gpu()
    assert (gpu.name, gpu.multiprocessors, gpu.max_cluster) == ("GPU", 100, max_cluster)
    assert gpu.bytes_per_second == pytest.approx(bytes_per_second)
    assert ("an H200" in gpu.bandwidth_source) == (bytes_per_second == H200.bytes_per_second)


def test_without_a_gpu_an_h200_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert current_gpu() is H200


# The command line


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(__main__.app, list(arguments))

    monkeypatch.setattr(__main__, "current_gpu", lambda: H200)
    return invoke


@pytest.mark.parametrize(
    ("arguments", "call", "keywords"),
    [
        (["8192x50257", "--dtype", "fp16"], (8192, 50257, HALF), {}),
        (["8192x50257", "--dtype", "fp32", "--masked"], (8192, 50257, FLOAT), {"masked": True}),
        (
            ["8x32x2048x2048", "--dtype", "bf16", "--causal", "--backward"],
            (8 * 32 * 2048, 2048, torch.bfloat16),
            {"queries": 2048, "causal": True, "backward": True},
        ),
        (["4096x8192", "--window", "256,-1"], (4096, 8192, HALF), {"window": (256, -1)}),
        (["4096x8192", "--window", "-1,9"], (4096, 8192, HALF), {"window": (-1, 9)}),
        (
            ["4096x8192", "--bias-gradient"],
            (4096, 8192, HALF),
            {"bias_gradient": True, "backward": True},
        ),
    ],
)
def test_command(
    run: Any, arguments: list[str], call: tuple[int, int, torch.dtype], keywords: dict[str, Any]
) -> None:
    found = explain(*call, **keywords)
    result = run("explain", *arguments)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    text = " ".join(lines)
    direction = "backward" if found.backward else "forward"
    assert lines[0] == f"regime {found.regime.name}, row {found.index} of the {direction} table"
    assert f"kind of rows {found.kind}" in lines
    assert f"blocks per row {found.blocks_per_row}" in lines
    blocks = "as many as run at a time" if found.blocks is None else f"{found.blocks:,}"
    assert f"blocks {blocks}, of {found.threads} threads" in lines
    assert f"reads {found.bytes_read:,} bytes at least" in lines
    assert f"writes {found.bytes_written:,} bytes" in lines
    time = found.microseconds(H200.bytes_per_second)
    assert f"expected time {time:.1f} µs on NVIDIA H200" in lines
    assert "measured copy bandwidth of an H200" in text
    for reason in found.reasons:
        assert reason in text
    for skipped in found.skipped:
        assert f"{skipped.index} {skipped.name} {skipped.why.split(';')[0]}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["8192"], "shape: expected ROWSxCOLUMNS, such as 8192x50257, got '8192'"),
        (["8192x"], "shape: expected ROWSxCOLUMNS"),
        (["8192,64"], "shape: expected ROWSxCOLUMNS"),
        (["0x64"], "at least 1, got 0"),
        (["8x64", "--dtype", "int8"], "dtype: expected one of fp16, bf16, fp32, got 'int8'"),
        (["8x64", "--window", "3"], "window: expected LEFT,RIGHT, such as 256,0, got '3'"),
        (["8x64", "--window", "-2,0"], "window: expected sides of -1"),
        (["8x4294967296"], "the kernels take at most"),
    ],
)
def test_command_refuses(run: Any, arguments: list[str], message: str) -> None:
    result = run("explain", *arguments)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert message in result.output


def test_tables_of_limits_are_printed(run: Any) -> None:
    result = run()
    assert result.exit_code == 0
    for heading in ("Forward, row regimes", "Backward, row regimes", "waits in"):
        assert heading in result.output
    for regime in LIMITS.forward + LIMITS.backward:
        assert regime.name in result.output
