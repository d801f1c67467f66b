"""What megasoftmax.explain says, by hand and by the tables of limits.h."""

import itertools
import random
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inputs import command
from processes import Forks
from typer.testing import Result

import megasoftmax
from megasoftmax import __main__
from megasoftmax._tables import verdict
from megasoftmax.build import library
from megasoftmax.explain import (
    H200,
    LAUNCH_MICROSECONDS,
    Explanation,
    common,
    current_gpu,
    explain,
    explain_attention,
    explain_topk,
)
from megasoftmax.explain import attention as of_attention
from megasoftmax.limits import kernel_limits

HALF, FLOAT = torch.float16, torch.float32

LIMITS = kernel_limits()
BACKWARD, DROPPED_GRADIENT = {"backward": True}, {"dropout": True, "bias_gradient": True}


def _first_that_serves(
    rows: int, kind: str, vectors: int, *, backward: bool = False, max_cluster: int = 16
) -> int:
    for index, regime in enumerate(LIMITS.backward if backward else LIMITS.forward):
        serves = any(kind in LIMITS.kinds[name] for name in regime.serves)
        is_short = regime.max_vectors is None or vectors <= regime.max_vectors
        has_cluster = regime.blocks_per_row is None or regime.blocks_per_row <= max_cluster
        if serves and is_short and rows >= regime.min_rows and has_cluster:
            return index
    raise AssertionError("the last regime serves all rows")


@pytest.mark.parametrize(
    ("call", "arguments", "kind", "vectors"),
    [
        ((1000, 100, HALF), {}, "tiny", 14),
        ((100, 200, HALF), {}, "contiguous", 25),
        # Rows of 32 vectors of 8 elements may touch 33, if they are odd.
        ((4000, 255, HALF), {"causal": True}, "limited", 33),
        # From 32 vectors on they are cut along lines of 8 vectors, and may begin at the end of one.
        ((4000, 257, HALF), {"causal": True}, "limited", 40),
        # Contiguous ones need no more than whole vectors, if they are short.
        ((4000, 529, HALF), {}, "contiguous ragged", 66),
        ((4000, 529, FLOAT), {}, "contiguous ragged", 132),
        ((4000, 6001, HALF), {}, "ragged", 758),
        # Few longer ones lie over a cluster, along lines too.
        ((4, 6001, HALF), {}, "contiguous ragged", 758),
        ((4, 32001, HALF), {"backward": True}, "contiguous ragged", 4008),
        ((4, 32001, HALF), {"max_cluster": 1}, "ragged", 4008),
        ((2000, 32001, HALF), {}, "ragged", 4008),
        ((100, 100, HALF), {"masked": True}, "bias or ragged mask", 14),
        ((100, 104, HALF), {"masked": True}, "masked", 13),
        ((96, 96, HALF), {"causal": True, "queries": 24}, "limited", 12),
        ((8192, 8192, HALF), {}, "contiguous", 1024),
        ((8192, 8192, HALF), {"backward": True}, "contiguous", 1024),
        ((99, 8192, HALF), {}, "contiguous", 1024),
        ((999, 4096, FLOAT), {}, "contiguous", 1024),
        ((100, 80000, HALF), {"max_cluster": 1}, "contiguous", 10000),
        ((100, 80000, HALF), {"max_cluster": 8}, "contiguous", 10000),
        # The mask matters forward only.
        ((999, 8192, HALF), {"masked": True, "causal": True}, "masked", 1024),
        ((999, 8192, HALF), {"masked": True, "backward": True}, "contiguous", 1024),
        ((3000, 5000, FLOAT), {"bias_gradient": True, "backward": True}, "bias gradient", 1250),
        # With dropout few regimes serve all rows.
        ((100, 100, HALF), {"dropout": True}, "dropped", 14),
        ((999, 8192, HALF), {"dropout": True, "masked": True}, "dropped", 1024),
        # Of 256 visible columns, 8 more of the pair's other row, and 31 more of the first block.
        ((4096, 4096, HALF), {"dropout": True, "window": (255, 0)}, "dropped", 38),
        ((999, 8192, HALF), {"dropout": True, "backward": True}, "dropped", 1024),
        ((3000, 5000, FLOAT), DROPPED_GRADIENT | BACKWARD, "dropped bias gradient", 1250),
        # 256 visible columns touch up to 33 vectors, and the line where they begin 7 more.
        ((4096, 4096, HALF), {"window": (255, 0)}, "windowed", 40),
        ((1024, 1024, HALF), {"window": (255, 0)}, "windowed", 40),
        ((1024, 1016, HALF), {"window": (255, 0)}, "limited", 40),
        ((2048, 2048, HALF), {"window": (960, 0)}, "windowed", 128),
        ((2048, 2048, HALF), {"window": (961, 0)}, "limited", 129),
        # A window that limits nothing.
        ((8192, 8192, HALF), {"window": (8192, 8192)}, "contiguous", 1024),
    ],
)
def test_kind_of_rows_and_regime(
    call: tuple[int, int, torch.dtype], arguments: dict[str, Any], kind: str, vectors: int
) -> None:
    found = explain(*call, **arguments)
    options = {name: arguments[name] for name in ("backward", "max_cluster") if name in arguments}
    assert (found.kind, found.vectors) == (kind, vectors)
    assert found.index == _first_that_serves(call[0], kind, vectors, **options)
    assert [each.index for each in found.skipped] == list(range(found.index))


