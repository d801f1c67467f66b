"""What launches take of every GPU in common/limits.h: none takes what the GPU does not have.

The plans are asked on the CPU, for each compute capability. On a GPU, launches run as on others.
"""

import itertools

import pytest
import torch
from inputs import bits_equal, gpu_like, normal, why_no_attention
from sanitize_cases import table_of
from torch.profiler import ProfilerActivity, profile

import megasoftmax
from megasoftmax.explain import explain, explain_attention, explain_topk
from megasoftmax.limits import kernel_limits

LIMITS = kernel_limits()
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
MOST_THREADS = 1024  # of a block

# Compute capability, bytes of shared memory of a block and of a multiprocessor, blocks of a cluster
GPUS = [tuple(map(int, row)) for row in table_of("common/limits.h", "kGpus")]


def _name(gpu):
    return f"{gpu[0]}.{gpu[1]}"


on_every_gpu = pytest.mark.parametrize("gpu", GPUS, ids=_name)


def test_gpus_are_those_that_the_library_is_built_for():
    found = {(major, minor): (block, cluster) for major, minor, block, _, cluster in GPUS}
    small, large = 99 * 1024, 227 * 1024
    assert found == {
        (7, 5): (64 * 1024, 1),
        (8, 0): (163 * 1024, 1),
        (8, 6): (small, 1),
        (8, 9): (small, 1),
        (9, 0): (large, 16),
        (10, 0): (large, 16),
        (10, 3): (large, 16),
        (12, 0): (small, 8),
    }
    reserved = {major: per_sm - block for major, _, block, per_sm, _ in GPUS}
    assert reserved == {7: 0, 8: 1024, 9: 1024, 10: 1024, 12: 1024}


# Attention

DIMS = (8, 32, 33, 64, 65, 96, 128, 129, 192, 256)
BIASES = ({}, {"bias": True}, {"bias": True, "bias_dtype": FLOAT})


def test_attention_needs_8_0():
    message = "major: expected at least 8, the first with kernels, got 7"
    with pytest.raises(ValueError, match=message):
        explain_attention(1, 1, 100, 64, major=7, shared_bytes=64 * 1024)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu[0] >= 8], ids=_name)
def test_attention_fits(gpu):
    major, _, shared_bytes, _, _ = gpu
    tables = {
        backward: [int(row[0]) for row in table_of("attention/limits.h", name)]
        for backward, name in ((False, "kAttentionForwardTiles"), (True, "kAttentionBackwardTiles"))
    }
    calls = itertools.product(DIMS, (1, 16, 17, 4096), (False, True), BIASES)
    for dim, queries, backward, bias in calls:
        given = {"major": major, "shared_bytes": shared_bytes, "backward": backward, **bias}
        found = explain_attention(2, 4, queries, dim, keys=5000, **given)
        assert found.threads <= MOST_THREADS
        if found.hopper:
            assert major == 9
            continue
        assert 0 < found.shared_bytes <= shared_bytes
        assert found.tile_head_dim == min(row for row in tables[backward] if row >= dim)


SMALL = {"major": 8, "shared_bytes": 99 * 1024}
LARGE = {"major": 8, "shared_bytes": 163 * 1024}


@pytest.mark.parametrize("bias", BIASES, ids=lambda bias: " ".join(map(str, bias.values())))
@pytest.mark.parametrize(
    ("dim", "call", "tiles"),
    [
        # Queries, keys and threads of tiles in small blocks, and in large ones.
        (64, {}, ((128, 64, 128), (128, 64, 128))),
        (128, {}, ((128, 64, 128), (128, 64, 128))),
        (256, {}, ((64, 32, 128), (128, 64, 256))),
        (64, {"backward": True}, ((64, 64, 128), (64, 64, 128))),
        (128, {"backward": True}, ((64, 64, 128), (64, 128, 256))),
        (256, {"backward": True}, ((32, 32, 128), (64, 64, 128))),
        (64, {"queries": 16}, ((16, 16, 256), (16, 16, 256))),
        (128, {"queries": 16}, ((16, 16, 192), (16, 16, 192))),
        (256, {"queries": 16}, ((16, 16, 96), (16, 16, 96))),
    ],
)
def test_tiles_are_chosen_by_bytes(dim, call, tiles, bias):
    for gpu, expected in zip((SMALL, LARGE), tiles, strict=True):
        given = {"queries": 1000} | call | bias | gpu
        found = explain_attention(2, 4, head_dim=dim, keys=1000, **given)
        assert (found.tile_queries, found.tile_keys, found.threads) == expected


