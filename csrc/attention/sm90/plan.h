#pragma once
// Plans of Hopper's kernels, in code for 9.0a alone.

#include <iterator>
#include <optional>

#include "../plan.h"
#include "../sm80/plan.h"
#include "rows_anywhere.h"

namespace megasoftmax {

// Tensor copies have no strides of 0.
inline bool takes_tensor_copies(const Strided& tensor, int64_t batches, int64_t heads, int rows) {
  return (batches == 1 || tensor.batch_stride != 0) && (heads == 1 || tensor.head_stride != 0) &&
         (rows == 1 || tensor.query_stride != 0);
}

// What Hopper's kernels take as a bias, or in its place.
enum class HopperBias {
  kNone,
  kTile,     // by tensor copies
  kTable,    // a relative one, of any element type and strides
  kSoftcap,  // none, but a softcap
  kRows,     // as kTile, of rows that begin anywhere
  kKeys,     // one row for all queries, of any type and strides
};
constexpr bool is_dense(HopperBias bias) {
  return bias == HopperBias::kTile || bias == HopperBias::kRows;
}
constexpr bool is_unbiased(HopperBias bias) {
  return bias == HopperBias::kNone || bias == HopperBias::kSoftcap;
}
constexpr bool is_bias(HopperBias bias) { return is_dense(bias) || bias == HopperBias::kTable; }

inline HopperBias hopper_bias(const AttentionParams& params) {
  if (params.softcap.is_given()) return HopperBias::kSoftcap;
  if (params.bias.data == nullptr) return HopperBias::kNone;
  if (params.is_relative) return HopperBias::kTable;
  return is_shared_by_queries(params) ? HopperBias::kKeys : HopperBias::kTile;
}

// What kernels look at beside length and window.
enum class HopperMask {
  kNone,
  kKeys,  // a mask or a bias of keys; forward, as one more step of the product of queries and keys
  kAny,   // masks, ranges, dropout
};
inline HopperMask hopper_mask(const AttentionParams& params) {
  if (params.visible.are_given() || params.dropout.is_given()) return HopperMask::kAny;
  if (params.mask.data == nullptr)
    return hopper_bias(params) == HopperBias::kKeys ? HopperMask::kKeys : HopperMask::kNone;
  return params.block_mask.layout.bit_rows == 1 ? HopperMask::kKeys : HopperMask::kAny;
}

// Tensor copies need a 16-bit bias with an entry for each query and key. A copy can align its rows.
inline bool takes_hopper_bias(const AttentionParams& params) {
  if (params.softcap.is_given()) return params.bias.data == nullptr;
  const HopperBias bias = hopper_bias(params);
  if (bias == HopperBias::kKeys) return hopper_mask(params) == HopperMask::kKeys;
  if (bias != HopperBias::kTile) return true;
  return has_dense_rows(params) && takes_tensor_copies(params.bias, params.bias_batches(),
                                                       params.bias_heads(), params.queries);
}
// Whether rows that begin anywhere need no copy: few share them, and tensor copies can take them,
// where the storage does not end within 16 bytes that the last row has a part of.
inline bool takes_rows_anywhere(const AttentionParams& params) {
  const Strided& rows = params.bias;
  // Numbers of a map's entries have 31 bits, and its strides 40 bits of bytes.
  constexpr int64_t kMostColumns = int64_t{RowsAnywhere::kInMapEntry} << 31;
  const int64_t columns = (params.bias_batches() - 1) * rows.batch_stride +
                          (params.bias_heads() - 1) * rows.head_stride + params.keys;
  const uintptr_t end = reinterpret_cast<uintptr_t>(rows.data) +
                        2 * (columns + int64_t{params.queries - 1} * rows.query_stride);
  return rows.query_stride >= kFewestOfPitch && rows.query_stride < INT32_MAX &&
         columns < kMostColumns - 1024 && params.members_of_bias() <= kMostSharersOfRows &&
         round_up<uintptr_t>(end, 16) <= rows.last_whole_row;
}
// As hopper_bias, for a tile whose kernel for rows that begin anywhere serves the call or does not.
template <class TileShape>
HopperBias hopper_bias_for(const AttentionParams& params, const TileShape& tile, bool serves_rows) {
  const HopperBias bias = hopper_bias(params);
  return bias == HopperBias::kTile && !has_aligned_rows(params.bias) && serves_rows &&
                 tile.takes_rows_anywhere() && takes_rows_anywhere(params)
             ? HopperBias::kRows
             : bias;
}
inline HopperBias hopper_bias(const AttentionForwardParams& params,
                              const AttentionHopperTile& tile) {
  return hopper_bias_for(params, tile, true);
}
// Whether Hopper's kernels read such a bias without a copy.
inline bool reads_in_place(const AttentionParams& params, HopperBias bias) {
  return bias != HopperBias::kTile || has_aligned_rows(params.bias);
}

// Whether kernels of a tile take such a bias. Forward, shared memory must have room for it.
// Backward, the kernel of wide tiles takes none.
constexpr bool takes_bias(const AttentionHopperTile& tile, HopperBias bias) {
  if (bias == HopperBias::kSoftcap) return tile.takes_softcap();
  if (bias == HopperBias::kRows) return tile.takes_rows_anywhere();
  return bias != HopperBias::kTile || tile.bias_stages > 0;
}
constexpr bool takes_bias(const AttentionHopperBackwardTile& tile, HopperBias bias) {
  if (bias == HopperBias::kSoftcap) return tile.takes_softcap();
  if (bias == HopperBias::kRows) return tile.takes_rows_anywhere();
  return bias == HopperBias::kNone || !tile.is_wide();
}

// Whether a tile has room for a mask of keys beside the bias. A softcap would cap -infinity.
constexpr bool takes_key_mask(const AttentionHopperTile& tile, HopperBias bias) {
  return bias != HopperBias::kSoftcap && bias != HopperBias::kRows &&
         (bias != HopperBias::kTile || tile.head_dim <= 64);
}
inline HopperMask hopper_mask(const AttentionForwardParams& params,
                              const AttentionHopperTile& tile) {
  const HopperMask mask = hopper_mask(params);
  return mask == HopperMask::kKeys && !takes_key_mask(tile, hopper_bias(params, tile))
             ? HopperMask::kAny
             : mask;
}
// Backward, a block serves all heads that share its keys, so their mask must be the same. Softcaps,
// and turns beside a relative bias, have no kernels for it.
inline HopperMask hopper_mask(const AttentionBackwardParams& params) {
  const HopperMask mask = hopper_mask(static_cast<const AttentionParams&>(params));
  const bool is_of_keys = params.heads_per_key_head.divisor == 1 || params.mask.head_stride == 0;
  const bool has_kernel = !params.softcap.is_given() &&
                          (params.turns == nullptr || hopper_bias(params) != HopperBias::kTable);
  return mask == HopperMask::kKeys && !(is_of_keys && has_kernel) ? HopperMask::kAny : mask;
}
// Whether kernels have OrderOfTurns::kFirstKeysFirst. A gradient of a bias of keys is summed head
// by head.
constexpr bool may_alternate(HopperBias bias, HopperMask mask) {
  return (bias == HopperBias::kNone || bias == HopperBias::kSoftcap) && mask != HopperMask::kAny;
}
// The first keys first where heads share keys: 1.05 of the time in any order, not 1.22 (batch 2,
// heads 32 and 8, 4096 x 128, H200). Where all blocks run at once none ends alone.
inline OrderOfTurns hopper_order_of_turns(const AttentionBackwardParams& params,
                                          const AttentionHopperBackwardTile& tile,
                                          const Device& device) {
  const int64_t blocks =
      params.batches * params.key_heads * divide_up<int64_t>(params.keys, tile.keys());
  const bool is_faster = params.window_right >= 0 && params.heads_per_key_head.divisor > 1 &&
                         blocks > device.multiprocessors;
  // Above a head dimension of 128 no kernel has this order with a mask.
  const bool has_kernel = !tile.is_wide() || hopper_mask(params) == HopperMask::kNone;
  return is_faster && has_kernel && may_alternate(hopper_bias(params), hopper_mask(params))
             ? OrderOfTurns::kFirstKeysFirst
             : OrderOfTurns::kLastKeysFirst;
}

// Backward, warps that would be idle bring rows that begin anywhere to their places. In shared
// memory these rows have the place of masks.
inline HopperBias hopper_bias(const AttentionBackwardParams& params,
                              const AttentionHopperBackwardTile& tile) {
  const bool serves_rows = (params.bias_gradient_kind == BiasGradient::kNone ||
                            params.bias_gradient_kind == BiasGradient::kDense) &&
                           hopper_mask(params) != HopperMask::kAny;
  return hopper_bias_for(params, tile, serves_rows);
}

// The first tile of a table that holds the head dimensions and takes the bias, or -1.
template <class TileShape, int kCount>
int hopper_tile_for(const TileShape (&tiles)[kCount], const AttentionParams& params) {
  for (int index = 0; index < kCount; ++index) {
    const TileShape& tile = tiles[index];
    if (tile.head_dim >= params.head_dim && tile.value_dim >= params.value_dim &&
        takes_bias(tile, hopper_bias(params)))
      return index;
  }
  return -1;
}

// What `count` things fill of tiles of `of_tile`.
inline double filled_part(int64_t count, int64_t of_tile) {
  return static_cast<double>(count) / static_cast<double>(round_up(count, of_tile));
}

// Whether tiles of so many queries and keys are faster than those of the portable kernels.
inline bool are_faster(const AttentionParams& params, int queries, int keys) {
  if (std::max(params.head_dim, params.value_dim) > kSmallHeadDim) return true;
  return params.queries > 0 &&
         100 * filled_part(params.queries, queries) * filled_part(params.keys, keys) >=
             kFilledPercent;
}

// Whether Hopper's kernels take the queries, keys and values of a launch.
inline bool takes_tensors(const AttentionParams& params) {
  const auto is_dense = [&](const Strided& tensor, int64_t heads, int rows) {
    return takes_tensor_copies(tensor, params.batches, heads, rows);
  };
  return params.query.type != DType::kFloat32 && params.keys != 0 &&
         is_dense(params.query, params.heads, params.queries) &&
         is_dense(params.key, params.key_heads, params.keys) &&
         is_dense(params.value, params.key_heads, params.keys);
}
// Whether they take a launch.
inline bool takes_hopper(const AttentionParams& params) {
  return takes_hopper_bias(params) && takes_tensors(params);
}

// Whether the gradient of a shared bias is summed in clusters: one block for each batch that shares
// it. The blocks take the same tiles.
inline bool sums_in_clusters(const AttentionBackwardParams& params) {
  const int64_t batches = params.batches_per_bias.divisor;
  return params.bias_gradient_kind == BiasGradient::kShared && !has_mask_or_ranges(params) &&
         params.heads_per_bias.divisor == 1 && batches > 1 && batches <= kMaxBiasCluster &&
         (batches & (batches - 1)) == 0;
}

// Whether blocks of Hopper's forward take several tiles of queries, by length and window. With
// HopperMask::kAny they do in any case: see AttentionForwardParams::tile_counter.
inline bool is_persistent(const AttentionParams& params, const AttentionHopperTile& tile) {
  const bool is_window = params.window_left >= 0 && params.window_right >= 0;
  const int64_t seen = is_window
                           ? int64_t{params.window_left} + params.window_right + tile.queries()
                           : int64_t{params.keys};
  return std::min<int64_t>(seen, params.keys) <= kMaxStepsOfPersistentBlocks * tile.keys;
}

// How many heads that share keys a block of the forward takes, a warpgroup each. A bias, mask,
// ranges or dropout belong to one head.
inline int hopper_heads_of_block(const AttentionParams& params, const AttentionHopperTile& tile) {
  const bool is_alone = params.bias.data != nullptr || params.mask.data != nullptr ||
                        params.visible.are_given() || params.dropout.is_given();
  if (is_alone || params.queries > 64) return 1;
  return std::clamp(static_cast<int>(params.heads_per_key_head.divisor), 1, tile.warpgroups);
}
// Blocks for the heads of a batch, for each tile of queries.
inline int64_t hopper_blocks_of_heads(const AttentionParams& params,
                                      const AttentionHopperTile& tile) {
  return params.key_heads *
         divide_up<int64_t>(params.heads_per_key_head.divisor, hopper_heads_of_block(params, tile));
}

// A row of kAttentionHopperTiles, or -1, also if other kernels are faster.
inline int hopper_forward_tile(const AttentionParams& params) {
  const int tile = takes_hopper(params) ? hopper_tile_for(kAttentionHopperTiles, params) : -1;
  if (tile < 0 ||
      !are_faster(params, kAttentionHopperTiles[tile].queries(), kAttentionHopperTiles[tile].keys))
    return -1;
  if (!takes_few_queries(params)) return tile;
  const bool shares = hopper_heads_of_block(params, kAttentionHopperTiles[tile]) > 1;
  return shares && params.queries > kMostQueriesOfSharedRows ? tile : -1;
}

// How many blocks take the members of all entries of the bias, for each of `tiles` tiles of
// queries, where `room` blocks run at a time. The members of an entry are cut into units / entries
// parts, of some entries into one part more. The blocks of the others are larger and begin first.
inline int64_t units_of_members(const AttentionParams& params, int64_t tiles, int64_t room) {
  const int64_t members = params.members_of_bias();
  const int64_t entries = params.bias_batches() * params.bias_heads();
  const auto time_of = [&](int64_t units) {
    const int64_t parts = units / entries, of_fewer = entries - units % entries;
    const int64_t rounds = divide_up(units * tiles, room);
    const int64_t of_larger = divide_up(of_fewer * parts * tiles, room);
    return of_larger * (divide_up(members, parts) + kMembersOfStart) +
           (rounds - of_larger) * (divide_up(members, parts + 1) + kMembersOfStart);
  };
  int64_t best = entries;
  for (int64_t waves = 1; waves <= kMostWavesOfMembers; ++waves) {
    const int64_t most = std::clamp(waves * room / tiles, entries, entries * members);
    for (const int64_t units : {most / entries * entries, most})
      if (time_of(units) < time_of(best)) best = units;
  }
  return best;
}

// A row of kAttentionHopperHeadsForwardTiles for heads that share a bias, or -1, also if other
// kernels are faster. Sets the number of blocks.
inline int hopper_heads_tile(const AttentionForwardParams& params, const Device& device,
                             int64_t& blocks) {
  if (hopper_bias(params) != HopperBias::kTile || !has_dense_rows(params) ||
      !takes_tensors(params) || params.queries <= kMaxDecodeQueries || params.rows() == 0 ||
      params.window_left >= 0 || params.window_right >= 0 ||
      hopper_mask(static_cast<const AttentionParams&>(params)) == HopperMask::kAny)
    return -1;
  for (int index = 0; index < static_cast<int>(std::size(kAttentionHopperHeadsForwardTiles));
       ++index) {
    const AttentionHopperHeadsForwardTile& tile = kAttentionHopperHeadsForwardTiles[index];
    if (params.keys > tile.keys || std::max(params.head_dim, params.value_dim) > tile.head_dim)
      continue;
    const int64_t entries = params.bias_batches() * params.bias_heads();
    const int64_t tiles = divide_up<int64_t>(params.queries, tile.queries());
    if (entries * tiles > INT32_MAX) return -1;
    if (tile.halves_bias && params.members_of_bias() < kFewestMembersOfHalvedBias) return -1;
    const int64_t units = units_of_members(params, tiles, device.multiprocessors);
    blocks = units * tiles;
    const double filled = filled_part(blocks, device.multiprocessors) *
                          filled_part(params.keys, tile.keys) *
                          filled_part(params.queries, tile.queries());
    return 100 * filled >= tile.filled_percent &&
                   params.members_of_bias() >= kFewestMembersOfBias * divide_up(units, entries)
               ? index
               : -1;
  }
  return -1;
}

// Whether Hopper's kernels take the gradients of a launch.
inline bool takes_hopper_backward(const AttentionBackwardParams& params) {
  const bool takes_gradient = hopper_bias(params) != HopperBias::kKeys ||
                              ((params.bias_gradient_kind == BiasGradient::kNone ||
                                params.bias_gradient_kind == BiasGradient::kKeys) &&
                               hopper_mask(params) == HopperMask::kKeys);
  return takes_hopper(params) && takes_gradient && params.queries != 0 &&
         takes_tensor_copies(params.output_gradient, params.batches, params.heads, params.queries);
}

// A row of kAttentionHopperBackwardTiles, or -1, also if portable kernels are faster.
inline int hopper_backward_tile(const AttentionBackwardParams& params) {
  if (!takes_hopper_backward(params)) return -1;
  const int tile = hopper_tile_for(kAttentionHopperBackwardTiles, params);
  return tile >= 0 && are_faster(params, kAttentionHopperBackwardTiles[tile].queries,
                                 kAttentionHopperBackwardTiles[tile].keys())
             ? tile
             : -1;
}

// Most heads whose tiles lie side by side where blocks take turns: so many that those of a head
// that begin together are about as many as its steps. With causality and the last keys first a
// block comes to the queries of the next block a step after it, so all may have one head.
inline int64_t heads_of_turns(const AttentionBackwardParams& params, int tile_queries,
                              const Device& device) {
  if (params.order_of_turns == OrderOfTurns::kLastKeysFirst && params.window_right >= 0 &&
      params.queries >= params.keys)
    return 1;
  const int64_t steps =
      divide_up<int64_t>(params.queries, tile_queries) * params.heads_per_key_head.divisor;
  return std::max(kHopperHeadsOfTurns, device.multiprocessors / std::max<int64_t>(steps, 1));
}

// HopperMask of the launch that sums the gradient of a bias in order. A window counts as kAny.
inline HopperMask hopper_mask_in_order(const AttentionBackwardParams& params) {
  return params.window_left >= 0 || params.window_right >= 0
             ? HopperMask::kAny
             : hopper_mask(static_cast<const AttentionParams&>(params));
}
// How Hopper's kernel makes the gradient of a bias in order, if it does.
inline std::optional<BiasGradientPlan> hopper_bias_gradient_plan(
    const AttentionBackwardParams& params, const Device& device) {
  const bool has_any_mask = hopper_mask_in_order(params) == HopperMask::kAny;
  BiasGradientPlan plan;
  plan.backend = BackendId::kSm90;
  plan.tile = -1;
  // Of the first head dimension that is large enough, the tile that takes the least time.
  int64_t least = INT64_MAX;
  for (int index = 0; index < static_cast<int>(std::size(kAttentionHopperBiasGradientTiles));
       ++index) {
    const AttentionHopperBiasGradientTile& tile = kAttentionHopperBiasGradientTiles[index];
    if (std::max(params.head_dim, params.value_dim) > tile.head_dim) continue;
    if (has_any_mask && !tile.takes_any_mask()) continue;
    if (plan.tile >= 0 && tile.head_dim > kAttentionHopperBiasGradientTiles[plan.tile].head_dim)
      break;
    const BiasGradientParts parts = bias_gradient_parts(
        params, tile, count_visible_tiles(params, tile.queries(), tile.keys()), 1, device);
    if (parts.time >= least) continue;
    least = parts.time;
    plan.tile = index;
    plan.parts = parts.count;
  }
  if (plan.tile < 0) return {};
  return plan;
}

// Whether blocks of keys can write their sums of dQ: no tile is left out, and there are adding
// warps, see HopperBackward::kMayHaveAddingWarps.
inline bool can_write_query_sums(const AttentionBackwardParams& params,
                                 const AttentionHopperBackwardTile& tile) {
  return !tile.is_wide() && params.bias.data == nullptr && params.window_left < 0 &&
         params.window_right < 0 && hopper_mask(params) == HopperMask::kNone;
}

// A row of kAttentionHopperHeadsTiles, or -1, also if other kernels are faster.
inline int hopper_heads_tile(const AttentionBackwardParams& params, const Device& device) {
  const HopperBias bias = hopper_bias(params);
  const bool takes_gradient = params.bias_gradient_kind == BiasGradient::kNone ||
                              params.bias_gradient_kind == BiasGradient::kShared;
  if (std::max(params.head_dim, params.value_dim) > AttentionHopperHeadsTile::head_dim ||
      (bias != HopperBias::kNone && bias != HopperBias::kTile) || !takes_gradient ||
      !takes_hopper_backward(params) || params.heads != params.key_heads ||
      params.window_left >= 0 || params.window_right >= 0 ||
      hopper_mask(params) == HopperMask::kAny)
    return -1;
  const int64_t heads = params.batches * params.heads;
  // Blocks count heads, and go beyond the last one.
  if (heads == 0 || heads > INT32_MAX - device.multiprocessors) return -1;
  // Time of a head, in units of what a key takes.
  int best = 0;
  int64_t least = INT64_MAX;
  for (int index = 0; index < static_cast<int>(std::size(kAttentionHopperHeadsTiles)); ++index) {
    const AttentionHopperHeadsTile& tile = kAttentionHopperHeadsTiles[index];
    const int64_t time = divide_up<int64_t>(params.keys, tile.keys()) * (tile.keys() + kKeysOfUnit);
    if (time >= least) continue;
    best = index;
    least = time;
  }
  // What is filled of the rounds of the blocks, of the units, and of the tiles of queries.
  const AttentionHopperHeadsTile& tile = kAttentionHopperHeadsTiles[best];
  const double filled = filled_part(heads, device.multiprocessors) *
                        filled_part(params.keys, tile.keys()) *
                        filled_part(params.queries, tile.kQueries);
  const bool has_other = hopper_backward_tile(params) >= 0;
  return 100 * filled >= (has_other ? kFilledPercentOfHeads : kFilledPercentOfHeadsAlone) ? best
                                                                                          : -1;
}

// Whether tiles that a mask of keys excludes take less time than the launch that makes a block mask
// of it.
inline bool is_faster_without_block_mask(const AttentionParams& params) {
  const int64_t work = params.rows() * params.keys * std::max(params.head_dim, params.value_dim);
  return params.keys <= kMostKeysWithoutBlockMask || work <= kMostWorkWithoutBlockMask;
}

struct Sm90 {
  static constexpr BackendId kId = BackendId::kSm90;
  // None where the kernels do not take a launch, or where others are faster. `has_code()`: whether
  // they were compiled for this GPU.
  template <class HasCode>
  static std::optional<ForwardPlan> plan(const AttentionForwardParams& params, const Device& device,
                                         HasCode&& has_code) {
    if (device.major != kHopperMajor || small_tile(params, device) >= 0) return {};
    ForwardPlan plan;
    plan.backend = kId;
    plan.tile = hopper_heads_tile(params, device, plan.blocks);
    if (plan.tile >= 0 && has_code()) return plan_heads(plan);
    plan.tile = hopper_forward_tile(params);
    if (plan.tile < 0 || !has_code()) return {};
    const AttentionHopperTile& tile = kAttentionHopperTiles[plan.tile];
    plan.reads_bias_in_place = reads_in_place(params, hopper_bias(params, tile));
    plan.tile_head_dim = tile.head_dim;
    plan.tile_value_dim = tile.value_dim;
    plan.tile_queries = tile.queries();
    plan.tile_keys = tile.keys;
    plan.threads = tile.threads();
    plan.heads_of_block = hopper_heads_of_block(params, tile);
    plan.row_tiles = divide_up(params.queries, tile.queries());
    plan.heads = hopper_blocks_of_heads(params, tile);
    plan.splits = splits_in_workspace(params, params.batches * plan.heads * plan.row_tiles,
                                      tile.queries(), kFewestKeysOfSplit, device);
    plan.reads_mask =
        hopper_mask(params, tile) == HopperMask::kKeys && is_faster_without_block_mask(params);
    plan.reads_ranges = true;
    const int64_t tiles = plan.splits.count * plan.row_tiles * plan.heads * params.batches;
    const bool has_bounds = params.mask.data != nullptr || params.visible.are_given();
    plan.counts_tiles = has_bounds && hopper_mask(params, tile) == HopperMask::kAny &&
                        tiles > device.multiprocessors;
    plan.finish(params, plan.counts_tiles || is_persistent(params, tile) ? device.multiprocessors
                                                                         : INT64_MAX);
    return plan;
  }

