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
  return bias.type == params.query.type && bias.column_stride == 1 && is_aligned ? BiasKind::kTile
                                                                                 : BiasKind::kAny;
}

// A bias of size 1 over queries or keys is broadcast over them.
inline BiasGradient bias_gradient_kind(const AttentionParams& params, int64_t bias_queries,
                                       int64_t bias_keys, bool is_deterministic) {
  if (params.is_relative) return BiasGradient::kDiagonals;
  if (bias_keys != params.keys) return BiasGradient::kQueries;
  if (bias_queries != params.queries) return BiasGradient::kKeys;
  if (params.batches_per_bias.divisor == 1 && params.heads_per_bias.divisor == 1)
    return BiasGradient::kDense;
  return is_deterministic ? BiasGradient::kInOrder : BiasGradient::kShared;
}

// The first of a table whose tiles hold the head dimensions, on a GPU that has room for all.
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
  return std::max(BackwardLayout(tile, kind).bytes(1),
                  InOrderLayout(tile.head_dim, tile.in_order_keys(), kind).bytes);
}

// The first tile of a table that holds such a head dimension, and that a block has room for.
template <class TileShape, int kCount>
constexpr int tile_for(const TileShape (&tiles)[kCount], int head_dim, BiasKind kind,
                       int shared_bytes) {
  int index = 0;
  while (index < kCount - 1 &&
         (tiles[index].head_dim < head_dim || bytes_of(tiles[index], kind) > shared_bytes))
    ++index;
  return index;
}
template <class TileShape, int kCount>
int tile_for(const TileShape (&tiles)[kCount], const AttentionParams& params,
             const Device& device) {
  return tile_for(tiles, std::max(params.head_dim, params.value_dim), bias_kind(params),
                  device.shared_bytes);
}

// So that one of them serves, whatever the GPU, and is for no larger head dimension than needed.
template <class TileShape, int kCount>
constexpr bool fits_every_gpu(const TileShape (&tiles)[kCount]) {
  for (const TileShape& tile : tiles) {
    for (const BiasKind kind : {BiasKind::kNone, BiasKind::kTile, BiasKind::kAny}) {
      const int found = tile_for(tiles, tile.head_dim, kind, least_shared_bytes());
      if (tiles[found].head_dim != tile.head_dim ||
          bytes_of(tiles[found], kind) > least_shared_bytes())
        return false;
    }
  }
  return true;
}
static_assert(fits_every_gpu(kAttentionForwardTiles) && fits_every_gpu(kAttentionBackwardTiles));

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

// Warps of a block of few queries.
constexpr int decode_warps(int head_dim, int shared_bytes) {
  int warps = max_decode_warps(head_dim);
  while (warps > 1 && DecodeLayout(head_dim, warps).bytes > shared_bytes) warps /= 2;
  return warps;
}
static_assert(DecodeLayout(kMaxHeadDim, decode_warps(kMaxHeadDim, least_shared_bytes())).bytes <=
              least_shared_bytes());

// Few queries take a kernel of their own, which reads a bias entry by entry, but not with dropout
// or a mask of blocks.
inline bool takes_few_queries(int64_t queries, bool has_dropout, int64_t mask_block) {
  return queries <= kMaxDecodeQueries && !has_dropout && mask_block == 1;
}