IN_FLOAT = {"bias": True, "bias_dtype": FLOAT}
BACKWARD = {"backward": True}
FORWARD_KINDS = [{"masked": masked, "dropout": drops} for masked in (0, 1) for drops in (0, 1)]


@pytest.mark.parametrize(
    ("dim", "options", "kilobytes", "expected"),
    [
        # One byte less, and the next tile.
        (256, {}, 128, 128),
        (256, {}, 128 - 2**-10, 64),
        (256, {"bias": True}, 144, 144),
        (256, {"bias": True}, 144 - 2**-10, 72),
        # A second tile of the bias, but not in the place of a second block.
        (128, {"bias": True}, 97, 96),
        (128, {"bias": True}, 163, 80),
        (128, {"bias": True}, 227, 96),
        (128, IN_FLOAT, 99, 98),
        (128, BACKWARD, 99, 82),
        (128, BACKWARD | {"bias": True}, 99, 90),
        (128, BACKWARD | IN_FLOAT, 99, 99),
        (256, BACKWARD | IN_FLOAT, 163, 163),
        # Two tiles of queries, but not where one of them leaves room for a second block.
        (64, BACKWARD, 99, 66),
        (32, BACKWARD, 99, 42),
        (32, BACKWARD | {"bias": True}, 99, 42),
        (32, BACKWARD | {"bias": True}, 163, 50),
    ],
)
def test_bytes_of_attention(dim, options, kilobytes, expected):
    shared_bytes = int(1024 * kilobytes)
    found = explain_attention(1, 1, 100, dim, **options, major=8, shared_bytes=shared_bytes)
    assert found.shared_bytes == 1024 * expected


# Softmax and top-k


@on_every_gpu
def test_softmax_fits(gpu):
    major, _, shared_bytes, _, max_cluster = gpu
    declared = LIMITS.constants["kMaxDeclaredBytes"]
    edges = {row.max_vectors for row in LIMITS.forward + LIMITS.backward if row.max_vectors}
    # The longest rows that have room in 99 KB and 64 KB, and the next ones; backward in 64 KB.
    edges |= {49 * 128, 31 * 128, 15 * 128}
    vectors = sorted({edge + more for edge in edges for more in (0, 1)})
    rows = sorted({row.min_rows + more for row in LIMITS.forward for more in (0, 1)} - {0})
    of_bias = BACKWARD | {"bias_gradient": True}
    kinds = [*FORWARD_KINDS, BACKWARD, of_bias, of_bias | {"dropout": True}]
    of_gpu = {"shared_bytes": shared_bytes, "max_cluster": max_cluster}
    for length, count, kind in itertools.product(vectors, rows, kinds):
        found = explain(count, 8 * length, HALF, **of_gpu, **kind)
        assert (found.shared_bytes or 0) + declared <= shared_bytes
        assert (found.regime.blocks_per_row or 1) <= max_cluster
        # Persistent blocks copy the next row while they sum one: from 8.0 on. Very long rows have
        # them on all GPUs.
        assert major >= 8 or not found.regime.is_persistent or found.regime.storage == "reread"
        assert (found.threads or 0) <= MOST_THREADS


def test_rows_that_small_blocks_have_no_room_for_go_elsewhere():
    """Rows of 49 segments still fit 99 KB, and rows of 31 segments 64 KB."""
    for kilobytes, segments, largest, reread in (
        (99, 49, "shared_512", "whole_gpu_256"),
        (64, 31, "shared_256", "whole_gpu_64"),
    ):
        for vectors, regime in ((segments * 128, largest), (segments * 128 + 1, reread)):
            found = explain(400, 8 * vectors, HALF, shared_bytes=kilobytes * 1024, max_cluster=1)
            assert found.regime.name == regime
            found = explain(400, 8 * vectors, HALF, max_cluster=1)
            assert found.regime.storage == "shared"


@pytest.mark.parametrize("max_cluster", [8, 16])
def test_rows_that_a_cluster_has_room_for_are_read_once(max_cluster):
    longest = max(row.max_vectors for row in LIMITS.forward if row.name == "cluster_256x8")
    lengths = (8000, 12000, 17000, 25000, 27000, longest - 8)
    calls = itertools.product(lengths, (17, 40, 99, 100, 1000), FORWARD_KINDS)
    for vectors, count, kind in calls:
        for columns in (8 * vectors, 8 * vectors - 1):
            found = explain(count, columns, HALF, max_cluster=max_cluster, **kind)
            assert found.regime.storage != "reread", (count, columns, kind)


