#pragma once
// How a launch of attention runs: what its plan says, and the rules that all kernels share. Plain
// host code. Each backend has a plan.h of its own, and backends.h asks them in order.

#include <algorithm>
#include <cstdint>

#include "../common/limits.h"
#include "layout.h"

namespace megasoftmax {

// Pieces of one allocation, each from a multiple of 256 bytes on.
struct Workspace {
  int64_t bytes = 0;

  // Returns where a piece of so many bytes begins.
  int64_t add(int64_t count) {
    if (count == 0) return bytes;
    const int64_t begin = round_up<int64_t>(bytes, 256);
    bytes = begin + count;
    return begin;
  }
};

// The folder whose kernels run. What a backend has is listed in backends.h.
enum class BackendId { kSm80, kSm90 };

// What a plan says of a pass, whichever kernel runs.
struct AttentionPlan {
  BackendId backend = BackendId::kSm80;
  int tile = 0;  // a row of the kernel's table of tiles
  // What head dimensions are filled up to, and the queries and keys of a tile.
  int tile_head_dim = 0, tile_value_dim = 0, tile_queries = 0, tile_keys = 0;
  int threads = 0;
  int shared_bytes = 0;  // of a block; 0 for Hopper's kernels, which are not chosen by it
  int64_t blocks = 0;
  int64_t workspace_bytes = 0;
  // Whether no copy of a bias would make the kernel read it faster.
  bool reads_bias_in_place = false;
};

enum class ForwardKernel {
  kTiles,
  kDecode,  // few queries
  kWide,    // head dimensions beyond kMaxHeadDim
  kSmall,   // several heads of few queries and keys in a block
  kHeads,   // heads that share a bias which a block keeps, of Hopper
};
enum class BackwardKernel {
  kTiles,
  kSmall,
  kHeads,  // whole heads, of Hopper
};

struct ForwardPlan : AttentionPlan {
  ForwardKernel kernel = ForwardKernel::kTiles;
  KeySplits splits;
  // The grid: tiles of queries with the same keys, and how many heads of a batch, or groups of
  // heads, have blocks of their own.
  int64_t row_tiles = 0, heads = 0;
  int bias_stages = 1;                   // tiles of the bias in shared memory at a time
  int bias_parts = 1;                    // see AttentionParams
  int heads_of_block = 1;                // see AttentionForwardParams
  bool reads_mask = false;               // itself: no block mask is made of it
  bool reads_ranges = false;             // likewise
  bool counts_tiles = false;             // see AttentionForwardParams::tile_counter
  int64_t parts_at = 0, counter_at = 0;  // in the workspace

  // Whether a block mask is made of a mask and of ranges, as far as they are given.
  bool reads_block_mask(bool has_mask, bool has_ranges) const {
    return kernel != ForwardKernel::kDecode && kernel != ForwardKernel::kWide &&
           ((has_mask && !reads_mask) || (has_ranges && !reads_ranges));
  }
  // Completes a plan whose other members are set. `most_blocks` run at a time.
  void finish(const AttentionForwardParams& params, int64_t most_blocks = INT64_MAX) {
    blocks = std::min(splits.count * row_tiles * heads * params.batches, most_blocks);
    Workspace workspace;
    if (splits.take_workspace) parts_at = workspace.add(params.part_bytes(splits.count));
    if (counts_tiles) counter_at = workspace.add(sizeof(uint32_t));
    workspace_bytes = workspace.bytes;
  }
  void set_workspace(AttentionForwardParams& params, char* workspace) const {
    if (splits.take_workspace) params.parts = reinterpret_cast<float*>(workspace + parts_at);
    if (counts_tiles) params.tile_counter = reinterpret_cast<uint32_t*>(workspace + counter_at);
  }
};

// How the gradient of a bias is made in order: by which row of kAttentionBiasGradientTiles, or of
// kAttentionHopperBiasGradientTiles, from how many parts, and with how many steps in shared memory
// at a time, which Hopper's kernel does not ask.
struct BiasGradientPlan {
  BackendId backend = BackendId::kSm80;
  int tile = 0, stages = 1, parts = 1;
};

struct BackwardPlan : AttentionPlan {
  BackwardKernel kernel = BackwardKernel::kTiles;
  int slices = 1;  // of the columns of gradients: blocks with the same keys
  int stages = 1;  // tiles of queries in shared memory at a time
  QueryGradient query_gradient = QueryGradient::kAdded;
  OrderOfTurns order_of_turns = OrderOfTurns::kLastKeysFirst;  // of kInTurns
  int query_sums = 1;                                          // see AttentionBackwardParams
  TileOrder order;                                             // of Hopper's tiles
  int sections_apart = 0;                                      // see AttentionBackwardParams
  BiasGradient bias_gradient = BiasGradient::kNone;
  BiasGradientPlan in_order;  // of BiasGradient::kInOrder, and parts of small heads
  // Kernels write zeros to the gradient of the bias where no tile is.
  bool clears_bias_gradient = false;
  bool has_pairs = false;        // the kernel reads PairOfRows
  int64_t query_part_bytes = 0;  // see AttentionBackwardParams::query_gradient_parts
  int64_t sums_at = 0, rows_at = 0, turns_at = 0, parts_at = 0, diagonals_at = 0;
  int64_t query_parts_at = 0, pairs_at = 0, section_counts_at = 0;