  template <class HasCode>
  static std::optional<BackwardPlan> plan(const AttentionBackwardParams& params,
                                          bool is_deterministic, const Device& device,
                                          HasCode&& has_code) {
    if (device.major != kHopperMajor || small_tile(params, device) >= 0) return {};
    if (const int tile = hopper_heads_tile(params, device); tile >= 0 && has_code())
      return plan_heads(params, tile, device);
    BackwardPlan plan;
    plan.backend = kId;
    plan.tile = hopper_backward_tile(params);
    if (plan.tile < 0 || !has_code()) return {};
    const AttentionHopperBackwardTile& tile = kAttentionHopperBackwardTiles[plan.tile];
    const int64_t key_tiles = divide_up<int64_t>(params.keys, tile.keys());
    const bool can_write = can_write_query_sums(params, tile);
    const bool are_few = can_write && key_tiles <= (is_deterministic ? kMostWrittenKeyTiles : 1);
    const bool are_small =
        key_tiles == 1 || key_tiles * params.query_sum_bytes() <= kMostQuerySumBytes;
    if (are_few || (is_deterministic && are_small)) {
      plan.query_gradient = can_write ? QueryGradient::kWritten : QueryGradient::kInParts;
      plan.query_sums = static_cast<int>(key_tiles);
    } else {
      plan.query_gradient =
          query_gradient_kind(params, tile, device.multiprocessors, is_deterministic);
    }
    if (plan.query_gradient == QueryGradient::kInTurns)
      plan.order_of_turns = hopper_order_of_turns(params, tile, device);
    // The launch for dQ is one of the portable kernels.
    if (plan.query_gradient == QueryGradient::kInOrder)
      return Sm80::plan(params, is_deterministic, device, QueryGradient::kInOrder);
    plan.tile_head_dim = tile.head_dim;
    plan.tile_value_dim = tile.value_dim;
    plan.tile_queries = tile.queries;
    plan.tile_keys = tile.keys();
    plan.threads = tile.threads();
    plan.has_pairs = !tile.is_wide();
    plan.bias_gradient = params.bias_gradient_kind;
    if (plan.bias_gradient == BiasGradient::kShared) {
      // In clusters, or in order, in any mode but with dropout: one rounding, and the same bits in
      // every run. DESIGN.md says what atomics would gain.
      if (sums_in_clusters(params)) {
        plan.bias_gradient = BiasGradient::kInClusters;
      } else if (const auto in_order = hopper_bias_gradient_plan(params, device);
                 (in_order && !params.dropout.is_given()) || is_deterministic) {
        plan.bias_gradient = BiasGradient::kInOrder;
        plan.in_order = in_order ? *in_order : bias_gradient_plan(params, device);
      }
    }
    plan.clears_bias_gradient =
        plan.bias_gradient != BiasGradient::kShared && plan.bias_gradient != BiasGradient::kKeys;
    plan.reads_bias_in_place = reads_in_place(params, hopper_bias(params, tile));
    set_order(plan, params, device);
    plan.finish(params);
    return plan;
  }

