"""What megasoftmax.explain says of attention and top-k, by hand and by the tables of limits.h."""

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from sanitize_cases import table_of

from megasoftmax.build import library
from megasoftmax.explain import (
    GPU_NAMES,
    H200,
    LAUNCH_MICROSECONDS,
    common,
    explain,
    explain_attention,
    explain_topk,
    gpu_named,
)
from megasoftmax.explain import attention as of_attention
from megasoftmax.limits import kernel_limits

HALF, FLOAT = torch.float16, torch.float32


# Attention


IN_FLOAT = {"bias": True, "bias_dtype": FLOAT}
HEAD_DIMS = [8, 31, 32, 33, 64, 65, 80, 81, 96, 100, 128, 129, 192, 200, 256]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("call", [{"major": 8}, {"major": 10}, IN_FLOAT], ids=str)
def test_tiles_of_portable_attention_are_those_of_the_table(
    call: dict[str, Any], head_dim: int
) -> None:
    padded = -(-head_dim // 8) * 8
    for backward, name in ((False, "kAttentionForwardTiles"), (True, "kAttentionBackwardTiles")):
        row = next(row for row in table_of("attention/limits.h", name) if int(row[0]) >= padded)
        found = explain_attention(2, 6, 1000, head_dim, key_heads=3, backward=backward, **call)
        assert not found.hopper
        warps, third, fourth = map(int, row[1:4])
        assert (found.tile_head_dim, found.threads) == (int(row[0]), 32 * warps)
        if backward:
            assert (found.tile_queries, found.tile_keys) == (third, 16 * warps)
            assert found.slices == int(row[0]) // fourth
            assert found.blocks == 2 * 3 * -(-1000 // (16 * warps)) * found.slices
            assert found.workspace_bytes == 2 * 6 * 1000 * (16 + 4 * padded)
        else:
            assert (found.tile_queries, found.tile_keys) == (warps * third, fourth)
            assert found.blocks == 2 * 6 * -(-1000 // (warps * third))
            assert found.workspace_bytes == 0
        assert found.kernel == ("backward" if backward else "forward")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("major", [8, 9])
@pytest.mark.parametrize(("tokens", "dim", "side"), [(49, 32, 64), (64, 40, 64), (65, 32, 144)])
def test_blocks_take_several_small_heads(
    tokens: int, dim: int, side: int, major: int, backward: bool
) -> None:
    options: dict[str, Any] = {"major": major, "backward": backward}
    for bias in (False, True):
        found = explain_attention(1000, 6, tokens, dim, bias=bias, **options)
        assert found.several_heads
        assert not found.hopper
        assert (found.tile_queries, found.tile_keys, found.threads) == (side, side, 2 * side)
        assert found.blocks < 1000
        assert ("keeps the bias" in found.why) == bias
    usual = {"batches": 1000, "heads": 6, "queries": tokens, "head_dim": dim}
    others: list[dict[str, Any]] = [{"queries": 145}, {"head_dim": 72}, {"queries": 16}]
    others += [{"batches": 3}, {"key_heads": 3}, {"dtype": FLOAT}]
    for other in others:
        assert not explain_attention(**usual | other, bias=True, **options).several_heads


@pytest.mark.parametrize(
    ("shape", "options", "has_workers"),
    [
        ((4, 16, 4096, 128), {}, True),
        ((4, 16, 4096, 64), {"causal": True}, True),
        ((1, 32, 8192, 128), {"key_heads": 8, "causal": True}, True),
        ((4, 16, 4096, 128), {"window": (1000, 0), "softcap": True}, True),
        ((16, 12, 1024, 64), {"causal": True}, False),  # products would end first
        ((1, 10, 4096, 128), {}, True),
        ((1, 9, 4096, 128), {}, False),  # too few heads
        ((1, 14, 8192, 128), {"causal": True}, True),
        ((1, 13, 8192, 128), {"causal": True}, False),  # heads do not fall into sections
        ((40, 16, 4096, 128), {"keys": 384}, True),
        ((40, 16, 4096, 128), {"keys": 256}, False),  # too few keys
        ((4, 16, 4096, 192), {}, False),
        ((4, 16, 4096, 64), {"bias": True}, False),
        ((4, 16, 4096, 64), {"masked": True}, False),
        ((4, 16, 4096, 64), {"major": 8}, False),
    ],
    ids=str,
)
def test_row_workers(
    shape: tuple[int, int, int, int], options: dict[str, Any], has_workers: bool
) -> None:
    found = explain_attention(*shape, **options, backward=True)
    assert ("row work of other heads" in found.why) == has_workers


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_of_attention_on_hopper_are_those_of_the_table(head_dim: int) -> None:
    padded = -(-head_dim // 8) * 8
    found = explain_attention(2, 6, 3000, head_dim, key_heads=3)
    back = explain_attention(2, 6, 3000, head_dim, key_heads=3, backward=True)
    assert (found.kernel, back.kernel) == ("forward", "backward")
    assert found.hopper
    assert back.hopper
    assert "compute capability 9.0: Hopper's own kernels" in found.why
    forward_table = table_of("attention/limits.h", "kAttentionHopperTiles")
    row = next(row for row in forward_table if int(row[1]) >= padded)
    tile, warpgroups, keys = int(row[0]), int(row[2]), int(row[3])
    assert (found.tile_head_dim, found.tile_value_dim) == (tile, tile)
    assert found.threads == 128 * (warpgroups + 1)
    assert (found.tile_queries, found.tile_keys) == (64 * warpgroups, keys)
    assert found.blocks == 2 * 6 * -(-3000 // (64 * warpgroups))
    assert found.workspace_bytes == 0
    backward_table = table_of("attention/limits.h", "kAttentionHopperBackwardTiles")
    row = next(row for row in backward_table if int(row[1]) >= padded)
    tile, queries = int(row[0]), int(row[2])
    assert (back.tile_head_dim, back.tile_value_dim, back.threads) == (tile, tile, 128 * 3)
    assert (back.tile_queries, back.tile_keys) == (queries, 64 if tile > 128 else 128)
    assert back.slices == 1
    assert back.blocks == 2 * 3 * -(-3000 // back.tile_keys)
    # Rows and sums of dQ, and pairs of rows of whole tiles.
    of_pairs = 0 if tile > 128 else 8 * 3072
    assert back.workspace_bytes == 2 * 6 * (3000 * (16 + 4 * padded) + of_pairs)


@pytest.mark.parametrize(("tokens", "tile_keys"), [(256, 256), (384, 384), (512, 256), (768, 384)])
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_many_heads_take_whole_heads(
    tokens: int, tile_keys: int, biased: bool
) -> None:
    options = {"bias": biased, "bias_gradient": biased, "backward": True}
    found = explain_attention(tokens, 4, tokens, 32, **options)
    assert found.hopper
    assert found.several_heads
    assert found.tile_keys == tile_keys
    assert found.blocks == 132
    assert f"{4 * tokens} heads: a block takes whole ones" in found.why
    for other in (
        {"batches": 20},  # fewer than multiprocessors
        {"head_dim": 40},
        {"key_heads": 2},
        {"dtype": FLOAT},
        {"window": (tokens // 2, tokens // 2)},
        {"masked": True},
    ):
        call = {"batches": tokens, "heads": 4, "queries": tokens, "head_dim": 32} | options | other
        assert not explain_attention(**call).several_heads


@pytest.mark.parametrize(
    ("rows", "heads", "tokens", "tile_keys", "blocks"),
    [
        (256, 4, 256, 256, 128),
        (384, 4, 384, 384, 132),
        (512, 4, 512, 512, 128),
        (512, 4, 513, 640, 260),
        (768, 4, 768, 768, 264),  # two rounds of blocks, of 69 or 70 rows each
        (900, 4, 769, 896, 392),
        (1024, 4, 1023, 1024, 128),
        (48, 16, 384, 384, 264),  # a round of blocks of 9 or 10 rows, and one of 8 each
        (200, 4, 200, 256, 128),
    ],
)
def test_blocks_keep_a_bias_that_rows_share(
    rows: int, heads: int, tokens: int, tile_keys: int, blocks: int
) -> None:
    options: dict[str, Any] = {"bias": True}
    call = {"batches": rows, "heads": heads, "queries": tokens, "head_dim": 32}
    for dim in (8, 24, 32):
        found = explain_attention(**(call | {"head_dim": dim}), **options)
        assert found.hopper
        assert found.several_heads
        assert (found.tile_queries, found.tile_keys) == (128, tile_keys)
        assert found.blocks == blocks
        assert f"{rows} heads share a bias: a block keeps that of 128 queries" in found.why
        assert not found.bias_copied
    for other in (
        {"batches": 3},  # a block would have too few of them
        {"keys": 130, "queries": 145},  # fill little of the tiles
        {"keys": 1025},
        {"keys": 513, "batches": 95},  # few for half of the bias in shared memory
        {"queries": 16},
        {"head_dim": 72 if tokens <= 256 else 40},
        {"value_dim": 72 if tokens <= 256 else 40},
        {"dtype": FLOAT},
        {"bias_dtype": FLOAT},
        {"bias": False},
        {"bias": False, "relative": True},
        {"window": (tokens // 2, tokens // 2)},
        {"causal": True},
        {"masked": True},  # of pairs
        {"major": 8},
    ):
        assert not explain_attention(**(call | options | other)).several_heads


@pytest.mark.parametrize("dims", [(64, 64), (40, 40), (24, 40)])
def test_blocks_keep_a_bias_of_few_keys_at_larger_head_dimensions(dims: tuple[int, int]) -> None:
    call = {"batches": 128, "heads": 12, "head_dim": dims[0], "value_dim": dims[1], "bias": True}
    found = explain_attention(**call, queries=197)
    assert found.several_heads
    assert (found.tile_head_dim, found.tile_queries, found.tile_keys) == (64, 128, 256)
    # They fill too little of the tiles, or are too many.
    assert not any(explain_attention(**call, queries=n).several_heads for n in (128, 160, 257))


@pytest.mark.parametrize("head_dim", [8, 32, 33])
@pytest.mark.parametrize(
    ("tokens", "forward", "backward"),
    # Of tiles of 192 x 128 and 128 x 128.
    [(64, False, False), (150, False, False), (197, False, True), (384, True, True)],
)
def test_small_head_dimensions_run_on_hopper_where_they_fill_tiles(
    head_dim: int, tokens: int, forward: bool, backward: bool
) -> None:
    for is_backward, is_filled in ((False, forward), (True, backward)):
        found = explain_attention(64, 4, tokens, head_dim, backward=is_backward)
        assert found.hopper == (is_filled or head_dim > 32)
        said = f"head dimension of {head_dim} where it fills less than 75% of their tiles"
        assert (said in found.why) == (not found.hopper)


@pytest.mark.parametrize(
    ("dims", "tile", "with_bias"),
    [
        ((192, 128), (192, 128), (192, 192)),
        ((136, 64), (192, 128), (192, 192)),
        ((129, 129), (192, 192), (192, 192)),
        ((128, 192), (192, 192), (192, 192)),
        ((193, 128), (256, 256), (256, 256)),
        ((128, 40), (128, 128), (128, 128)),
    ],
)
def test_tiles_with_fewer_columns_of_values(
    dims: tuple[int, int], tile: tuple[int, int], with_bias: tuple[int, int]
) -> None:
    """A dense bias has no room beside 128 keys of such a tile, which a table has."""
    dim, value_dim = dims
    for options, expected in (({}, tile), ({"relative": True}, tile), ({"bias": True}, with_bias)):
        found = explain_attention(2, 6, 3000, dim, value_dim=value_dim, **options)
        assert found.hopper
        assert (found.tile_head_dim, found.tile_value_dim) == expected
        back = explain_attention(2, 6, 3000, dim, value_dim=value_dim, backward=True, **options)
        assert back.hopper == (not options or dim <= 128 >= value_dim)
        if back.hopper:
            assert (back.tile_head_dim, back.tile_value_dim) == tile
    found = explain_attention(2, 6, 3000, 192, value_dim=128)
    assert "up to 192 and 128 of values hold 192 and 128" in found.why


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("head_dim", [8, 32, 33, 64, 65, 128])
def test_float32_has_tiles_of_its_own(head_dim: int, backward: bool) -> None:
    name = "kAttentionBackwardTiles" if backward else "kAttentionForwardTiles"
    rows = [row for row in table_of("attention/limits.h", name) if len(row) == 6]
    assert {row[-1] for row in rows} == {"4"}
    row = next(row for row in rows if int(row[0]) >= head_dim)
    found = explain_attention(2, 6, 1000, head_dim, dtype=FLOAT, backward=backward)
    assert (found.tile_head_dim, found.threads) == (int(row[0]), 32 * int(row[1]))
    assert not found.hopper
    assert "Hopper's own do not take float32" in found.why
    assert 2 * found.tile_keys * found.tile_head_dim * 4 < found.shared_bytes <= H200.shared_bytes
    halves = explain_attention(2, 6, 1000, head_dim, backward=backward, major=8)
    assert found.share == pytest.approx(halves.share / 6)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 129, 256])
def test_relative_biases_run_on_hopper(head_dim: int) -> None:
    """With as many keys as tensor copies of a dense bias do not take."""
    options: dict[str, Any] = {"keys": 1001, "relative": True}
    found = explain_attention(2, 6, 1000, head_dim, **options)
    back = explain_attention(2, 6, 1000, head_dim, **options, backward=True)
    both = explain_attention(2, 6, 1000, head_dim, **options, backward=True, bias_gradient=True)
    assert found.hopper
    assert back.hopper == both.hopper == (head_dim <= 128)
    assert ("do not take a head dimension of 256 with a bias" in back.why) == (head_dim == 256)
    without = explain_attention(2, 6, 1000, head_dim, keys=1001)
    entries = 6 * (1000 + 1001 - 1)
    assert found.bytes_read == without.bytes_read + 2 * entries
    assert both.bytes_read == back.bytes_read
    assert both.bytes_written == back.bytes_written + 2 * entries
    tiles = -(-1001 // both.tile_keys)
    sums = 2 * 6 * tiles * (both.tile_keys - 1 + 1000)
    assert both.workspace_bytes == back.workspace_bytes + 4 * sums


@pytest.mark.parametrize(
    ("call", "is_copied"),
    [
        ({}, True),
        ({"keys": 376, "backward": True, "bias_gradient": True}, False),
        ({"backward": True}, True),
        ({"bias_dtype": FLOAT}, True),
        ({"major": 8}, True),
        # A few share an entry: kernels take rows that begin anywhere.
        ({"batches": 2}, False),
        ({"batches": 2, "heads": 12}, True),  # the storage ends within 16 bytes
        ({"batches": 2, "masked": True}, False),
        ({"batches": 2, "head_dim": 128}, False),
        ({"batches": 2, "head_dim": 136}, True),
        ({"batches": 2, "head_dim": 128, "backward": True}, False),
        ({"batches": 2, "backward": True}, False),
        ({"batches": 2, "backward": True, "masked": True}, True),
        ({"batches": 2, "backward": True, "bias_gradient": True}, True),
        ({"batches": 1, "backward": True, "bias_gradient": True}, False),
        ({"queries": 16}, False),
        ({"queries": 49, "keys": 49}, False),  # to registers, once for all heads
        ({"queries": 121, "keys": 121, "head_dim": 32}, True),
    ],
)
def test_biases_that_are_copied(call: dict[str, Any], is_copied: bool) -> None:
    usual = {"batches": 16, "heads": 8, "queries": 375, "keys": 375, "head_dim": 64}
    found = explain_attention(**(usual | {"bias": True} | call))
    assert found.bias_copied == is_copied
    assert ("a copy of the bias first" in found.why) == is_copied


@pytest.mark.parametrize("backward", [False, True])
def test_a_bias_of_keys_and_shifted_scores(backward: bool) -> None:
    def found(**call: Any) -> Any:
        usual = {"batches": 16, "heads": 8, "queries": 750, "head_dim": 64}
        return explain_attention(**(usual | call), bias_gradient=backward, backward=backward)

    of_keys, in_float = (found(key_bias=True, bias_dtype=each) for each in (None, FLOAT))
    for each in (of_keys, in_float):
        assert each.hopper
        assert not each.bias_copied
        assert "kernels for a bias of keys" in each.why
    assert in_float.bytes_read - of_keys.bytes_read == 8 * 750 * 2
    assert "beside a mask of pairs" in found(key_bias=True, masked=True).why
    assert not found(key_bias=True, major=8).hopper
    for head_dim in (64, 128):
        shifted = found(shifted=True, head_dim=head_dim)
        assert shifted.hopper
        assert not shifted.bias_copied
        assert "read where they lie" in shifted.why
    # Backward, other kernels serve a bias above 128.
    wide = found(shifted=True, head_dim=192)
    assert wide.hopper != backward
    assert wide.bias_copied
    assert "a dense bias in float32" in found(shifted=True, bias_dtype=FLOAT).why
    with pytest.raises(ValueError, match="shifted: a call has one bias, and key_bias is one"):
        found(key_bias=True, shifted=True)


def test_portable_kernels_hold_relative_biases_as_float32() -> None:
    for backward in (False, True):
        options: dict[str, Any] = {"backward": backward, "major": 8}
        relative = explain_attention(2, 8, 512, 64, relative=True, **options)
        dense = explain_attention(2, 8, 512, 64, **IN_FLOAT, **options)
        assert relative.shared_bytes == dense.shared_bytes


def test_blocks_on_hopper_are_shared_where_queries_see_few_keys() -> None:
    most = kernel_limits().attention["kMaxStepsOfPersistentBlocks"]
    tiles = 8 * 16 * 32  # of 128 queries
    for keys, window, blocks in (
        (128 * most, None, H200.multiprocessors),
        (128 * most + 1, None, tiles),
        (4096, (128 * most - 128, -1), H200.multiprocessors),
        (4096, (128 * most - 127, -1), tiles),
    ):
        limits = {} if window is None else {"causal": True, "window": window}
        assert explain_attention(8, 16, 4096, 128, keys=keys, **limits).blocks == blocks
    assert explain_attention(1, 2, 17, 128).blocks == 2  # fewer tiles than multiprocessors


def _fewest_keys(dim: int) -> int:
    """Of a part of few queries: what the warps of a block take at a time."""
    warps = explain_attention(1, 1, 1, dim).threads // 32
    return warps * kernel_limits().attention["kDecodeKeys"]


def test_few_queries_split_the_keys() -> None:
    limits = kernel_limits().attention
    found = explain_attention(8, 32, 1, 128, keys=8192, key_heads=8)
    # 64 blocks of 6 warps, of which a multiprocessor is to have 9.
    assert (found.kernel, found.threads, found.splits) == ("decode", 192, 3)
    assert found.blocks == 3 * 8 * 8
    assert found.workspace_bytes == 0  # blocks with the same queries are a cluster
    assert "at most 16 queries: 1" in found.why
    # Of 64 columns a block has 8 warps. Of more than a multiprocessor has room for none is split.
    assert explain_attention(8, 32, 1, 64, keys=8192, key_heads=8).splits == 2
    assert explain_attention(34, 32, 1, 64, keys=131_072, key_heads=8).splits == 1
    # Clusters of 8 would be too few: blocks wait for each other, one for each multiprocessor.
    found = explain_attention(1, 32, 1, 128, keys=65536, key_heads=4)
    assert found.splits == 33
    assert found.workspace_bytes == found.splits * 32 * (128 + 2) * 4
    # Or so many parts, of two blocks for each.
    found = explain_attention(1, 32, 1, 128, keys=65536, key_heads=8)
    assert found.splits == limits["kMaxPartsBeside"]
    most = limits["kMaxDecodeQueries"]
    assert explain_attention(1, 1, most, 64).kernel == "decode"
    assert explain_attention(1, 1, most + 1, 64).kernel == "forward"
    # No split has fewer keys than it is worth, and none needs no workspace.
    fewest, of_cluster = _fewest_keys(64), limits["kMaxClusterOfSplits"]
    for parts, rest, splits in ((1, 0, 1), (2, -1, 1), (4, 0, 4), (9, 0, of_cluster), (17, 0, 17)):
        found = explain_attention(1, 1, 1, 64, keys=parts * fewest + rest)
        assert found.splits == splits
        assert found.workspace_bytes == (splits * (64 + 2) * 4 if splits > of_cluster else 0)
        # Without clusters.
        found = explain_attention(1, 1, 1, 64, keys=parts * fewest + rest, major=8)
        assert found.workspace_bytes == (found.splits * (64 + 2) * 4 if found.splits > 1 else 0)
    # A window leaves fewer keys, also where it has no limit to the right.
    for window in ((9, 0), (9, -1)):
        assert explain_attention(1, 1, 2, 64, keys=9 * fewest, window=window).splits == 1


@pytest.mark.parametrize("major", [8, 9])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_blocks_of_few_queries_run_at_a_time(dim: int, major: int) -> None:
    """Where keys are split: blocks of a cluster, or all blocks, wait for each other."""
    room = 2 * H200.multiprocessors
    for batches, key_heads in itertools.product((1, 2, 3, 5, 8, 13, 33, 64), (1, 2, 4, 8, 32)):
        splits = []
        for keys in (90, 300, 1024, 5000, 131_072):
            call = {"keys": keys, "key_heads": key_heads, "major": major}
            found = explain_attention(batches, 32, 1, dim, **call)
            splits.append(found.splits)
            row_tiles = -(-32 // key_heads // 16)
            assert found.blocks == batches * key_heads * row_tiles * found.splits
            if found.splits == 1:
                assert found.workspace_bytes == 0
                continue
            assert keys // found.splits >= _fewest_keys(dim)
            is_cluster = found.workspace_bytes == 0
            assert not is_cluster or (major == 9 and found.splits <= 8)
            assert found.blocks <= (room * 3 // 4 if is_cluster else room)
        assert splits == sorted(splits)
        # Half of the multiprocessors have a block, where keys are many.
        assert 2 * batches * key_heads * splits[-1] > H200.multiprocessors or key_heads == 1


@pytest.mark.parametrize("queries", [16, 17, 64, 300])
@pytest.mark.parametrize("dim", [128, 256])
def test_splits_fill_whole_waves_of_blocks(dim: int, queries: int) -> None:
    of_wave, fewest = H200.multiprocessors, kernel_limits().attention["kFewestKeysOfSplit"]
    for batches, keys in itertools.product((1, 3, 8, 64), (300, 5000, 131_072)):
        found = explain_attention(batches, 32, queries, dim, keys=keys, key_heads=8)
        blocks = found.blocks // found.splits
        assert found.blocks == blocks * found.splits
        assert (found.workspace_bytes > 0) == (found.splits > 1)
        if found.splits > 1:
            assert keys // found.splits >= fewest
            # One more split would begin another wave, or would have too few keys.
            waves = -(-found.blocks // of_wave)
            one_more = found.blocks + blocks
            assert one_more > waves * of_wave or keys // (found.splits + 1) < fewest
        elif keys == 131_072:
            assert blocks > 64


def test_queries_of_heads_that_share_keys() -> None:
    """On Hopper fewer of them are few."""
    few = kernel_limits().attention["kMostQueriesOfSharedRows"]
    call = {"keys": 5000, "key_heads": 4}
    assert explain_attention(1, 8, few, 128, **call).kernel == "decode"
    found = explain_attention(1, 8, few + 1, 128, **call)
    assert (found.kernel, found.hopper) == ("forward", True)
    assert f"more than {few} queries of heads that share keys: {few + 1}" in found.why
    for options in ({"key_heads": 8}, {"major": 8}, {"relative": True}):
        assert explain_attention(1, 8, few + 1, 128, **(call | options)).kernel == "decode"
    assert explain_attention(1, 8, few + 1, 32, **call).kernel == "decode"


def test_heads_share_blocks_on_hopper() -> None:
    """A warpgroup each, of two for wide heads and of three for narrow ones."""
    for group, queries, dim, blocks in (
        (8, 64, 128, 4),
        (8, 64, 64, 3),
        (3, 17, 128, 2),
        (2, 17, 64, 1),
        (1, 17, 128, 1),
        (8, 65, 128, 8),
    ):
        call = {"keys": 1100, "key_heads": 2}
        found = explain_attention(60, 2 * group, queries, dim, **call)
        assert found.hopper
        assert found.blocks == 60 * 2 * blocks * found.splits
        # What is of one head, and other kernels.
        for options in ({"relative": True}, {"bias": True, "keys": 1104}, {"major": 8}):
            alone = explain_attention(60, 2 * group, queries, dim, **(call | options))
            assert alone.blocks == 60 * 2 * group * alone.splits


def test_more_queries_split_long_keys() -> None:
    for queries in (17, 64, 128):
        found = explain_attention(1, 32, queries, 128, keys=131_072)
        assert (found.kernel, found.hopper, found.splits) == ("forward", True, 8)
        assert found.blocks == 32 * 8
        assert found.workspace_bytes == 8 * 32 * queries * (128 + 2) * 4
        assert "8 blocks share the keys" in found.why
        portable = explain_attention(1, 32, queries, 128, keys=131_072, major=8)
        assert (portable.hopper, portable.splits) == (False, 8)
    # Windows leave few keys, and training has blocks enough.
    assert explain_attention(1, 32, 64, 128, keys=131_072, window=(100, 0)).splits == 1
    for shape in ((4, 16, 4096, 128), (8, 16, 1024, 64), (1, 16, 2048, 128), (2, 16, 4096, 256)):
        assert explain_attention(*shape).splits == 1
    # Where it would win less than an eighth, nothing is split.
    assert explain_attention(1, 8, 1024, 128).splits == 1
    assert explain_attention(1, 8, 1024, 128, backward=True).splits == 1


OF_BIAS = {"backward": True, "bias": True, "bias_gradient": True}


@pytest.mark.parametrize(
    ("arguments", "pairs", "read", "written", "flops"),
    [
        # Query, keys and values; output and three statistics.
        ({}, 80, 160 + 512, 160 + 120, 80 * 32),
        ({"batches": 3}, 240, 3 * (160 + 512), 3 * (160 + 120), 240 * 32),
        ({"key_heads": 1}, 80, 160 + 256, 280, 80 * 32),
        ({"value_dim": 4}, 80, 160 + 384, 80 + 120, 80 * 24),
        ({"causal": True}, 60, 672, 280, 60 * 32),
        ({"causal": True, "window": (2, -1)}, 30, 672, 280, 30 * 32),
        ({"masked": True}, 80, 672 + 40, 280, 80 * 32),
        ({"bias": True}, 80, 672 + 160, 280, 80 * 32),
        ({"bias": True, "bias_dtype": FLOAT}, 80, 672 + 320, 280, 80 * 32),
        ({"bias": True, "batches": 3}, 240, 3 * 672 + 160, 3 * 280, 240 * 32),
        ({"bias": True, "causal": True}, 60, 672 + 120, 280, 60 * 32),
        # The output, its gradient and the statistics too.
        ({"backward": True}, 80, 672 + 320 + 120, 672, 80 * 80),
        (OF_BIAS, 80, 672 + 320 + 120 + 160, 672 + 160, 80 * 80),
    ],
)
def test_bytes_and_products_of_attention(
    arguments: dict[str, Any], pairs: int, read: int, written: int, flops: int
) -> None:
    """2 heads, 5 queries and 8 keys of 8 numbers."""
    call = {"batches": 1, "heads": 2, "queries": 5, "head_dim": 8, "keys": 8} | arguments
    found = explain_attention(**call)
    assert (found.pairs, found.flops) == (pairs, flops)
    assert (found.bytes_read, found.bytes_written) == (read, written)


TURNS = "blocks take turns at gradients of queries"
LONGEST_FIRST = f"{TURNS}, the longest first"
IN_ORDER = "a launch of its own makes gradients of queries in order"
BIAS_IN_ORDER = "a launch of its own sums the gradient of the bias in order"


def sums(count: int) -> str:
    return f"gradients of queries have {count} sums, added in order"


@pytest.mark.parametrize(
    ("shape", "options", "hopper", "ways"),
    [
        # Sums of 16 MB, and of more.
        ((1, 16, 1024, 32), {}, True, {sums(8)}),
        ((1, 16, 1025, 32), {}, True, {TURNS}),
        ((1, 4, 512, 256), {}, True, {sums(8)}),
        ((1, 4, 2048, 256), {}, True, {TURNS}),
        # One block of keys, whatever the size.
        *(
            ((batch, 4, 256, dim), {"keys": 64}, True, set())
            for batch in (1, 300)
            for dim in (64, 256)
        ),
        # Two that can write their sums.
        ((300, 4, 256, 64), {}, True, {sums(2)}),
        ((300, 4, 257, 64), {}, True, {TURNS}),
        ((300, 4, 256, 64), {"causal": True}, True, {TURNS}),
        ((1, 4, 64, 64), {"keys": 32768}, True, {sums(256)}),
        ((1, 8, 128, 64), {"keys": 65536}, False, {IN_ORDER}),  # blocks would wait for many
        # Portable kernels have no such sums.
        ((4, 16, 1024, 32), {"major": 8}, False, {TURNS}),
        ((1, 16, 1024, 32), {"major": 8}, False, {IN_ORDER}),  # blocks would wait for many
        ((1, 4, 1024, 96), {"major": 8}, False, {IN_ORDER}),
        ((64, 8, 512, 64), {"bias": True}, True, {TURNS, BIAS_IN_ORDER}),
        ((8, 8, 1024, 64), {"bias": True}, True, {TURNS}),  # clusters of 8 blocks sum it
        # Where heads share keys and blocks are more than multiprocessors, with causality.
        *(
            ((batch, 16, 1024, dim), {"key_heads": heads, "causal": True} | options, True, {way})
            for batch, heads, dim, options, way in (
                (8, 4, 64, {}, LONGEST_FIRST),
                (8, 4, 128, {}, LONGEST_FIRST),
                (17, 1, 64, {}, LONGEST_FIRST),
                (16, 1, 64, {}, TURNS),
                (8, 4, 64, {"causal": False}, TURNS),
                (8, 16, 64, {}, TURNS),
                (8, 4, 192, {}, LONGEST_FIRST),
                (8, 4, 192, {"masked": True}, TURNS),
                (8, 4, 64, {"key_bias": True}, TURNS),
            )
        ),
    ],
)
def test_order_of_gradients(
    shape: tuple[int, int, int, int], options: dict[str, Any], hopper: bool, ways: set[str]
) -> None:
    options = options | {"backward": True, "bias_gradient": options.get("bias", False)}
    found = explain_attention(*shape, deterministic=True, **options)
    assert found.hopper == hopper
    assert {each for each in found.why.split("; ") if "gradient" in each} == ways
    in_any_order = explain_attention(*shape, **options).why.split("; ")
    found_there = {each for each in in_any_order if "gradient" in each}
    assert not hopper or found_there == ways & {BIAS_IN_ORDER}


@pytest.mark.parametrize(
    ("batch", "dim", "options", "in_order"),
    [
        (3, 48, {}, True),
        (9, 32, {}, True),
        (9, 64, {"key_heads": 4}, True),
        (9, 64, {"masked": True}, True),  # of pairs
        (9, 64, {"causal": True}, True),
        (9, 64, {"window": (100, 0)}, True),
        (9, 72, {}, False),
        (9, 72, {"causal": True}, False),
        (8, 64, {}, False),  # clusters of 8 blocks sum it
    ],
)
def test_gradients_of_shared_biases_are_in_order_in_any_mode(
    batch: int, dim: int, options: dict[str, Any], in_order: bool
) -> None:
    call = {"backward": True, "bias": True, "bias_gradient": True} | options
    found = explain_attention(batch, 16, 768, dim, **call)
    assert found.hopper
    assert (BIAS_IN_ORDER in found.why) == in_order


def test_time_of_attention_is_the_longer_one() -> None:
    found = explain_attention(1, 1, 64, 64)
    shares = {
        (8, False): of_attention.FORWARD_SHARE,
        (8, True): of_attention.BACKWARD_SHARE,
        (9, False): of_attention.HOPPER_FORWARD_SHARE,
        (9, True): of_attention.HOPPER_BACKWARD_SHARE,
    }
    moving = 1e6 * (found.bytes_read + found.bytes_written) / 1e9
    assert found.microseconds(1e9, 1e15) == pytest.approx(moving + LAUNCH_MICROSECONDS)
    for (major, backward), share in shares.items():
        found = explain_attention(1, 1, 64, 64, backward=backward, major=major)
        computing = 1e6 * found.flops / (share * 1e9)
        assert found.microseconds(1e15, 1e9) == pytest.approx(computing + LAUNCH_MICROSECONDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": 0}, "queries: expected at least 1, got 0"),
        ({"key_heads": 3}, "key_heads: expected a divisor of 4 heads, got 3"),
        ({"head_dim": 257}, "head_dim: expected at most 256, got 257; the kernel of larger"),
        ({"value_dim": 264}, "value_dim: expected at most 256, got 264"),
        ({"keys": 2**31}, "queries and keys: expected at most"),
        ({"dtype": torch.float64}, "dtype: expected float16, bfloat16 or float32"),
        ({"dtype": FLOAT, "head_dim": 136}, "head_dim: expected at most 128, got 136"),
        (IN_FLOAT | {"bias_dtype": HALF}, "bias_dtype: expected torch.bfloat16 or torch.float32"),
        ({"window": (-2, 0)}, "window: expected sides of -1"),
        ({"bias_gradient": True, "bias": True}, "bias_gradient: only the backward pass"),
        ({"bias_gradient": True, "backward": True}, "bias_gradient: only the backward pass"),
        ({"deterministic": True}, "deterministic: only the backward pass"),
        ({"bias": True, "relative": True}, "relative: a call has one bias"),
    ],
)
def test_attention_that_is_refused(arguments: dict[str, Any], message: str) -> None:
    call = {"batches": 2, "heads": 4, "queries": 8, "head_dim": 16} | arguments
    with pytest.raises(ValueError, match=message):
        explain_attention(**call)


# Top-k


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [4, 8, 33, 34, 56, 67, 80, 200, 400, 10000])
@pytest.mark.parametrize("vectors", [1, 256, 257, 512, 1024, 1025, 8193, 14000, 20001, 65537])
@pytest.mark.parametrize("max_cluster", [1, 16])
def test_regime_of_topk_is_the_first_that_serves(
    masked: bool, rows: int, vectors: int, max_cluster: int
) -> None:
    found = explain_topk(rows, 8 * vectors, 8, HALF, masked=masked, max_cluster=max_cluster)
    assert found.vectors == vectors
    if vectors <= 256 and not masked:
        assert (found.regime, found.blocks_per_row) == ("tile", 1)
        assert found.blocks == -(-rows // found.rows_per_block)
        return

    def serves(row: list[str]) -> bool:
        blocks, longest, fewest = row[4:7]
        if blocks == "kWholeGpu":
            return rows <= H200.multiprocessors
        return (
            (longest == "kUnlimited" or vectors <= int(longest))
            and not (masked and int(row[1]) > 256)
            and rows >= int(fewest)
            and int(blocks) <= max_cluster
        )

    row = next(row for row in table_of("topk/limits.h", "kTopkRegimes") if serves(row))
    assert (found.regime, found.threads) == (row[0], int(row[1]))
    if row[4] != "kWholeGpu":
        assert found.blocks_per_row == int(row[4])
        assert found.blocks == rows * int(row[4])
    handed_on = found.blocks_per_row * 72  # to a cluster's first block, or through memory
    assert found.workspace_bytes == (rows * handed_on if row[4] == "kWholeGpu" else 0)
    if row[4] not in ("1", "kWholeGpu"):
        assert found.shared_bytes > handed_on


@pytest.mark.parametrize(
    ("masked", "shared_bytes", "blocks_per_sm"),
    [(False, 232448, 2), (False, 101376, 2), (False, 65536, 1), (True, 232448, 1)],
)
def test_topk_over_the_whole_gpu(masked: bool, shared_bytes: int, blocks_per_sm: int) -> None:
    """A cooperative launch fails unless all of its blocks run at a time."""
    found = explain_topk(1, 2**24, 8, HALF, masked=masked, shared_bytes=shared_bytes)
    assert found.regime == "whole_gpu"
    assert found.blocks == blocks_per_sm * H200.multiprocessors


@pytest.mark.parametrize("vectors", [8, 9, 32, 33, 1024, 1025])
def test_regime_of_topk_backward(vectors: int) -> None:
    table = table_of("topk/limits.h", "kTopkBackwardRegimes")
    row = next(row for row in table if row[6] == "kUnlimited" or vectors <= int(row[6]))
    found = explain_topk(100000, 8 * vectors, 8, HALF, backward=True)
    assert (found.regime, found.rows_per_block) == (row[0], int(row[2]))
    assert found.threads == int(row[1]) * int(row[2])
    assert found.blocks == -(-100000 // int(row[2])) * found.blocks_per_row


def test_limits_and_routers_of_topk() -> None:
    assert explain_topk(4096, 256, 8, HALF).regime == "tile"
    assert explain_topk(4096, 256, 8, HALF, limits=True).regime == "block_32"
    found = explain_topk(4096, 256, 8, HALF, router=True)
    assert found.regime == "router"
    assert "chosen by other numbers" in found.why
    assert (found.threads, found.rows_per_block, found.blocks) == (128, 32, 128)
    for columns, k, options, message in (
        (256, 17, {}, "k: expected at most 16 with router, got 17"),
        (1032, 8, {}, "columns: expected at most 1024 with router, got 1032"),
        (9, 8, {}, "columns: expected rows of a multiple of 16 bytes with router, got 18 bytes"),
        (256, 8, {"limits": True}, "limits: expected False with router, got True"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            explain_topk(4096, columns, k, HALF, router=True, **options)


def test_bytes_of_topk() -> None:
    found = explain_topk(100, 1000, 10, HALF)
    assert (found.bytes_read, found.bytes_written) == (200000, 100 * (10 * (2 + 8) + 12))
    assert explain_topk(100, 1000, 10, HALF, masked=True).bytes_read == 300000
    backward = explain_topk(100, 1000, 10, FLOAT, backward=True)
    results = 100 * (10 * (4 + 8) + 12)
    assert (backward.bytes_read, backward.bytes_written) == (400000 + results + 4000, 400000)
    fewest = 1e6 * (found.bytes_read + found.bytes_written) / 1e12
    assert found.microseconds(1e12) == pytest.approx(fewest + LAUNCH_MICROSECONDS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((0, 8, 1, HALF), "rows: expected at least 1, got 0"),
        ((8, 8, 0, HALF), "k: expected at least 1, got 0"),
        ((8, 8, 9, HALF), "k: expected at most 8, got 9"),
        ((8, 1000, 257, HALF), "k: expected at most 256, got 257"),
        ((8, 8, 1, torch.float64), "dtype: expected float16, bfloat16 or float32"),
        ((8, 2**31, 1, HALF), "the kernels take at most"),
    ],
)
def test_topk_that_is_refused(call: tuple[int, int, int, torch.dtype], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain_topk(*call)


@pytest.mark.gpu
def test_compiled_part_and_plans_alone_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[object]:
        common.plans.cache_clear()
        biases = ({}, {"bias": True, "bias_dtype": HALF}, IN_FLOAT)
        gpus = itertools.product((False, True), (8, 9), (99 * 1024, 163 * 1024), biases)
        options = [
            {"backward": backward, "major": major, "shared_bytes": shared_bytes} | bias
            for backward, major, shared_bytes, bias in gpus
        ]
        calls = itertools.product((1, 16, 17, 4096), (32, 64, 128, 256), options)
        return [
            *(explain_attention(2, 4, *sizes, dtype=HALF, **options) for *sizes, options in calls),
            *(explain_topk(rows, 50257, 10, HALF) for rows in (1, 50, 8192)),
        ]

    assert library.load().available
    with_kernels = answers()
    monkeypatch.setattr(library, "status", lambda: library.Status(False, reason="none"))
    assert answers() == with_kernels
    common.plans.cache_clear()


# The GPU


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA L40S", 362),
        ("Quadro RTX 6000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 NVL", None),
    ],
)
def test_nominal_rate(name: str, teraflops: float | None) -> None:
    if teraflops is None:
        with pytest.raises(ValueError, match=f"gpu: expected one of T4, .* got '{name}'"):
            gpu_named(name)
    else:
        assert gpu_named(name).flops_per_second == 1e12 * teraflops


def test_gpus_that_were_measured_are_those_of_the_results() -> None:
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    found = set()
    for file in results.glob("*.csv"):
        found |= {row.get("gpu") or "" for row in csv.DictReader(file.open(newline=""))}
    measured = {gpu_named(name).name for name in found if name.startswith("NVIDIA")}
    assert measured == {gpu.name for gpu in map(gpu_named, GPU_NAMES) if gpu.is_measured}


# Compute capability of cards, to find what limits.h says of them.
CARDS = {"T4": (7, 5), "A100": (8, 0), "3090": (8, 6), "L4": (8, 9), "H100": (9, 0)}
CARDS |= {"B200": (10, 0), "5090": (12, 0)}


@pytest.mark.parametrize("name", CARDS)
def test_named_gpus_have_what_limits_say(name: str) -> None:
    (limits,) = (gpu for gpu in kernel_limits().gpus if (gpu.major, gpu.minor) == CARDS[name])
    gpu = gpu_named(name)
    assert (gpu.major, gpu.max_cluster) == (limits.major, limits.max_cluster)
    assert gpu.shared_bytes == limits.shared_bytes
    given = {"multiprocessors": gpu.multiprocessors, "shared_bytes": gpu.shared_bytes}
    clusters = {"max_cluster": gpu.max_cluster}
    for columns in (64, 50_257, 300_000):
        found = explain(8192, columns, HALF, gpu=name)
        assert found.gpu == gpu
        expected = explain(8192, columns, HALF, **given, **clusters)
        assert (found.regime, found.blocks) == (expected.regime, expected.blocks)
        moved = 2 * 8192 * columns * 2
        assert found.microseconds() == pytest.approx(1e6 * moved / gpu.bytes_per_second + 2)
    topk = explain_topk(8192, 50_257, 20, HALF, gpu=gpu)
    assert topk.regime == explain_topk(8192, 50_257, 20, HALF, **given, **clusters).regime
    if gpu.major < 8:
        with pytest.raises(ValueError, match="got 7, of NVIDIA T4: attention runs in plain torch"):
            explain_attention(1, 1, 100, 64, gpu=name)
        return
    attention = explain_attention(4, 16, 4096, 128, gpu=name)
    assert attention.hopper == (gpu.major == 9)
    products = attention.flops / (attention.share * gpu.flops_per_second)
    moving = (attention.bytes_read + attention.bytes_written) / gpu.bytes_per_second
    assert attention.microseconds() == pytest.approx(1e6 * max(products, moving) + 2)


@pytest.mark.parametrize("given", ["RTX 5090", "nvidia geforce rtx 5090", "5090"])
def test_gpus_are_found_by_words(given: str) -> None:
    assert gpu_named(given).name == "NVIDIA GeForce RTX 5090"


def test_rates_that_are_given() -> None:
    assert H200.with_rates(None, None) == H200
    given = H200.with_rates(2.5, 300)
    assert (given.bytes_per_second, given.flops_per_second) == (2.5e12, 3e14)
    assert given.bandwidth_source == given.flops_source == "as given"


def test_attention_with_a_mask_has_persistent_blocks() -> None:
    """Its tiles take unlike times, so that blocks fetch them by a counter, 4 bytes."""
    unmasked = explain_attention(4, 16, 4096, 128)
    masked = explain_attention(4, 16, 4096, 128, masked=True)
    assert (unmasked.blocks, unmasked.workspace_bytes) == (2048, 0)
    assert (masked.blocks, masked.workspace_bytes) == (masked.gpu.multiprocessors, 4)