  bool sums_queries() const {
    return query_gradient != QueryGradient::kInOrder && query_gradient != QueryGradient::kWhole;
  }
  // Completes a plan whose other members are set.
  void finish(const AttentionBackwardParams& params) {
    if (kernel == BackwardKernel::kTiles)
      blocks =
          params.batches * params.key_heads * divide_up<int64_t>(params.keys, tile_keys) * slices;
    Workspace workspace;
    if (sums_queries()) sums_at = workspace.add(query_sums * params.query_sum_bytes());
    if (kernel == BackwardKernel::kHeads) query_parts_at = workspace.add(query_part_bytes);
    if (sections_apart != 0)
      section_counts_at = workspace.add(2 * sizeof(uint32_t) * params.batches * params.key_heads);
    if (has_pairs)
      pairs_at = workspace.add(params.batches * params.heads * params.pairs_of_head() *
                               sizeof(PairOfRows));
    if (kernel != BackwardKernel::kSmall)
      rows_at = workspace.add(params.rows() * sizeof(RowOfBackward));
    if (query_gradient == QueryGradient::kInTurns)
      turns_at = workspace.add(params.turn_count() * sizeof(uint32_t));
    if (bias_gradient == BiasGradient::kInOrder)
      parts_at = workspace.add(params.bias_part_bytes(in_order.parts));
    if (bias_gradient == BiasGradient::kDiagonals)
      diagonals_at = workspace.add(params.diagonal_bytes(tile_keys));
    workspace_bytes = workspace.bytes;
  }
  void set_workspace(AttentionBackwardParams& params, char* workspace) const {
    params.rows_of_backward = reinterpret_cast<RowOfBackward*>(workspace + rows_at);
    if (sums_queries()) params.query_gradient_sum = reinterpret_cast<float*>(workspace + sums_at);
    if (kernel == BackwardKernel::kHeads)
      params.query_gradient_parts = reinterpret_cast<float*>(workspace + query_parts_at);
    if (sections_apart != 0)
      params.section_counts = reinterpret_cast<uint32_t*>(workspace + section_counts_at);
    if (has_pairs) params.pairs_of_rows = reinterpret_cast<PairOfRows*>(workspace + pairs_at);
    if (query_gradient == QueryGradient::kInTurns)
      params.turns = reinterpret_cast<uint32_t*>(workspace + turns_at);
    if (bias_gradient == BiasGradient::kInOrder)
      params.part_sums = reinterpret_cast<float*>(workspace + parts_at);
    if (bias_gradient == BiasGradient::kDiagonals) {
      params.bias_gradient = workspace + diagonals_at;
      params.bias_gradient_bytes = params.diagonal_bytes(tile_keys);
    }
  }
};

// What a launch takes, planned once.
template <class Params, class Plan>
struct Launch {
  Params params;
  Plan plan;