// That kernel has the keys split among blocks: into how many parts. 0: another kernel.
inline int forward_splits(const AttentionParams& params, int multiprocessors) {
  if (!takes_few_queries(params.queries, params.dropout.seed != nullptr, params.mask_block))
    return 0;
  const int64_t row_tiles =
      divide_up<int64_t>(params.heads_per_key_head.divisor * params.queries, 16);
  const int64_t blocks = params.batches * params.key_heads * row_tiles;
  // What a window leaves of the keys: blocks find their parts of it, and of ranges, themselves.
  const bool is_window = params.window_left >= 0 && params.window_right >= 0;
  const int64_t seen = is_window
                           ? int64_t{params.window_left} + params.window_right + params.queries
                           : int64_t{params.keys};
  const int64_t keys = std::min<int64_t>(seen, params.keys);
  const auto splits_for = [&](int64_t blocks_per_sm, int fewest_keys) {
    return std::clamp<int64_t>(
        divide_up<int64_t>(multiprocessors * blocks_per_sm, std::max<int64_t>(blocks, 1)), 1,
        std::max<int64_t>(keys / fewest_keys, 1));
  };
  return static_cast<int>(
      std::max(splits_for(1, kFewestKeysOfSplit), splits_for(kMaxDecodeBlocksPerSm, kKeysOfSplit)));
}

// Such launches have kernels of their own, which lose no time over masks and dropout.
inline bool is_plain(const AttentionParams& params) {
  return params.note.words == nullptr && params.dropout.seed == nullptr;
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

// The largest head dimension of a table.
template <class TileShape, int kCount>
constexpr int largest_head_dim(const TileShape (&tiles)[kCount]) {
  return tiles[kCount - 1].head_dim;
}

// Kernels of Hopper's own, in code for 9.0a alone: an index of kAttentionHopperTiles, or -1.
inline int hopper_tile(const AttentionParams& params) {
  const auto is_dense = [&](const Strided& tensor, int64_t heads, int rows) {
    return takes_tensor_copies(tensor, params.batches, heads, rows);
  };
  const int dim = std::max(params.head_dim, params.value_dim);
  if (!takes_hopper_bias(params) || dim <= 32 || dim > largest_head_dim(kAttentionHopperTiles) ||
      params.keys == 0 || !is_dense(params.query, params.heads, params.queries) ||
      !is_dense(params.key, params.key_heads, params.keys) ||
      !is_dense(params.value, params.key_heads, params.keys))
    return -1;
  return tile_for(kAttentionHopperTiles, params);
}

// Where columns are sliced, shared memory has no room for a bias.
constexpr bool takes_bias(const AttentionHopperBackwardTile& tile, HopperBias bias) {
  return tile.slices == 1 || bias == HopperBias::kNone;
}

// The same backward, of kAttentionHopperBackwardTiles.
inline int hopper_backward_tile(const AttentionBackwardParams& params) {
  const int dim = std::max(params.head_dim, params.value_dim);
  if (hopper_tile(params) < 0 || dim > largest_head_dim(kAttentionHopperBackwardTiles) ||
      params.query_gradient_sum == nullptr || params.queries == 0 ||
      !takes_tensor_copies(params.output_gradient, params.batches, params.heads, params.queries))
    return -1;
  const int index = tile_for(kAttentionHopperBackwardTiles, params);
  return takes_bias(kAttentionHopperBackwardTiles[index], hopper_bias(params)) ? index : -1;
}

// Do blocks of Hopper's forward take several tiles of queries? By length and window; what a mask or
// ranges leave is not known.
inline bool shares_blocks(const AttentionParams& params) {
  const AttentionHopperTile& tile = kAttentionHopperTiles[tile_for(kAttentionHopperTiles, params)];
  const bool is_window = params.window_left >= 0 && params.window_right >= 0;
  const int64_t seen = is_window
                           ? int64_t{params.window_left} + params.window_right + tile.queries()
                           : int64_t{params.keys};
  return std::min<int64_t>(seen, params.keys) <= kMaxStepsOfSharedBlocks * tile.keys;
}

inline bool is_valid(const AttentionParams& params) {
  return params.head_dim > 0 && std::max(params.head_dim, params.value_dim) <= kMaxHeadDim &&
         params.head_dim % 8 == 0 && params.value_dim % 8 == 0 && params.scale > 0 &&
         params.scale <= kMaxScale && params.dropout.threshold <= kMaxDropped;
}

}  // namespace megasoftmax
