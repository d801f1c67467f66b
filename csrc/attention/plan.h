#pragma once
// Which kernels serve a launch of attention. Plain host code.

#include <algorithm>
#include <cstdint>

#include "../common/limits.h"
#include "layout.h"

namespace megasoftmax {

inline BiasKind bias_kind(const AttentionParams& params) {
  const Strided& bias = params.bias;
  if (bias.data == nullptr) return BiasKind::kNone;
  const bool is_aligned = reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 &&
                          (bias.batch_stride | bias.head_stride | bias.query_stride) % 8 == 0;
  return bias.type == params.query.type && bias.type != DType::kFloat32 &&
                 bias.column_stride == 1 && is_aligned
             ? BiasKind::kTile
             : BiasKind::kAny;
}

// A bias of size 1 over queries or keys is broadcast over them.
inline BiasGradient bias_gradient_kind(const AttentionParams& params, int64_t bias_queries,
                                       int64_t bias_keys) {
  if (params.is_relative) return BiasGradient::kDiagonals;
  if (bias_keys != params.keys) return BiasGradient::kQueries;
  if (bias_queries != params.queries) return BiasGradient::kKeys;
  if (params.batches_per_bias.divisor == 1 && params.heads_per_bias.divisor == 1)
    return BiasGradient::kDense;
  return BiasGradient::kShared;
}

// The first of a table of the portable kernels whose tiles hold the head dimensions, on a GPU that
// has room for all.
template <class TileShape, int kCount>
int tile_for(const TileShape (&tiles)[kCount], const AttentionParams& params) {
  int index = 0;
  while (tiles[index].head_dim < std::max(params.head_dim, params.value_dim)) ++index;
  return index;
}

// Those that a launch needs beside each other: of the backward, dQ in order too.
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

// The first tile of a table that is for such elements, holds such a head dimension, and that a
// block has room for; the last one for such elements where there is none.
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

// So that one of them serves, whatever the GPU that has attention, and is for no larger head
// dimension than needed.
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

// Whether some GPU takes this tile with such a bias: no tile before it serves all of them.
template <class TileShape, int kCount>
constexpr bool is_taken(const TileShape (&tiles)[kCount], int index, BiasKind kind) {
  const TileShape& tile = tiles[index];
  return tile_for(tiles, tile.head_dim, kind, tile.element_bytes, kLeastBytes) >= index;
}

// How many blocks of a tile run at a time on a multiprocessor.
template <class TileShape>
int resident_blocks(const TileShape& tile, int bytes, const Device& device) {
  return std::min(tile.blocks_per_sm, device.shared_bytes_per_sm / (bytes + kReservedSharedBytes));
}

// Tiles of the bias in shared memory at a time, forward: the second must not cost a block.
inline int bias_stages(const AttentionTile& tile, BiasKind kind, const Device& device) {
  const ForwardLayout layout(tile, kind);
  return kind == BiasKind::kTile && layout.bytes(2) <= device.shared_bytes &&
                 resident_blocks(tile, layout.bytes(2), device) ==
                     resident_blocks(tile, layout.bytes(1), device)
             ? 2
             : 1;
}

// Tiles of queries in shared memory at a time, backward: the second must not leave a block alone.
inline int query_stages(const AttentionBackwardTile& tile, BiasKind kind, const Device& device) {
  const BackwardLayout layout(tile, kind);
  return layout.bytes(2) <= device.shared_bytes &&
                 (resident_blocks(tile, layout.bytes(2), device) > 1 ||
                  resident_blocks(tile, layout.bytes(1), device) == 1)
             ? 2
             : 1;
}

// How the gradient of a bias is made in order: by an index of kAttentionBiasGradientTiles, with so
// many steps in shared memory at a time, and from so many parts.
struct BiasGradientPlan {
  int tile, stages, parts;
};

// Steps: without one block less on a multiprocessor.
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

// Parts: as many as take the least time, in clocks.
inline int bias_gradient_parts(const AttentionBackwardParams& params,
                               const AttentionBiasGradientTile& tile, int bytes,
                               const Device& device) {
  const int64_t of_sm = resident_blocks(tile, bytes, device);
  const int64_t room = of_sm * device.multiprocessors;
  const int64_t blocks = params.bias_batches() * params.bias_heads() *
                         divide_up<int64_t>(params.queries, tile.queries()) *
                         divide_up<int64_t>(params.keys, tile.keys());
  const int64_t members = params.batches_per_bias.divisor * params.heads_per_bias.divisor;
  const int64_t most = std::min<int64_t>(
      members, kMostBiasPartBytes / std::max<int64_t>(4 * params.part_entries(), 1));
  const int64_t step = of_sm * tile.queries() * tile.keys() * tile.head_dim / kWorkOfClock;
  const auto time_of = [&](int64_t parts) {
    const int64_t time = divide_up(blocks * parts, room) * divide_up(members, parts) * step;
    return parts == 1
               ? time
               : time + parts * params.part_entries() / kPartEntriesOfClock + kClocksOfAddingParts;
  };
  int64_t best = 1;
  for (int64_t waves = 1; waves <= kMostWavesOfBiasParts && blocks > 0; ++waves) {
    const int64_t parts = std::min(waves * room / blocks, most);
    if (parts > 1 && time_of(parts) < time_of(best)) best = parts;
  }
  return static_cast<int>(best);
}

inline BiasGradientPlan bias_gradient_plan(const AttentionBackwardParams& params,
                                           const Device& device) {
  const BiasKind kind = bias_kind(params);
  const int index = tile_for(kAttentionBiasGradientTiles, params, device);
  const AttentionBiasGradientTile& tile = kAttentionBiasGradientTiles[index];
  const int stages = bias_gradient_stages(tile, kind, device);
  return {index, stages,
          bias_gradient_parts(params, tile, BiasGradientLayout(tile, kind).bytes(stages), device)};
}

// Few queries take a kernel of their own, which reads a bias entry by entry, but not with dropout
// or a mask of blocks, and not in float32: the forward splits the keys of those, too.
inline bool takes_few_queries(int64_t queries, DType type, bool has_dropout, int64_t mask_block) {
  return queries <= kMaxDecodeQueries && type != DType::kFloat32 && !has_dropout && mask_block == 1;
}

inline bool takes_few_queries(const AttentionParams& params) {
  return takes_few_queries(params.queries, params.query.type, params.dropout.is_given(),
                           params.mask_block);
}

// Head dimensions beyond kMaxHeadDim have a kernel of their own, which reads masks and biases entry
// by entry, too.
constexpr bool is_wide(int64_t head_dim, int64_t value_dim) {
  return std::max(head_dim, value_dim) > kMaxHeadDim;
}
inline bool is_wide(const AttentionParams& params) {
  return is_wide(params.head_dim, params.value_dim);
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

// From what the first query sees to the last key; blocks find their parts of what they see.
inline int64_t keys_seen(const AttentionParams& params) {
  const int64_t seen =
      params.window_left < 0 ? int64_t{params.keys} : int64_t{params.window_left} + params.queries;
  return std::min<int64_t>(seen, params.keys);
}

// Of few queries. Blocks wait for memory, so a multiprocessor needs a number of warps: clusters
// have as many, or, where they would have less than half of the blocks that have room, all blocks
// wait for each other. Those are one for each multiprocessor where parts are more than
// kMaxPartsBeside.
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
  // One part is no cluster, but where there are clusters, two parts are not worth the barrier.
  const bool are_clusters =
      (in_clusters > 1 || device.max_cluster > 1) && 2 * in_clusters >= together;
  if (together <= 1 || are_clusters) return {static_cast<int>(std::max<int64_t>(in_clusters, 1))};
  return {static_cast<int>(together), true};
}

// Into how many parts the keys of blocks are split, of so many rows of queries each, of at least
// `fewest_keys`. They compute: several on a multiprocessor would take longer.
inline int splits_for(const AttentionParams& params, int64_t blocks, int rows, int fewest_keys,
                      int multiprocessors) {
  if (blocks == 0) return 1;
  const int64_t keys = keys_seen(params);
  const int64_t most = std::max<int64_t>(keys / fewest_keys, 1);
  const auto time_of = [&](int64_t splits) {
    const int64_t waves = divide_up<int64_t>(blocks * splits, multiprocessors);
    const int64_t of_block = divide_up(keys, splits) + kKeysOfStart;
    if (splits == 1) return (kImbalance * waves + 1) * of_block;
    return (kImbalance * waves + 1) * (of_block + kKeysOfPart * rows) + kImbalance * kKeysOfLaunch;
  };
  // For less than an eighth another launch is not worth the host's time.
  int64_t best = 1, least = time_of(1) * 7 / 8;
  for (int waves = 1; waves <= kMaxWavesOfSplits; ++waves) {
    const int64_t splits = std::min(int64_t{waves} * multiprocessors / blocks, most);
    if (splits <= 1) continue;
    if (const int64_t time = time_of(splits); time < least) {
      best = splits;
      least = time;
    }
  }
  return static_cast<int>(best);
}

// Whether the host does not know how many keys a query sees.
inline bool has_unknown_lengths(const AttentionParams& params) {
  return params.note.words != nullptr || params.visible.are_given();
}

// Such launches have kernels of their own, which lose no time over masks, ranges and dropout.
inline bool is_plain(const AttentionParams& params) {
  return !has_unknown_lengths(params) && params.dropout.seed == nullptr;
}

// Tensor copies know no entries that several batches, heads or tokens share.
inline bool takes_tensor_copies(const Strided& tensor, int64_t batches, int64_t heads, int rows) {
  return (batches == 1 || tensor.batch_stride != 0) && (heads == 1 || tensor.head_stride != 0) &&
         (rows == 1 || tensor.query_stride != 0);
}

// What Hopper's kernels take as a bias.
enum class HopperBias {
  kNone,
  kTile,   // by tensor copies
  kTable,  // a relative one, of any element type and strides
};

inline HopperBias hopper_bias(const AttentionParams& params) {
  if (params.bias.data == nullptr) return HopperBias::kNone;
  return params.is_relative ? HopperBias::kTable : HopperBias::kTile;
}

// Tensor copies need a 16-bit bias with an entry for each query and key. The rows of its gradient
// begin at multiples of 16 bytes, too.
inline bool takes_hopper_bias(const AttentionParams& params) {
  if (hopper_bias(params) != HopperBias::kTile) return true;
  return bias_kind(params) == BiasKind::kTile && params.keys % 8 == 0 &&
         takes_tensor_copies(params.bias, params.bias_batches(), params.bias_heads(),
                             params.queries);
}

// Forward, shared memory must have room for it. Backward, the kernel of wide tiles takes none.
constexpr bool takes_bias(const AttentionHopperTile& tile, HopperBias bias) {
  return bias != HopperBias::kTile || tile.bias_stages > 0;
}
constexpr bool takes_bias(const AttentionHopperBackwardTile& tile, HopperBias bias) {
  return bias == HopperBias::kNone || !tile.is_wide();
}

// The first of a table of Hopper's whose tiles hold the head dimensions and take the bias, or -1.
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

// Kernels of Hopper's own, in code for 9.0a alone: an index of kAttentionHopperTiles, or -1.
inline int hopper_tile(const AttentionParams& params) {
  const auto is_dense = [&](const Strided& tensor, int64_t heads, int rows) {
    return takes_tensor_copies(tensor, params.batches, heads, rows);
  };
  if (params.query.type == DType::kFloat32 || !takes_hopper_bias(params) ||
      std::max(params.head_dim, params.value_dim) <= 32 || params.keys == 0 ||
      !is_dense(params.query, params.heads, params.queries) ||
      !is_dense(params.key, params.key_heads, params.keys) ||
      !is_dense(params.value, params.key_heads, params.keys))
    return -1;
  return hopper_tile_for(kAttentionHopperTiles, params);
}

// The same backward, of kAttentionHopperBackwardTiles. Wide tiles know no turns.
inline int hopper_backward_tile(const AttentionBackwardParams& params) {
  const QueryGradient kind = params.query_gradient_kind;
  if (hopper_tile(params) < 0 || params.queries == 0 || kind == QueryGradient::kInOrder ||
      kind == QueryGradient::kWhole ||
      !takes_tensor_copies(params.output_gradient, params.batches, params.heads, params.queries))
    return -1;
  const int tile = hopper_tile_for(kAttentionHopperBackwardTiles, params);
  const bool knows_kind =
      kind == QueryGradient::kAdded || tile < 0 || kAttentionHopperBackwardTiles[tile].has_turns();
  return knows_kind ? tile : -1;
}

// Whether blocks of keys, of which a GPU runs `room` at a time, lose less time by taking turns than
// a launch of its own takes. Those of a head that begin at the same time run one step after the
// other.
template <class Tile>
bool is_faster_in_turns(const AttentionBackwardParams& params, const Tile& tile, int64_t room) {
  const int64_t heads = std::max<int64_t>(params.batches * params.key_heads, 1);
  const int64_t together =
      std::min(divide_up(room, heads), divide_up<int64_t>(params.keys, tile.keys()));
  const int64_t steps =
      divide_up<int64_t>(params.queries, tile.queries) * params.heads_per_key_head.divisor;
  return tile.has_turns() && kStepsOfTurn * (together - 1) <= steps;
}

// How gradients of queries are summed, by Hopper's kernel of a tile, or by the portable one where
// that is -1.
inline QueryGradient query_gradient_kind(const AttentionBackwardParams& params, int hopper_tile,
                                         bool is_deterministic, const Device& device) {
  const auto in_turns = [&](const auto& own, int64_t room) {
    if (!is_deterministic) return QueryGradient::kAdded;
    return is_faster_in_turns(params, own, room) ? QueryGradient::kInTurns
                                                 : QueryGradient::kInOrder;
  };
  if (hopper_tile >= 0)
    return in_turns(kAttentionHopperBackwardTiles[hopper_tile], device.multiprocessors);
  const AttentionBackwardTile& tile =
      kAttentionBackwardTiles[tile_for(kAttentionBackwardTiles, params, device)];
  if (tile.has_turns() && params.keys > 0 && params.keys <= tile.keys())
    return QueryGradient::kWhole;
  const BiasKind kind = bias_kind(params);
  const int bytes = BackwardLayout(tile, kind).bytes(query_stages(tile, kind, device));
  return in_turns(tile, int64_t{resident_blocks(tile, bytes, device)} * device.multiprocessors);
}

// Whether blocks of Hopper's backward, one for each batch that shares a bias, sum its gradient in
// clusters: they take the same tiles of it.
inline bool sums_in_clusters(const AttentionBackwardParams& params) {
  const int64_t batches = params.batches_per_bias.divisor;
  return params.bias_gradient_kind == BiasGradient::kShared && !has_unknown_lengths(params) &&
         params.heads_per_bias.divisor == 1 && batches > 1 && batches <= kMaxBiasCluster &&
         (batches & (batches - 1)) == 0;
}

// Whether the gradient of a bias that several share takes less time by a launch of its own than by
// additions in any order: where each block of keys would add to all entries of a small window.
inline bool is_faster_in_order(const AttentionBackwardParams& params, int hopper_tile) {
  return hopper_tile < 0 && size_of(params.query.type) == 2 &&
         std::max(params.queries, params.keys) <= kMostOfSmallWindow;
}

// Do blocks of Hopper's forward take several tiles of queries? By length and window. With a mask or
// ranges they do in any case: see AttentionForwardParams::tiles_taken.
inline bool shares_blocks(const AttentionParams& params) {
  const AttentionHopperTile& tile =
      kAttentionHopperTiles[hopper_tile_for(kAttentionHopperTiles, params)];
  const bool is_window = params.window_left >= 0 && params.window_right >= 0;
  const int64_t seen = is_window
                           ? int64_t{params.window_left} + params.window_right + tile.queries()
                           : int64_t{params.keys};
  return std::min<int64_t>(seen, params.keys) <= kMaxStepsOfSharedBlocks * tile.keys;
}

// Heads of all batches whose tiles lie side by side, for TileOrder. `heads` and `batches` are those
// of the grid: those of the bias where its gradient is made in order, for example. Batches that
// share a dense bias stay together, so that it is read from device memory once. Where tiles of a
// head differ in length there are more: of each head the tiles read `bytes_of_head` again and
// again, and half of the L2 cache has to hold them. Where lengths are not known, all tiles end at
// about the same time if the last ones are the shortest of many heads, of each of which
// kBlocksOfHead of the multiprocessors still read the same.
inline int64_t heads_of_section(const AttentionParams& params, int64_t heads, int64_t batches,
                                int64_t bytes_of_head, int cache_bytes, int multiprocessors = 0) {
  const bool shares_bias =
      params.bias.data != nullptr && !params.is_relative && params.batches_per_bias.divisor > 1;
  const bool is_even =
      params.window_left < 0 && params.window_right < 0 && !has_unknown_lengths(params);
  const int64_t fewest = has_unknown_lengths(params) ? multiprocessors / kBlocksOfHead : 1;
  const int64_t together = shares_bias ? batches : 1, count = heads * batches / together;
  const int64_t in_cache = cache_bytes / std::max<int64_t>(bytes_of_head, 1);
  const int64_t held = params.takes_turns ? std::min<int64_t>(in_cache, kHeadsOfTurns)
                       : is_even          ? 1
                                          : std::max(in_cache / 2, fewest);
  int64_t most = std::clamp<int64_t>(held / together, 1, std::min(count, kMaxHeadsOfSection));
  while (count % most != 0) --most;
  return most * together;
}
inline int64_t bytes_of_head(const AttentionForwardParams& params) {
  return size_of(params.query.type) * int64_t{params.keys} * (params.head_dim + params.value_dim);
}
inline int64_t bytes_of_head(const AttentionBackwardParams& params) {
  return int64_t{params.queries} *
         (size_of(params.query.type) * (params.head_dim + params.value_dim) + 4 * params.head_dim);
}

// Of heads that share keys, those that a block of Hopper's forward takes side by side, a warpgroup
// each. Bias, mask, ranges and dropout are of one head.
inline int hopper_heads_of_block(const AttentionParams& params, const AttentionHopperTile& tile) {
  const bool is_alone = params.bias.data != nullptr || params.mask.data != nullptr ||
                        params.visible.are_given() || params.dropout.is_given();
  if (is_alone || params.queries > 64) return 1;
  return std::clamp(static_cast<int>(params.heads_per_key_head.divisor), 1, tile.warpgroups);
}
// How many blocks have the heads of a batch, for each tile of queries.
inline int64_t hopper_blocks_of_heads(const AttentionParams& params,
                                      const AttentionHopperTile& tile) {
  return params.key_heads *
         divide_up<int64_t>(params.heads_per_key_head.divisor, hopper_heads_of_block(params, tile));
}

// hopper_tile, or -1 where the kernel of few queries is better.
inline int hopper_forward_tile(const AttentionParams& params) {
  const int tile = hopper_tile(params);
  if (tile < 0 || !takes_few_queries(params)) return tile;
  const bool shares = hopper_heads_of_block(params, kAttentionHopperTiles[tile]) > 1;
  return shares && params.queries > kMostQueriesOfSharedRows ? tile : -1;
}

// Whether the kernel of few queries runs; `hopper_tile`: -1 where Hopper's do not.
inline bool is_decode(const AttentionParams& params, int hopper_tile) {
  return hopper_tile < 0 && !is_wide(params) && takes_few_queries(params);
}

// How the forward splits keys. `hopper_tile` as above.
inline KeySplits forward_splits(const AttentionParams& params, const Device& device,
                                int hopper_tile) {
  if (is_decode(params, hopper_tile)) return decode_splits(params, device);
  const auto splits_of = [&](int64_t blocks, int rows, int fewest_keys) -> KeySplits {
    const int count = splits_for(params, blocks, rows, fewest_keys, device.multiprocessors);
    return {count, count > 1};
  };
  if (is_wide(params))
    return splits_of(params.batches * params.key_heads * wide_row_tiles(params), kWideRows,
                     2 * kWideKeys);
  const auto splits_of_tile = [&](const auto& tile, int64_t heads) {
    return splits_of(params.batches * heads * divide_up(params.queries, tile.queries()),
                     tile.queries(), kFewestKeysOfSplit);
  };
  if (hopper_tile >= 0) {
    const AttentionHopperTile& tile = kAttentionHopperTiles[hopper_tile];
    return splits_of_tile(tile, hopper_blocks_of_heads(params, tile));
  }
  return splits_of_tile(kAttentionForwardTiles[tile_for(kAttentionForwardTiles, params, device)],
                        params.heads);
}

constexpr int max_head_dim(DType type) {
  return type == DType::kFloat32 ? kMaxFloatHeadDim : kMaxHeadDim;
}

inline bool is_valid(const AttentionParams& params) {
  const bool is_for_inference = params.query.type != DType::kFloat32 &&
                                params.head_dim <= kMaxWideHeadDim &&
                                params.value_dim <= kMaxWideValueDim && !params.dropout.is_given();
  const bool fits =
      std::max(params.head_dim, params.value_dim) <= max_head_dim(params.query.type) ||
      is_for_inference;
  return params.head_dim > 0 && fits && params.head_dim % 8 == 0 && params.value_dim % 8 == 0 &&
         params.scale > 0 && params.scale <= kMaxScale && params.dropout.threshold <= kMaxDropped;
}

}  // namespace megasoftmax