 private:
  // The order of blocks, and whether they have row workers. Then a section has about as many blocks
  // as run at a time, or one head, and as many lie between a section and the one whose rows it
  // makes. So waits are short.
  static void set_order(BackwardPlan& plan, AttentionBackwardParams params, const Device& device) {
    const AttentionHopperBackwardTile& tile = kAttentionHopperBackwardTiles[plan.tile];
    const bool takes_turns = plan.query_gradient == QueryGradient::kInTurns;
    if (takes_turns) params.order_of_turns = plan.order_of_turns;
    const int64_t tiles = divide_up<int64_t>(params.keys, tile.keys());
    const int64_t heads = params.batches * params.key_heads, room = device.multiprocessors;
    const int64_t of_turns = heads_of_turns(params, tile.queries, device);
    int64_t section =
        heads_of_section(params, params.key_heads, params.batches, bytes_of_head(params),
                         device.cache_bytes, of_turns, device.multiprocessors);
    if (can_have_row_workers(plan, params, tile)) {
      const bool is_even = params.window_left < 0 && params.window_right < 0;
      const int64_t most = takes_turns ? of_turns : is_even ? 1 : heads;
      int64_t few = std::clamp<int64_t>(room / tiles, 1, std::min(most, heads));
      while (heads % few != 0) --few;
      const int64_t apart = 1 + std::max<int64_t>((room - 1) / (tiles * few), 1);
      // Of tiles of different lengths, a section of few blocks would lose more than workers gain.
      const bool are_enough = is_even || takes_turns || 2 * tiles * few > room;
      if (are_enough && 2 * apart <= heads / few) {
        section = few;
        plan.sections_apart = static_cast<int>(apart);
      }
    }
    plan.order = TileOrder(tiles, params.batches, section);
  }
  // Whether a warp of a block has nothing else to do, and its products take long enough.
  static bool can_have_row_workers(const BackwardPlan& plan, const AttentionBackwardParams& params,
                                   const AttentionHopperBackwardTile& tile) {
    const auto keys_of_row = [&] {  // that it sees, in whole tiles
      return count_visible_tiles(params, tile.queries, tile.keys()) * tile.queries * tile.keys() /
             params.queries;
    };
    return !tile.is_wide() && is_unbiased(hopper_bias(params)) &&
           hopper_mask(params) != HopperMask::kAny &&
           (plan.query_gradient == QueryGradient::kAdded ||
            plan.query_gradient == QueryGradient::kInTurns) &&
           takes_tensor_copies(params.output, params.batches, params.heads, params.queries) &&
           keys_of_row() * tile.head_dim >= kFewestWorkOfRow;
  }