def test_bias_gradients_fit_the_smallest_blocks():
    """Backward, rows keep two tensors: 15 segments in 64 KB; contiguous ones use registers."""
    given = {"backward": True, "shared_bytes": 64 * 1024, "max_cluster": 1, "causal": True}
    for bias_gradient, reread in ((False, "whole_gpu_64"), (True, "reread_64")):
        for vectors, regime in ((15 * 128, "shared_256"), (15 * 128 + 1, reread)):
            found = explain(400, 8 * vectors, HALF, bias_gradient=bias_gradient, **given)
            assert found.regime.name == regime


@on_every_gpu
def test_topk_fits(gpu):
    *_, shared_bytes, _, max_cluster = gpu
    declared = LIMITS.topk["kTopkMaxDeclaredBytes"]
    vectors = (1, 8, 9, 32, 33, 256, 257, 512, 1024, 1025, 14000, 14001, 65536, 10**6)
    of_gpu = {"shared_bytes": shared_bytes, "max_cluster": max_cluster}
    counts, ks = (1, 30, 60, 120, 200, 10**5), (1, 16, 17, 256)
    for length, rows, k, backward in itertools.product(vectors, counts, ks, (False, True)):
        if k > 8 * length:
            continue
        found = explain_topk(rows, 8 * length, k, HALF, backward=backward, **of_gpu)
        assert found.shared_bytes + declared <= shared_bytes
        assert found.threads <= MOST_THREADS
        if found.regime.startswith("cluster"):
            assert found.blocks_per_row <= max_cluster


# As on another GPU


def _run(function):
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        found = function()
        torch.cuda.synchronize()
    return found, {event.name for event in profiler.events() if "softmax" in event.name}


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [f"{gpu[0]}.{gpu[1]}" for gpu in GPUS])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(40, 100_000), (2000, 51_000), (3, 3_000_000)])
def test_rows_have_the_same_bits_as_on_other_gpus(rows, columns, backward, capability):
    scores = normal(rows, columns, device="cuda", dtype=BFLOAT).requires_grad_()
    gradient = normal(rows, columns, device="cuda", dtype=BFLOAT, seed=1)

    def call():
        p = megasoftmax.softmax(scores, fused=True)
        return torch.autograd.grad(p, scores, gradient)[0] if backward else p.detach()

    expected = call()
    with gpu_like(capability):
        assert bits_equal(call(), expected)


@pytest.mark.gpu
def test_attention_is_refused_on_7_5():
    query = normal(1, 2, 100, 64, device="cuda", dtype=BFLOAT)
    softmax_before = megasoftmax.softmax(query, fused=True)
    note = torch.ones(1, 1, 100, 100, dtype=torch.bool, device="cuda")
    ops = torch.ops.megasoftmax
    options = (None, None, 0.125, 0.0, False, -1, -1, None, None, False)
    options = (*options, None, None, None, 1, 0.0, None, False)
    output, statistics = torch.empty_like(query), query.new_empty(3, 1, 2, 100, dtype=FLOAT)
    passes = {
        "tile_note": (note, 1, 100, 100),
        "attention_forward": (query, query, query, *options),
        "attention_backward": (
            *(output, None, query, query, query, output, statistics, *options),
            *(False, False, False),
        ),
    }
    with gpu_like("7.5"):
        (reason,) = megasoftmax.why_not_fused(megasoftmax.attention, query, query, query)
        assert (reason.constraint, reason.limit) == ("compute capability", "at least 8.0")
        assert "7.5" in reason.actual
        megasoftmax.attention(query, query, query)  # in plain torch, by C++ or Python
        for name, arguments in passes.items():
            with pytest.raises(RuntimeError, match=r"compute capability: expected at least 8\.0"):
                getattr(ops, name)(*arguments)
        torch.testing.assert_close(megasoftmax.softmax(query, fused=True), softmax_before)
    if why_no_attention() is None:  # on this GPU
        assert megasoftmax.why_not_fused(megasoftmax.attention, query, query, query) == ()


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="no clusters"
)
@pytest.mark.parametrize("capability", ["7.5", "8.6"])
def test_clusters_are_left_out_where_there_are_none(capability):
    scores = normal(40, 100_000, device="cuda", dtype=BFLOAT)
    column_scores = normal(1, 70_000, 40, device="cuda", dtype=BFLOAT)
    calls = {
        "rows": lambda: megasoftmax.softmax(scores, fused=True),
        "top-k": lambda: megasoftmax.softmax_topk(scores, 5, fused=True)[1],
        "columns": lambda: megasoftmax.softmax(column_scores, dim=1, fused=True),
    }
    for name, call in calls.items():
        with gpu_like("9.0"):
            expected, own = _run(call)
        with gpu_like(capability):
            found, others = _run(call)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6, msg=name)
        # Columns and top-k have one kernel, with or without a cluster.
        assert (own == others) == (name != "rows")
