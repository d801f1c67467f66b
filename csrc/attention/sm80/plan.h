#pragma once
// Plans of the portable kernels. They take every launch.

#include <iterator>
#include <optional>

#include "../plan.h"

namespace megasoftmax {

// The first tile of a table that holds the head dimensions.
template <class TileShape, int kCount>
int tile_for(const TileShape (&tiles)[kCount], const AttentionParams& params) {
  int index = 0;
  while (tiles[index].head_dim < std::max(params.head_dim, params.value_dim)) ++index;
  return index;
}

// Bytes of shared memory of a block. Of the backward the larger of both kernels, the second of
// which sums dQ in order.
constexpr int bytes_of(const AttentionTile& tile, BiasKind kind) {
  return ForwardLayout(tile, kind).bytes(1);
}
constexpr int bytes_of(const AttentionBackwardTile& tile, BiasKind kind) {
  return std::max(
      BackwardLayout(tile, kind).bytes(1),
      InOrderLayout(tile.head_dim, tile.in_order_keys(), kind, tile.element_bytes).bytes);
}

constexpr int bytes_of(const AttentionBiasGradientTile& tile, BiasKind kind) {
  return BiasGradientLayout(tile, kind).bytes(1);
}

// The first tile of a table for such elements that holds the head dimension and fits into the
// shared memory of a block. If none fits, the last one for such elements.
template <class TileShape, int kCount>
constexpr int tile_for(const TileShape (&tiles)[kCount], int head_dim, BiasKind kind,
                       int element_bytes, int shared_bytes) {
  int found = 0;
  for (int index = 0; index < kCount; ++index) {
    if (tiles[index].element_bytes != element_bytes) continue;
    found = index;
    if (tiles[index].head_dim >= head_dim && bytes_of(tiles[index], kind) <= shared_bytes) break;
  }
  return found;
}
template <class TileShape, int kCount>
int tile_for(const TileShape (&tiles)[kCount], const AttentionParams& params,
             const Device& device) {
  return tile_for(tiles, std::max(params.head_dim, params.value_dim), bias_kind(params),
                  size_of(params.query.type), device.shared_bytes);
}

// Whether every GPU with attention has a tile that fits, for each row's head dimension.
inline constexpr int kLeastBytes = least_shared_bytes(kLeastMajor);
template <class TileShape, int kCount>
constexpr bool fits_every_gpu(const TileShape (&tiles)[kCount]) {
  for (const TileShape& tile : tiles) {
    for (const BiasKind kind : {BiasKind::kNone, BiasKind::kTile, BiasKind::kAny}) {
      const int found = tile_for(tiles, tile.head_dim, kind, tile.element_bytes, kLeastBytes);
      if (tiles[found].head_dim != tile.head_dim || bytes_of(tiles[found], kind) > kLeastBytes)
        return false;
    }
  }
  return true;
}
static_assert(fits_every_gpu(kAttentionForwardTiles) && fits_every_gpu(kAttentionBackwardTiles) &&
              fits_every_gpu(kAttentionBiasGradientTiles));

// Whether some GPU takes this tile with such a bias: no earlier tile fits every GPU.
template <class TileShape, int kCount>
constexpr bool is_taken(const TileShape (&tiles)[kCount], int index, BiasKind kind) {
  const TileShape& tile = tiles[index];
  return tile_for(tiles, tile.head_dim, kind, tile.element_bytes, kLeastBytes) >= index;
}

// Blocks of a tile that run at a time on a multiprocessor.
template <class TileShape>
int resident_blocks(const TileShape& tile, int bytes, const Device& device) {
  return std::min(tile.blocks_per_sm, device.shared_bytes_per_sm / (bytes + kReservedSharedBytes));
}

// Tiles of the bias in shared memory at a time, forward: 2 if that costs no resident block.
inline int bias_stages(const AttentionTile& tile, BiasKind kind, const Device& device) {
  const ForwardLayout layout(tile, kind);
  return kind == BiasKind::kTile && layout.bytes(2) <= device.shared_bytes &&
                 resident_blocks(tile, layout.bytes(2), device) ==
                     resident_blocks(tile, layout.bytes(1), device)
             ? 2
             : 1;
}

// Tiles of queries in shared memory at a time, backward: 2 unless a multiprocessor then has one
// block where it had several.
inline int query_stages(const AttentionBackwardTile& tile, BiasKind kind, const Device& device) {
  const BackwardLayout layout(tile, kind);
  return layout.bytes(2) <= device.shared_bytes &&
                 (resident_blocks(tile, layout.bytes(2), device) > 1 ||
                  resident_blocks(tile, layout.bytes(1), device) == 1)
             ? 2
             : 1;
}

// Steps in shared memory at a time: the most that cost no resident block.
inline int bias_gradient_stages(const AttentionBiasGradientTile& tile, BiasKind kind,
                                const Device& device) {
  const BiasGradientLayout layout(tile, kind);
  for (int count = kMostBiasGradientStages; count > 1; --count) {
    if (layout.bytes(count) <= device.shared_bytes &&
        resident_blocks(tile, layout.bytes(count), device) ==
            resident_blocks(tile, layout.bytes(2), device))
      return count;
  }
  return 1;
}

// Into how many parts the members of a bias are cut, and the estimated time in clocks.
struct BiasGradientParts {
  int count;
  int64_t time;
};
// Those with the least time, where an entry of the bias has `tiles` tiles and a multiprocessor
// `of_sm` blocks at a time.
template <class TileShape>
BiasGradientParts bias_gradient_parts(const AttentionBackwardParams& params, const TileShape& tile,
                                      int64_t tiles, int64_t of_sm, const Device& device) {
  const int64_t room = of_sm * device.multiprocessors;
  const int64_t blocks = params.bias_batches() * params.bias_heads() * tiles;
  const int64_t members = params.members_of_bias();
  const int64_t most = std::min<int64_t>(
      members, kMostBiasPartBytes / std::max<int64_t>(4 * params.bias_entries(), 1));
  const int64_t step =
      of_sm * tile.queries() * tile.keys() * tile.head_dim / kWorkOfClock * tile.percent / 100;
  const auto time_of = [&](int64_t parts) {
    const int64_t time =
        divide_up(blocks * parts, room) * (divide_up(members, parts) + tile.kStepsOfStart) * step;
    return parts == 1
               ? time
               : time + parts * params.bias_entries() / kPartEntriesOfClock + kClocksOfAddingParts;
  };
  int64_t best = 1;
  for (int64_t waves = 1; waves <= kMostWavesOfBiasParts && blocks > 0; ++waves) {
    const int64_t parts = std::min(waves * room / blocks, most);
    if (parts > 1 && time_of(parts) < time_of(best)) best = parts;
  }
  return {static_cast<int>(best), time_of(best)};
}

inline BiasGradientPlan bias_gradient_plan(const AttentionBackwardParams& params,
                                           const Device& device) {
  const BiasKind kind = bias_kind(params);
  const int index = tile_for(kAttentionBiasGradientTiles, params, device);
  const AttentionBiasGradientTile& tile = kAttentionBiasGradientTiles[index];
  const int stages = bias_gradient_stages(tile, kind, device);
  const int bytes = BiasGradientLayout(tile, kind).bytes(stages);
  const int64_t tiles = divide_up<int64_t>(params.queries, tile.queries()) *
                        divide_up<int64_t>(params.keys, tile.keys());
  return {
      BackendId::kSm80, index, stages,
      bias_gradient_parts(params, tile, tiles, resident_blocks(tile, bytes, device), device).count};
}

static_assert(WideLayout::kBytes <= least_shared_bytes(kFirstWideMajor, kLastWideMajor));

// Tiles of rows of a key head.
inline int64_t wide_row_tiles(const AttentionParams& params) {
  return divide_up<int64_t>(params.heads_per_key_head.divisor * params.queries, kWideRows);
}

// Tiles of 16 rows of a key head, where queries are few.
inline int64_t decode_row_tiles(const AttentionParams& params) {
  return divide_up<int64_t>(params.heads_per_key_head.divisor * params.queries, kMaxDecodeQueries);
}
static_assert(DecodeLayout(32).bytes <= kLeastBytes && DecodeLayout(64).bytes <= kLeastBytes &&
              DecodeLayout(128).bytes <= kLeastBytes && DecodeLayout(256).bytes <= kLeastBytes);

// How decoding splits keys; limits.h says why. Blocks wait for memory, so that a multiprocessor
// needs a number of warps.
inline KeySplits decode_splits(const AttentionParams& params, const Device& device) {
  const int head_dim = kAttentionForwardTiles[tile_for(kAttentionForwardTiles, params)].head_dim;
  const int64_t blocks = params.batches * params.key_heads * decode_row_tiles(params);
  if (blocks == 0) return {};
  const int bytes = DecodeLayout(head_dim).bytes + kReservedSharedBytes;
  const int64_t sms = device.multiprocessors;
  const int64_t room = sms * std::min(kDecodeBlocksPerSm, device.shared_bytes_per_sm / bytes);
  const int64_t most =
      std::max<int64_t>(keys_seen(params) / fewest_keys_of_decode_split(head_dim), 1);
  const int64_t enough = std::min(sms * kDecodeWarpsOfSm / decode_warps(head_dim), room * 3 / 4);
  const int64_t in_clusters =
      std::min({most, enough / blocks, int64_t{std::min(kMaxClusterOfSplits, device.max_cluster)}});
  const int64_t together =
      std::min(most, std::max(sms / blocks, std::min(room / blocks, kMaxPartsBeside)));
  // On a GPU with clusters, two parts by a cooperative launch are not worth its barrier.
  const bool are_clusters =
      (in_clusters > 1 || device.max_cluster > 1) && 2 * in_clusters >= together;
  if (together <= 1 || are_clusters) return {static_cast<int>(std::max<int64_t>(in_clusters, 1))};
  return {static_cast<int>(together), true};
}

// A row of kAttentionSmallTiles, or -1.
inline int small_tile(const AttentionParams& params, const Device& device, bool is_backward) {
  const bool has_bias = params.bias.data != nullptr;
  if (params.rows() == 0 || size_of(params.query.type) != 2 || params.is_relative ||
      params.dropout.is_given() || params.softcap.is_given() || params.heads != params.key_heads ||
      params.queries <= kMaxDecodeQueries || params.keys == 0 ||
      params.members_of_bias() < (has_bias ? kFewestSmallMembers : kFewestSmallHeads))
    return -1;
  for (int index = 0; index < static_cast<int>(std::size(kAttentionSmallTiles)); ++index) {
    const AttentionSmallTile& tile = kAttentionSmallTiles[index];
    if (std::max(params.queries, params.keys) <= tile.side &&
        std::max(params.head_dim, params.value_dim) <= tile.head_dim &&
        (tile.holds_bias() || !has_bias || has_dense_rows(params)) &&
        SmallLayout(tile, is_backward).bytes <= device.shared_bytes)
      return index;
  }
  return -1;
}
inline int small_tile(const AttentionForwardParams& params, const Device& device) {
  return small_tile(params, device, false);
}
inline int small_tile(const AttentionBackwardParams& params, const Device& device) {
  const BiasGradient kind = params.bias_gradient_kind;
  return kind == BiasGradient::kNone || kind == BiasGradient::kShared
             ? small_tile(params, device, true)
             : -1;
}

// What plans of both passes say of small heads. Returns into how many parts members are cut.
template <class Plan>
int plan_small(Plan& plan, const AttentionParams& params, bool is_backward, const Device& device) {
  const AttentionSmallTile& tile = kAttentionSmallTiles[plan.tile];
  plan.tile_head_dim = plan.tile_value_dim = tile.head_dim;
  plan.tile_queries = plan.tile_keys = tile.side;
  plan.threads = tile.threads();
  plan.reads_bias_in_place = tile.holds_bias();
  plan.shared_bytes = SmallLayout(tile, is_backward).bytes;
  const int64_t entries = params.bias_batches() * params.bias_heads();
  const int64_t room =
      device.multiprocessors *
      std::min(is_backward ? tile.backward_blocks : tile.forward_blocks,
               device.shared_bytes_per_sm / (plan.shared_bytes + kReservedSharedBytes));
  const int64_t parts = parts_of_members(params, entries, room);
  plan.blocks = parts * entries;
  return static_cast<int>(parts);
}

// Whether the gradient of a shared bias takes less time in order than by atomics: in small windows
// each block of keys would add to all entries.
inline bool is_faster_in_order(const AttentionBackwardParams& params) {
  return size_of(params.query.type) == 2 &&
         std::max(params.queries, params.keys) <= kMostOfSmallWindow;
}

struct Sm80 {
  static ForwardPlan plan(const AttentionForwardParams& params, const Device& device) {
    ForwardPlan plan;
    const auto set_tile = [&](int head_dim, int queries, int keys, int threads, int shared_bytes) {
      plan.tile_head_dim = plan.tile_value_dim = head_dim;
      plan.tile_queries = queries;
      plan.tile_keys = keys;
      plan.threads = threads;
      plan.shared_bytes = shared_bytes;
    };
    if (const int tile = small_tile(params, device); tile >= 0) {
      plan.kernel = ForwardKernel::kSmall;
      plan.tile = tile;
      plan.bias_parts = plan_small(plan, params, false, device);
      return plan;
    }
    if (is_wide(params)) {
      plan.kernel = ForwardKernel::kWide;
      plan.reads_bias_in_place = true;
      set_tile(kMaxWideHeadDim, kWideRows, kWideKeys, kWideThreads, WideLayout::kBytes);
      plan.tile_value_dim = kMaxWideValueDim;
      plan.row_tiles = wide_row_tiles(params);
      plan.heads = params.key_heads;
      plan.splits = splits_in_workspace(params, params.batches * plan.heads * plan.row_tiles,
                                        kWideRows, 2 * kWideKeys, device);
    } else if (takes_few_queries(params)) {
      plan.kernel = ForwardKernel::kDecode;
      plan.reads_bias_in_place = true;
      plan.tile = tile_for(kAttentionForwardTiles, params);
      const int head_dim = kAttentionForwardTiles[plan.tile].head_dim;
      set_tile(head_dim, kMaxDecodeQueries, kDecodeKeys, 32 * decode_warps(head_dim),
               DecodeLayout(head_dim).bytes);
      plan.row_tiles = decode_row_tiles(params);
      plan.heads = params.key_heads;
      plan.splits = decode_splits(params, device);
    } else {
      plan.tile = tile_for(kAttentionForwardTiles, params, device);
      const AttentionTile& tile = kAttentionForwardTiles[plan.tile];
      const BiasKind kind = bias_kind(params);
      plan.bias_stages = bias_stages(tile, kind, device);
      set_tile(tile.head_dim, tile.queries(), tile.keys, tile.threads(),
               ForwardLayout(tile, kind).bytes(plan.bias_stages));
      plan.row_tiles = divide_up(params.queries, tile.queries());
      plan.heads = params.heads;
      plan.splits = splits_in_workspace(params, params.batches * plan.heads * plan.row_tiles,
                                        tile.queries(), kFewestKeysOfSplit, device);
    }
    plan.finish(params);
    return plan;
  }