def test_grid_of_rows_in_registers() -> None:
    found = explain(100, 200, HALF, causal=True)
    regime = found.regime
    assert regime.storage == "registers"
    assert found.threads == regime.threads_per_row * regime.rows_per_block
    assert found.blocks == -(-100 // regime.rows_per_block)
    assert (found.segments, found.warp_tiles_per_segment, found.shared_bytes) == (0, 0, 0)
    # Queries of another head start another block.
    of_heads = explain(90, 200, HALF, causal=True, queries=9)
    assert of_heads.blocks == 10 * -(-9 // of_heads.regime.rows_per_block)


@pytest.mark.parametrize("backward", [False, True])
def test_contiguous_rows_have_a_warp_for_each_segment(backward: bool) -> None:
    for rows, columns, threads, blocks in ((64, 8192, 256, 64), (9, 32000, 128, 72)):
        found = explain(rows, columns, HALF, backward=backward)
        assert found.regime.storage == "contiguous"
        assert found.segments == -(-columns // 1024)
        assert (found.threads, found.blocks) == (threads, blocks)
        assert found.shared_bytes == found.segments * LIMITS.constants["kResultBytes"]
    # Of many rows a block has two forward and one backward. Of few rows each has four warps.
    of_many = (2200, 32, 2200) if backward else (2200, 64, 1100)
    for rows, threads, blocks in (of_many, (100, 128, 100)):
        found = explain(rows, 1024, HALF, backward=backward)
        assert (found.segments, found.threads, found.blocks) == (1, threads, blocks)


@pytest.mark.parametrize("backward", [False, True])
def test_long_rows_are_segments(backward: bool) -> None:
    constants = LIMITS.constants
    found = explain(8192, 8192, HALF, queries=8192, causal=True, backward=backward)
    assert found.regime.storage == "shared"
    segments = 1024 // constants["kWarpTileVectors"]
    assert (found.segments, found.warp_tiles_per_segment) == (segments, 1)
    # Vectors, of two tensors backward, and results of two rows.
    waiting = (32 if backward else 16) * 1024
    assert found.shared_bytes == waiting + 2 * found.segments * constants["kResultBytes"]
    assert found.workspace_bytes == 0
    # More warp tiles to a segment, so that there are not too many of them.
    longest = explain(4, 2**22, HALF, backward=backward)
    assert longest.segments == constants["kMaxSegments"]
    warp_tiles = 2**19 // constants["kWarpTileVectors"]
    assert longest.warp_tiles_per_segment == warp_tiles // longest.segments


def test_clusters_of_a_forward_pass_have_a_row_each() -> None:
    for columns, name, blocks in (
        (65536, "cluster_256x4", 4),
        (2**17, "cluster_256x8", 8),
        (2**18, "cluster_256x8", 8),
        (2**19, "cluster_256x16", 16),
    ):
        found = explain(1000, columns, HALF)
        assert (found.regime.name, found.blocks_per_row) == (name, blocks)
        assert found.blocks == 1000 * blocks


@pytest.mark.parametrize(
    ("arguments", "visible", "read", "written"),
    [
        ({}, 80, 160, 160),
        ({"backward": True}, 80, 320, 160),
        ({"masked": True}, 80, 240, 160),
        ({"masked": True, "backward": True}, 80, 320, 160),
        ({"bias_gradient": True, "backward": True}, 80, 320, 320),
        ({"dropout": True, "masked": True, "backward": True}, 80, 400, 160),
        ({"dropout": True, "bias_gradient": True, "backward": True}, 80, 480, 320),
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
    fewest_time = 1e6 * (read + written) / 1e12 + LAUNCH_MICROSECONDS
    assert found.microseconds(1e12) == pytest.approx(fewest_time)


def test_reasons() -> None:
    found = explain(500, 8192, HALF, causal=True)
    regime = found.regime
    assert found.reasons == (
        "serves limited rows",
        f"takes rows of at most {regime.max_vectors:,} vectors: these need up to 1,024",
        f"wants at least {regime.min_rows:,} rows, so that one block each keeps the GPU busy: "
        "there are 500",
    )
    why = {each.index: each.why for each in found.skipped}
    most = LIMITS.forward[0].max_vectors
    assert why[0] == f"is not for limited rows; takes at most {most} vectors"
    for index, each in why.items():
        skipped = LIMITS.forward[index]
        assert (f"at least {skipped.min_rows:,} rows" in each) == (skipped.min_rows > 500)
    without_clusters = explain(200, 10**5, HALF, max_cluster=2)
    expected = "wants clusters of 4 blocks, the GPU has 2"
    why_not = [each.why for each in without_clusters.skipped if each.name == "cluster_256x4"]
    assert expected in why_not[-1]


# From the tables of limits.h


@pytest.mark.parametrize("backward", [False, True])
def test_tiny_rows_form_tiles(backward: bool) -> None:
    edge = LIMITS.constants["kTinyColumns"]
    tile = explain(4096, edge - 1, FLOAT, backward=backward)
    assert (tile.kind, tile.regime.storage) == ("tiny", "tile")
    assert explain(4096, edge, FLOAT, backward=backward).regime.storage == "contiguous"
    causal = explain(4096, edge - 1, FLOAT, backward=backward, causal=True)
    assert causal.regime.storage == "registers"


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("backward", [False, True])
def test_a_tile_serves_the_longest_ragged_rows(dtype: torch.dtype, backward: bool) -> None:
    edge = LIMITS.constants["kTinyRaggedColumns"]
    for columns in range(edge - 15, edge, 2):
        assert explain(4096, columns, dtype, backward=backward).regime.storage == "tile"


def test_persistent_blocks_have_room_for_the_next_row() -> None:
    """As much as their share of a multiprocessor leaves, and at most all of it."""
    segment, results = 128 * 32, 2 * LIMITS.constants["kResultBytes"]
    for rows, columns, name, segments in (
        (60, 2**17 - 1, "persistent_256x8", 18),
        (2000, 40001, "persistent_512x2", 40),
        (1024, 2**18 - 1, "persistent_512x8", 55),
    ):
        found = explain(rows, columns, HALF, backward=True)
        assert found.regime.name == name
        assert found.shared_bytes == segments * segment + found.segments * results
    for limit in ({"multiprocessors": 63}, {"shared_bytes": 120 * 1024}):
        alone = explain(1024, 2**18 - 127, HALF, backward=True, **limit)
        assert alone.regime.name == "persistent_256x16"


def test_few_long_rows_share_the_gpu() -> None:
    found = explain(4, 33554432, HALF)
    assert found.regime.blocks_per_row is None
    assert found.segments == LIMITS.constants["kMaxSegments"]
    assert found.blocks_per_row == found.segments // (found.regime.threads_per_row // 32)
    # Results of two rows, which alternate, and a number of blocks.
    assert found.workspace_bytes == (2 * found.segments + 1) * LIMITS.constants["kResultBytes"]
    alone = explain(1, 33554432, HALF, multiprocessors=132)
    assert (alone.segments, alone.blocks_per_row) == (2048, 128)


@pytest.mark.parametrize(
    ("rows", "columns", "at_a_time"),
    [
        *((4, 2**20, 4), (4, 2**23, 2), (5, 2**23, 2), (64, 2**20, 16), (64, 2**21, 8)),
        *((31, 2**25, 1), (32, 2**25, 2)),  # of many, two that shared memory does not keep
    ],
)
def test_very_long_rows_have_persistent_blocks(rows: int, columns: int, at_a_time: int) -> None:
    """As many at a time as shared memory keeps, or a little more."""
    found = explain(rows, columns, HALF, multiprocessors=132)
    of_a_row = (2 * found.segments + 1) * LIMITS.constants["kResultBytes"]
    assert found.regime.is_persistent
    assert found.rows_at_a_time == at_a_time
    assert found.workspace_bytes == at_a_time * of_a_row
    blocks = 132 * found.regime.blocks_per_sm
    assert blocks / 2 < at_a_time * found.blocks_per_row <= blocks


@pytest.mark.parametrize("backward", [False, True])
def test_every_regime_serves_some_call(backward: bool) -> None:
    table = LIMITS.backward if backward else LIMITS.forward
    edges = {regime.max_vectors for regime in table if regime.max_vectors is not None}
    vectors = {1} | {edge + extra for edge in edges for extra in (0, 1)}
    fewest = {regime.min_rows for regime in table}
    rows = {count - less for count in fewest for less in (0, 1)} | {1}
    kinds: list[dict[str, Any]] = [{}, {"causal": True}]
    kinds += [{"window": (left, 0)} for left in (0, 1500)]
    kinds.append({"bias_gradient": True} if backward else {"masked": True})
    kinds.append({"dropout": True})
    gpus = [{"max_cluster": count, "shared_bytes": H200.shared_bytes} for count in (1, 8, 16)]
    gpus += [{"max_cluster": 1, "shared_bytes": kilobytes * 1024} for kilobytes in (99, 64)]
    # Here a query sees all keys or a half. Below, the only query of a head sees all keys.
    reached = {explain(n, n, HALF, causal=True, backward=backward).index for n in (2400, 4096)}
    counts = sorted(count for count in rows if 0 < count <= LIMITS.max_index)
    columns = [8 * length - less for length in sorted(vectors) for less in (0, 1)]
    calls = [*itertools.product(counts, columns, kinds, gpus)]
    random.Random(0).shuffle(calls)  # all regimes are reached long before all calls are explained
    for count, length, kind, gpu in calls:
        call = {"queries": 1, "backward": backward, **kind, **gpu}
        reached.add(explain(count, length, HALF, **call).index)
        if len(reached) == len(table):
            break
    assert [each.name for index, each in enumerate(table) if index not in reached] == []


def _answers() -> list[Explanation]:
    """Of calls at the edges of the tables."""
    regimes = LIMITS.forward + LIMITS.backward
    edges = {regime.max_vectors for regime in regimes if regime.max_vectors is not None}
    fewest = {regime.min_rows for regime in regimes}
    counts = sorted({count - less for count in fewest for less in (0, 1)} | {1})
    counts = [rows for rows in counts if 0 < rows <= LIMITS.max_index]
    kinds = ({}, {"masked": True}, {"causal": True, "queries": 1}, {"dropout": True})
    found = []
    for dtype, backward in itertools.product((HALF, FLOAT), (False, True)):
        pack = 16 // dtype.itemsize
        lengths = {pack * edge + extra for edge in edges for extra in (-pack, 1 - pack, 0, 1)}
        for columns, rows, kind in itertools.product(sorted(lengths - {0}), counts, kinds):
            found.append(explain(rows, columns, dtype, backward=backward, **kind))
    return found


@pytest.mark.gpu
def test_compiled_part_and_plans_alone_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load().available
    common.plans.cache_clear()
    with_kernels = _answers()
    monkeypatch.setattr(library, "status", lambda: library.Status(False, reason="none"))
    common.plans.cache_clear()
    assert _answers() == with_kernels
    common.plans.cache_clear()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "status", lambda: library.Status(False, reason="none"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(library.BuildError, match="no-such-compiler"):
        library.plans()


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
    common = {"name": "GPU", "multi_processor_count": 100, "major": 9, "minor": 0}
    common["shared_memory_per_block_optin"] = 1000
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
    properties: Any, max_cluster: int, bytes_per_second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    gpu = current_gpu()
    assert (gpu.name, gpu.multiprocessors, gpu.max_cluster) == ("GPU", 100, max_cluster)
    assert gpu.major == properties.major
    assert gpu.bytes_per_second == pytest.approx(bytes_per_second)
    assert ("an H200" in gpu.bandwidth_source) == (bytes_per_second == H200.bytes_per_second)


def test_without_a_gpu_an_h200_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert current_gpu() is H200


# The command line


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(__main__, "current_gpu", lambda: H200)
    return command


def words_of(result: Result) -> str:
    return " ".join(result.output.split())


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
        (["4096x8192", "--dropout"], (4096, 8192, HALF), {"dropout": True}),
        (["4096x8192", "--bias-gradient"], (4096, 8192, HALF), {"bias_gradient": True} | BACKWARD),
    ],
)
def test_command(
    run: Any, arguments: list[str], call: tuple[int, int, torch.dtype], keywords: dict[str, Any]
) -> None:
    found = explain(*call, **keywords)
    result = run("explain", *arguments)
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


@pytest.mark.parametrize("relative", [False, True])
def test_command_of_attention(run: Any, relative: bool) -> None:
    options = ["--causal", "--key-heads=2", "--keys=4096", "--bias-gradient", "--tflops=500"]
    options += ["--relative"] if relative else []
    text = words_of(run("explain", "2x4x1024x64", "--function=attention", *options))
    call: dict[str, Any] = {"relative" if relative else "bias": True, "bias_gradient": True}
    call |= {"keys": 4096, "key_heads": 2, "causal": True, "backward": True}
    found = explain_attention(2, 4, 1024, 64, **call)
    assert text.startswith("kernel backward, Hopper ")
    assert f"tiles {found.tile_queries} x {found.tile_keys}, queries x keys" in text
    assert f"blocks {found.blocks:,}, of {found.threads} threads" in text
    assert f"reads {found.bytes_read:,} bytes at least" in text
    assert f"writes {found.bytes_written:,} bytes at least" in text
    time = found.microseconds(H200.bytes_per_second, 5e14)
    assert f"expected time {time:.1f} µs on NVIDIA H200" in text
    assert f"{of_attention.HOPPER_BACKWARD_SHARE:.0%} of 500 TFLOP/s, as given" in text


def test_command_tells_the_order_of_gradients(run: Any) -> None:
    text = words_of(run("explain", "4x16x4096x64", "--function=attention", "--deterministic"))
    assert "blocks take turns at gradients of queries" in text


@pytest.mark.parametrize("function", ["softmax", "softmax_topk"])
def test_command_for_another_gpu(run: Any, function: str) -> None:
    text = words_of(run("explain", "8192x50257", f"--function={function}", "--gpu=L4"))
    found: Any = explain_topk(8192, 50257, 10, HALF, gpu="L4")
    if function == "softmax":
        found = explain(8192, 50257, HALF, gpu="L4")
    assert f"expected time {found.microseconds():.1f} µs on NVIDIA L4" in text
    assert "bandwidth 0.26 TB/s, 88% of its nominal 0.3 TB/s" in text
    assert "measured no: the kernels were not timed on such a GPU" in text


def test_command_of_topk(run: Any) -> None:
    text = words_of(
        run("explain", "8192x50257", "--function=softmax_topk", "--k=20", "--bandwidth=1")
    )
    found = explain_topk(8192, 50257, 20, HALF)
    assert text.startswith(f"regime {found.regime}, forward ")
    assert "rows 8,192 of 50,257 float16 k 20" in text
    assert f"blocks {found.blocks:,}, of {found.threads} threads" in text
    assert f"expected time {found.microseconds(1e12):.1f} µs on NVIDIA H200" in text


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
        (["8x64", "--function=attention"], "shape: expected BATCHxHEADSxQUERIESxHEAD_DIM"),
        (["2x4x8x136", "--function=attention", "--dtype=fp32"], "head_dim: expected at most 128"),
        (["8x64", "--function=softmax_topk", "--k=65"], "k: expected at most 64, got 65"),
        (["8x64", "--gpu=MI300"], "gpu: expected one of T4, "),
        (["2x4x8x64", "--function=attention", "--gpu=T4"], "attention runs in plain torch there"),
    ],
)
def test_command_refuses(run: Any, arguments: list[str], message: str) -> None:
    result = run("explain", *arguments, code=1)
    assert result.output.startswith("Error: ")
    assert message in result.output


def test_tables_of_limits_are_printed(run: Any) -> None:
    result = run("--verbose")
    for heading in ("Forward, row regimes", "Backward, row regimes", "waits in"):
        assert heading in result.output
    for regime in LIMITS.forward + LIMITS.backward:
        assert regime.name in result.output


def test_verdict_comes_first_and_alone(run: Any) -> None:
    result = run()
    first, *others = result.output.splitlines()
    assert first.startswith("Works fused here: ")
    if not torch.cuda.is_available():
        assert "no, torch sees no CUDA GPU. Attention runs torch's own where" in first
    assert len(others) < 12
    assert "row regimes" not in result.output


HAS_KERNELS = library.Status(True, Path("C.so"))


@pytest.mark.parametrize(
    ("status", "against", "expected"),
    [
        (library.Status(False, reason="no nvcc"), (), "not yet, no compiled kernels: no nvcc. "),
        (HAS_KERNELS, (), "yes, softmax, softmax_topk, attention."),
        (
            HAS_KERNELS,
            ("attention",),
            "yes, softmax, softmax_topk. attention runs in plain torch: memory: expected 2, got 1.",
        ),
    ],
)
def test_verdict_of_a_gpu(
    status: library.Status, against: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why_not_fused(function: Any, *tensors: Any) -> tuple[megasoftmax.Reason, ...]:
        return (megasoftmax.Reason("memory", "1", "2"),) * (function.__name__ in against)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(library, "status", lambda: status)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: torch.zeros(sizes))
    monkeypatch.setattr(megasoftmax, "why_not_fused", why_not_fused)
    assert verdict().startswith(f"Works fused here: {expected}")


def test_version(run: Any) -> None:
    assert run("--version").output == f"megasoftmax {megasoftmax.__version__}\n"


def test_console_script_is_the_command(forks: Forks) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"megasoftmax": "megasoftmax.__main__:main"}
    result = forks.run("from megasoftmax.__main__ import main; main()", "--help")
    assert result.returncode == 0, result.stderr
    assert "Usage: megasoftmax " in result.stdout