  // Of plan.workspace_bytes, which may be 0. It must stay until the launch.
  void set_workspace(void* workspace) { plan.set_workspace(params, static_cast<char*>(workspace)); }
};
using ForwardLaunch = Launch<AttentionForwardParams, ForwardPlan>;
using BackwardLaunch = Launch<AttentionBackwardParams, BackwardPlan>;

// Whether there is a launch that sums the gradient of the bias in order.
inline bool sums_bias_in_order(const BackwardLaunch& launch) {
  return launch.plan.bias_gradient == BiasGradient::kInOrder && launch.params.bias_entries() != 0;
}

// Whether rows of 16-bit elements begin at multiples of 16 bytes.
inline bool has_aligned_rows(const Strided& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 &&
         (tensor.batch_stride | tensor.head_stride | tensor.query_stride) % 8 == 0;
}
// Whether a bias has the type of 16-bit queries, and the entries of a query lie side by side.
inline bool has_dense_rows(const AttentionParams& params) {
  return params.bias.type == params.query.type && params.bias.type != DType::kFloat32 &&
         params.bias.column_stride == 1;
}
// Whether several queries share one row of the bias.
inline bool is_shared_by_queries(const AttentionParams& params) {
  return params.bias.data != nullptr && !params.is_relative && params.queries > 1 &&
         params.bias.query_stride == 0 && params.bias.column_stride != 0;
}
inline BiasKind bias_kind(const AttentionParams& params) {
  if (!params.are_linear()) return BiasKind::kSoftcap;
  if (params.bias.data == nullptr) return BiasKind::kNone;
  return has_dense_rows(params) && has_aligned_rows(params.bias) ? BiasKind::kTile : BiasKind::kAny;
}

// The kind of gradient that the sizes of a bias ask for. A bias of size 1 over queries or keys is
// broadcast over them.
inline BiasGradient bias_gradient_kind(const AttentionParams& params, int64_t bias_queries,
                                       int64_t bias_keys) {
  if (params.is_relative) return BiasGradient::kDiagonals;
  if (bias_keys != params.keys) return BiasGradient::kQueries;
  if (bias_queries != params.queries) return BiasGradient::kKeys;
  if (params.batches_per_bias.divisor == 1 && params.heads_per_bias.divisor == 1)
    return BiasGradient::kDense;
  return BiasGradient::kShared;
}

// Whether a launch with so many queries may take the kernel for decoding, which reads a bias entry
// by entry. It has no dropout, no mask of blocks and no float32. The other kernels split keys too.
inline bool takes_few_queries(const AttentionParams& params) {
  return params.queries <= kMaxDecodeQueries && params.query.type != DType::kFloat32 &&
         !params.dropout.is_given() && params.mask_block == 1;
}

// Head dimensions above kMaxHeadDim have a kernel of their own, which reads masks and biases entry
// by entry.
inline bool is_wide(const AttentionParams& params) {
  return std::max(params.head_dim, params.value_dim) > kMaxHeadDim;
}

// Keys from the first one that the first query sees on. Blocks split the keys that they see.
inline int64_t keys_seen(const AttentionParams& params) {
  const int64_t seen =
      params.window_left < 0 ? int64_t{params.keys} : int64_t{params.window_left} + params.queries;
  return std::min<int64_t>(seen, params.keys);
}

// Into how many parts keys are split, each of at least `fewest_keys`, for blocks of `rows` queries.
// These blocks are bound by products, so that one at a time runs on a multiprocessor.
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

// Such splits, with their parts in the workspace.
inline KeySplits splits_in_workspace(const AttentionParams& params, int64_t blocks, int rows,
                                     int fewest_keys, const Device& device) {
  const int count = splits_for(params, blocks, rows, fewest_keys, device.multiprocessors);
  return {count, count > 1};
}

// Into how many parts the members of a bias are cut, where each part has so many blocks, of which
// `room` run at a time.
inline int64_t parts_of_members(const AttentionParams& params, int64_t blocks, int64_t room) {
  const int64_t members = params.members_of_bias();
  const auto time_of = [&](int64_t parts) {
    return divide_up(blocks * parts, room) * (divide_up(members, parts) + kMembersOfStart);
  };
  int64_t best = 1;
  for (int64_t waves = 1; waves <= kMostWavesOfMembers; ++waves) {
    const int64_t parts = std::clamp<int64_t>(waves * room / blocks, 1, members);
    if (time_of(parts) < time_of(best)) best = parts;
  }
  return best;
}

// Whether a mask or ranges exclude keys. params.block_mask is set.
inline bool has_mask_or_ranges(const AttentionParams& params) {
  return params.block_mask.words != nullptr || params.visible.are_given();
}
// Whether queries of a head may see different numbers of keys, which the host does not know. A mask
// of keys excludes the same ones for all of them.
inline bool lengths_may_differ(const AttentionParams& params) {
  return params.visible.are_given() ||
         (params.block_mask.words != nullptr && params.block_mask.layout.bit_rows != 1);
}

// Whether a launch has no mask, ranges or dropout. Such launches have kernels of their own, which
// lose no time over those.
inline bool is_unmasked(const AttentionParams& params) {
  return !has_mask_or_ranges(params) && params.dropout.seed == nullptr;
}

// Whether turns lose less time than a launch for dQ in order takes. A GPU runs `room` blocks of
// keys at a time. Without causality, and with the first keys first, a block waits for one step of
// each block of the same head that began with it.
template <class Tile>
bool is_faster_in_turns(const AttentionBackwardParams& params, const Tile& tile, int64_t room) {
  const int64_t heads = std::max<int64_t>(params.batches * params.key_heads, 1);
  const int64_t together =
      std::min(divide_up(room, heads), divide_up<int64_t>(params.keys, tile.keys()));
  const int64_t steps =
      divide_up<int64_t>(params.queries, tile.queries) * params.heads_per_key_head.divisor;
  return tile.has_turns() && Tile::kStepsOfTurn * (together - 1) <= steps;
}

// How gradients of queries are summed by kernels with such tiles, of whose blocks a GPU runs `room`
// at a time.
template <class Tile>
QueryGradient query_gradient_kind(const AttentionBackwardParams& params, const Tile& tile,
                                  int64_t room, bool is_deterministic) {
  if (!is_deterministic) return QueryGradient::kAdded;
  return is_faster_in_turns(params, tile, room) ? QueryGradient::kInTurns : QueryGradient::kInOrder;
}

// How many heads of all batches form a section of TileOrder. `heads` and `batches` are those of the
// grid. `of_turns`: most heads where blocks take turns, but all batches that share a bias.
// * Batches that share a dense bias stay together, so that it is read from device memory once.
// * Tiles of one length: one head at a time.
// * Tiles of different lengths: more heads, whose short tiles fill what long ones leave. Tiles of a
//   head read `bytes_of_head` again and again, and half of the L2 cache holds those of the section.
// * Unknown lengths: at least so many heads that kBlocksOfHead multiprocessors read the same head.
//   Then the last tiles are the shortest ones of many heads, and all blocks end together.
inline int64_t heads_of_section(const AttentionParams& params, int64_t heads, int64_t batches,
                                int64_t bytes_of_head, int cache_bytes,
                                int64_t of_turns = kHeadsOfTurns, int multiprocessors = 0) {
  const bool shares_bias = params.bias.data != nullptr && !params.is_relative &&
                           !is_shared_by_queries(params) && params.batches_per_bias.divisor > 1;
  const bool is_even =
      params.window_left < 0 && params.window_right < 0 && !lengths_may_differ(params);
  const int64_t fewest = lengths_may_differ(params) ? multiprocessors / kBlocksOfHead : 1;
  const int64_t together = shares_bias ? batches : 1, count = heads * batches / together;
  const int64_t in_cache = cache_bytes / std::max<int64_t>(bytes_of_head, 1);
  const int64_t held = params.order_of_turns != OrderOfTurns::kNone ? std::min(in_cache, of_turns)
                       : is_even ? 1
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
         params.scale > 0 && params.logit_scale <= kMaxScale &&
         params.dropout.threshold <= kMaxDropped;
}

}  // namespace megasoftmax