  // `query_gradient`: how gradients of queries are summed, where that is decided.
  static BackwardPlan plan(const AttentionBackwardParams& params, bool is_deterministic,
                           const Device& device, std::optional<QueryGradient> query_gradient = {}) {
    BackwardPlan plan;
    plan.bias_gradient = params.bias_gradient_kind;
    if (const int tile = small_tile(params, device); tile >= 0) {
      plan.kernel = BackwardKernel::kSmall;
      plan.query_gradient = QueryGradient::kWhole;
      plan.tile = tile;
      plan.in_order.parts = plan_small(plan, params, true, device);
      if (plan.bias_gradient != BiasGradient::kNone) plan.bias_gradient = BiasGradient::kInOrder;
      plan.finish(params);
      return plan;
    }
    plan.tile = tile_for(kAttentionBackwardTiles, params, device);
    const AttentionBackwardTile& tile = kAttentionBackwardTiles[plan.tile];
    const BiasKind kind = bias_kind(params);
    plan.tile_head_dim = plan.tile_value_dim = tile.head_dim;
    plan.tile_queries = tile.queries;
    plan.tile_keys = tile.keys();
    plan.threads = tile.threads();
    plan.stages = query_stages(tile, kind, device);
    plan.shared_bytes = BackwardLayout(tile, kind).bytes(plan.stages);
    plan.slices = tile.head_dim / tile.slice;
    if (query_gradient) {
      plan.query_gradient = *query_gradient;
    } else if (tile.has_turns() && params.keys > 0 && params.keys <= tile.keys()) {
      plan.query_gradient = QueryGradient::kWhole;
    } else {
      const int64_t resident = resident_blocks(tile, plan.shared_bytes, device);
      plan.query_gradient =
          query_gradient_kind(params, tile, resident * device.multiprocessors, is_deterministic);
    }
    if (plan.bias_gradient == BiasGradient::kShared &&
        (is_deterministic || is_faster_in_order(params)))
      plan.bias_gradient = BiasGradient::kInOrder;
    if (plan.bias_gradient == BiasGradient::kInOrder)
      plan.in_order = bias_gradient_plan(params, device);
    plan.finish(params);
    return plan;
  }
};

}  // namespace megasoftmax