  static ForwardPlan plan_heads(ForwardPlan plan) {
    const AttentionHopperHeadsForwardTile& tile = kAttentionHopperHeadsForwardTiles[plan.tile];
    plan.kernel = ForwardKernel::kHeads;
    plan.reads_bias_in_place = true;
    plan.reads_mask = !tile.halves_bias;
    plan.tile_head_dim = plan.tile_value_dim = tile.head_dim;
    plan.tile_queries = tile.queries();
    plan.tile_keys = tile.keys;
    plan.threads = tile.threads();
    return plan;
  }
  static BackwardPlan plan_heads(const AttentionBackwardParams& params, int index,
                                 const Device& device) {
    const AttentionHopperHeadsTile& tile = kAttentionHopperHeadsTiles[index];
    BackwardPlan plan;
    plan.backend = kId;
    plan.kernel = BackwardKernel::kHeads;
    plan.tile = index;
    plan.query_gradient = QueryGradient::kWhole;
    plan.has_pairs = true;
    plan.reads_bias_in_place = reads_in_place(params, hopper_bias(params));
    plan.tile_head_dim = plan.tile_value_dim = tile.head_dim;
    plan.tile_queries = tile.kQueries;
    plan.tile_keys = tile.keys();
    plan.threads = tile.threads();
    plan.blocks = std::min<int64_t>(params.batches * params.heads, device.multiprocessors);
    if (params.keys > tile.keys())
      plan.query_part_bytes = plan.blocks * round_up(params.queries, tile.kQueries) *
                              tile.head_dim * int64_t{sizeof(float)};
    if (params.bias_gradient_kind == BiasGradient::kShared) {
      plan.bias_gradient = BiasGradient::kInOrder;
      plan.in_order = hopper_bias_gradient_plan(params, device).value();
    }
    plan.finish(params);
    return plan;
  }
};

}  // namespace megasoftmax
