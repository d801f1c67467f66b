#pragma once
// What a launch of attention needs, as plain structs.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common/integers.h"
#include "../common/tensors.h"
#include "block_mask.h"

namespace megasoftmax {

// How the blocks of a grid lie over tiles, heads and batches. The heads of all batches, those of a
// batch furthest apart, come in sections: first the first tile of each head of a section, then the
// second of each. So a section's longest tiles begin first where tiles become shorter, and short
// ones fill what long ones leave.
struct TileOrder {
  int tiles = 1;  // of a head
  Divider batches, section, blocks_of_section;

  TileOrder() = default;
  // `section`: a divisor of the number of heads of all batches.
  TileOrder(int64_t tiles, int64_t batches, int64_t section)
      : tiles(static_cast<int>(tiles)),
        batches(batches),
        section(section),
        blocks_of_section(tiles * section) {}

  __device__ void place(int block, int& tile, int& head, int& batch) const {
    int index, rest, member;
    blocks_of_section.split(block, index, rest);
    section.split(rest, tile, member);
    batches.split(index * static_cast<int>(section.divisor) + member, head, batch);
  }
};

// The order in which blocks of keys take turns at gradients of queries, if they do.
// kLastKeysFirst: a block takes the heads that share its keys one after the other, each from the
// first query on. kFirstKeysFirst: it begins with the last queries, and takes a tile of all heads
// that share its keys before the next.
enum class OrderOfTurns : uint8_t { kNone, kLastKeysFirst, kFirstKeysFirst };

// Rows of queries, keys and values are the third dimension. They begin at multiples of 16 bytes,
// and their columns are contiguous and a multiple of 8.
struct AttentionParams : LogitOptions {
  int64_t batches = 0, heads = 0, key_heads = 0;
  int queries = 0, keys = 0, head_dim = 0, value_dim = 0;
  Strided query, key, value;  // of one type
  Divider heads_per_key_head;

  // Bool, true = excluded, and a bias, of any strides. An entry of the mask stands for `mask_block`
  // queries and keys, and batch i reads entry i modulo `mask_batches`. Consecutive batches and
  // heads may share an entry of the bias.
  Strided mask, bias;
  Strided row_bias;    // a bias with one entry for each query, which `bias` does not have then
  int mask_block = 1;  // or a multiple of kMaskTile
  Divider mask_batches;
  VisibleRanges visible;
  bool is_relative = false;                  // the bias: an entry depends on key - query alone
  Divider batches_per_bias, heads_per_bias;  // of all, without a bias
  // Where a block takes the batches and heads that share an entry of the bias, its members: into
  // how many parts they are cut. Set by the launcher.
  int bias_parts = 1;

  Dropout dropout;
  int window_left = -1, window_right = -1;  // as in Window
  float logit_scale = 1;     // logits are scores times this, plus the bias: LogitOptions::factor()
  bool is_tf32 = false;      // products of float32 are made of its TF32 part alone
  bool can_exclude = false;  // a row without a visible key is 0, else NaN

  // Backward, set by the launcher. takes_all_queries: a block of keys takes all tiles of queries,
  // also those that see none of its keys. order_of_turns: the grid begins with the blocks that
  // others wait for, of as many heads as heads_of_section says.
  bool takes_all_queries = false;
  OrderOfTurns order_of_turns = OrderOfTurns::kNone;

  // [3, batches, heads, queries]. 0: the largest logit, or a number less than 10 below it and 28
  // above it. 1: the log of the denominator relative to that. 2: their sum, the LSE.
  float* statistics = nullptr;

  TileOrder order;  // set by the launcher

  // Set if a mask or ranges are given and the kernel reads a block mask.
  BlockMask block_mask;

  void set_logits(const LogitOptions& options) {
    static_cast<LogitOptions&>(*this) = options;
    logit_scale = factor();
  }

  // A row of blocks of the mask.
  __device__ const bool* mask_row(int batch, int head, int row) const {
    int round, entry;
    mask_batches.split(batch, round, entry);
    return mask.row<const bool>(entry, head, row);
  }
  // Which entry of the bias a batch and head have.
  __device__ void entry_of_bias(int batch, int head, int& bias_batch, int& bias_head) const {
    int rest;
    batches_per_bias.split(batch, bias_batch, rest);
    heads_per_bias.split(head, bias_head, rest);
  }

  __host__ __device__ int64_t members_of_bias() const {
    return batches_per_bias.divisor * heads_per_bias.divisor;
  }
  __host__ __device__ int64_t rows() const { return batches * heads * queries; }
  __device__ int64_t row_index(int batch, int head, int query) const {
    return (batch * heads + head) * queries + query;
  }
  __host__ __device__ int64_t bias_batches() const { return batches / batches_per_bias.divisor; }
  __host__ __device__ int64_t bias_heads() const { return heads / heads_per_bias.divisor; }
};

// Into how many parts keys are split. Parts are added up in clusters, or wait in the workspace.
struct KeySplits {
  int count = 1;
  bool take_workspace = false;
};

// A row over a part of the keys: its maximum as in `statistics`, and the sum of weights relative to
// it.
struct alignas(8) PartEnd {
  float max, sum;
};

struct AttentionForwardParams : AttentionParams {
  Strided output;

  // Keys are split among so many blocks. `parts`, workspace of part_bytes(), has the results of
  // each. Null: keys are not split, or the blocks are a cluster, which adds up in shared memory.
  int splits = 1;
  float* parts = nullptr;
  Divider row_tiles;  // tiles of queries with the same keys; set by the launcher

  int bias_stages = 1;  // set by the launcher: tiles of the bias in shared memory at a time

  // Workspace of Hopper's kernel: counts tiles of queries that blocks took after their first. Null:
  // each block knows its tiles from the start.
  uint32_t* tile_counter = nullptr;

  // Set by the launcher of Hopper's kernel: how many heads that share keys a block takes, one for
  // each warpgroup, and how many blocks have all heads that share keys.
  int heads_of_block = 1;
  Divider blocks_of_heads;

  // Set by the launcher of Hopper's kernel, a multiple of 64: the first tile of a head begins so
  // many queries before query 0. So the tile that is not full is the shortest tile of a causal
  // head, not the longest.
  int query_tile_offset = 0;

  // [splits, rows, value_dim], float32: sums of values times weights; then [splits, rows] of
  // PartEnd.
  int64_t part_bytes(int64_t splits) const {
    return splits * rows() * static_cast<int64_t>(value_dim * sizeof(float) + sizeof(PartEnd));
  }
  __device__ float* part(int64_t split, int64_t row) const {
    return parts + (split * rows() + row) * value_dim;
  }
  __device__ PartEnd& part_end(int64_t split, int64_t row) const {
    return reinterpret_cast<PartEnd*>(parts + splits * rows() * value_dim)[split * rows() + row];
  }
};

// What a backward needs of a row of scores. Weights are 2^(log2(e) * (logit - max) - log2_sum).
// delta: dS = P (dP - delta), rowsum(dO O) - dLSE. If a kernel reads pairs too, rows whose offset
// is not NaN have max 0, and the offset as log2_sum.
struct alignas(16) RowOfBackward {
  float max;       // of logits
  float log2_sum;  // infinite for a row without a visible key
  float delta;
};

// What a backward needs of two neighbouring rows. Weights are 2^(log2(e) * logit - offset). An
// offset is infinite for a row without a visible key, and NaN where it exceeds kMostOffset: its
// rounding would show, and RowOfBackward must be used. Kernels for capped scores take any offset.
struct alignas(16) PairOfRows {
  float offsets[2], deltas[2];

  // Without branches: they would take longer than what they leave out.
  __device__ bool is_plain() const {
    const bool are_offsets = (offsets[0] == offsets[0]) & (offsets[1] == offsets[1]);
    return are_offsets & (fabsf(deltas[0]) < INFINITY) & (fabsf(deltas[1]) < INFINITY);
  }
};
// The roundings of such an offset and of the factor of scores are at most 2.5e-4 of a weight
// together, half of what rounding to float16 is.
inline constexpr float kMostOffset = 4096;
// Up to such a bias of a key, what rounds in its difference from an offset does not show either.
inline constexpr float kMostKeyBias = 256;
// The most queries of a tile whose kernel reads pairs.
inline constexpr int kQueriesOfPairs = 128;

// What a launch writes as the gradient of a bias, from dS. sm80/bias_gradient.cuh has a policy for
// each kind but kQueries, which needs no scores.
enum class BiasGradient {
  kNone,
  kDense,       // dS, [batches, heads, queries, keys], in the type of the bias
  kKeys,        // sums over queries, [batches, heads, keys], float32
  kQueries,     // sums over keys, [batches, heads, queries], float32
  kShared,      // sums over batches and heads that share an entry, in any order, float32
  kInClusters,  // such sums in a fixed order, in the type of the bias, by Hopper's clusters
  kInOrder,     // such sums in a fixed order, in the type of the bias, from parts
  kDiagonals,   // sums along diagonals of each tile of keys, float32
};

// Whether blocks of keys make it beside the gradients of keys and values.
__host__ __device__ constexpr bool is_made_beside_keys(BiasGradient kind) {
  return kind != BiasGradient::kNone && kind != BiasGradient::kQueries &&
         kind != BiasGradient::kInOrder;
}

// How gradients of queries are summed over blocks of keys.
enum class QueryGradient {
  kAdded,    // in any order, by atomics
  kInTurns,  // blocks wait for each other, see OrderOfTurns
  kInOrder,  // in the order of the keys, by a launch of its own
  kWhole,    // one block has all keys
  kInParts,  // each block of keys has sums of its own, and a launch adds these in order
  kWritten,  // as kInParts, but blocks write their sums, where else they add them to zeros
};

struct AttentionBackwardParams : AttentionParams {
  Strided output, output_gradient;
  const float* lse_gradient = nullptr;  // [batches, heads, queries], or null
  float* sink_gradient = nullptr;       // [batches, heads, queries], or null

  int stages = 1;  // set by the launcher: tiles of queries in shared memory at a time

  RowOfBackward* rows_of_backward = nullptr;  // [batches, heads, queries], workspace
  // [batches, heads, pairs_of_head()], workspace of kernels that read them: whole tiles, in which
  // weights beyond the last query are 0.
  PairOfRows* pairs_of_rows = nullptr;
  __host__ __device__ int64_t pairs_of_head() const {
    return round_up(queries, kQueriesOfPairs) / 2;
  }
  __device__ int64_t pair_index(int64_t batch, int head, int query) const {
    return (batch * heads + head) * pairs_of_head() + query / 2;
  }

  // Workspaces of kAdded, kInTurns, kInParts and kWritten: sums, float32 [query_sums, batches,
  // heads, queries, head_dim], of the last two one for each tile of keys. `turns`, of kInTurns:
  // turn_count() numbers of the block that may add next.
  QueryGradient query_gradient_kind = QueryGradient::kAdded;
  int query_sums = 1;
  float* query_gradient_sum = nullptr;
  uint32_t* turns = nullptr;
  // Row workers of section s of `order` make rows of section s + sections_apart, and round dQ of
  // section s - sections_apart, in pieces of kRowsOfWorkerPiece rows: sm90/backward/row_worker.cuh.
  // Launches for rows take the first sections_apart sections, and for dQ the last. 0: there are no
  // row workers. `section_counts`: workspace, two numbers of each section.
  int sections_apart = 0;
  Divider pieces_of_head;
  uint32_t* section_counts = nullptr;
  // Workspace of a kernel that takes whole heads: sums of some of their keys, float32.
  float* query_gradient_parts = nullptr;
  Strided query_gradient, key_gradient, value_gradient;

  BiasGradient bias_gradient_kind = BiasGradient::kNone;
  // Contiguous. Of a dense one each row has bias_pitch() entries, so that it begins at a multiple
  // of 16 bytes. What follows the keys is never read.
  void* bias_gradient = nullptr;
  int64_t bias_gradient_bytes = 0;
  __host__ __device__ int64_t bias_pitch() const { return divide_up(keys, 8) * int64_t{8}; }
  float* table_gradient = nullptr;  // kDiagonals: sizes of the bias, float32, contiguous

  // kInOrder: with more than one part, workspace of bias_part_bytes() has the sums of each,
  // float32, bias_entries() of them.
  float* part_sums = nullptr;

  int64_t query_sum_bytes() const {
    return rows() * head_dim * static_cast<int64_t>(sizeof(float));
  }
  // Where a batch of the sums of a tile of keys lies: a map has one dimension for both.
  __device__ int batch_of_sums(int batch, int key_tile) const {
    return query_sums == 1 ? batch : key_tile * static_cast<int>(batches) + batch;
  }
  // Of `order`, in Hopper's backward.
  __host__ __device__ int sections() const {
    return static_cast<int>(batches * key_heads / order.section.divisor);
  }
  __host__ __device__ int64_t rows_of_launches() const {
    return sections_apart == 0
               ? rows()
               : sections_apart * order.section.divisor * heads_per_key_head.divisor * queries;
  }
  // The head and batch of query head `number` of a section.
  __device__ void place_of_head(int section, int number, int& head, int& batch) const {
    int item, member, key_head;
    heads_per_key_head.split(number, item, member);
    order.batches.split(section * static_cast<int>(order.section.divisor) + item, key_head, batch);
    head = key_head * static_cast<int>(heads_per_key_head.divisor) + member;
  }
  // Of tiles of 32 queries or more two for each: two blocks, or parts of one, may add to different
  // columns. Of tiles of 64 queries four: four warps may add 16 rows each.
  int64_t turn_count() const { return batches * heads * divide_up(queries, 64) * 4; }
  __host__ __device__ int64_t bias_entries() const {
    return bias_batches() * bias_heads() * queries * bias_pitch();
  }
  int64_t bias_part_bytes(int64_t parts) const {
    return parts > 1 ? parts * bias_entries() * static_cast<int64_t>(sizeof(float)) : 0;
  }
  __device__ float* bias_part(int64_t part) const { return part_sums + part * bias_entries(); }
  // Of sums along diagonals of tiles of so many keys, see diagonals_of.
  int64_t diagonal_bytes(int tile_keys) const {
    return batches * heads * divide_up(keys, tile_keys) * (int64_t{tile_keys} - 1 + queries) *
           static_cast<int64_t>(sizeof(float));
  }
};

// Sums along diagonals of a tile of kKeys keys, of which each tile has its own: [batches, heads,
// tiles, kKeys - 1 + queries]. Number d is that of key - first key - query = d - (queries - 1).
template <int kKeys>
__device__ float* diagonals_of(const AttentionBackwardParams& params, int batch, int head,
                               int first_key) {
  const int64_t tiles = divide_up(params.keys, kKeys), diagonals = kKeys - 1 + params.queries;
  return static_cast<float*>(params.bias_gradient) +
         ((batch * params.heads + head) * tiles + first_key / kKeys) * diagonals;
}

struct KeyRange {
  int begin, end;

  __host__ __device__ bool contains(int key) const { return key >= begin && key < end; }
  __host__ __device__ bool contains(int first, int count) const {
    return begin <= first && end >= first + count;
  }
};
// The keys that a query sees, by length and window.
__host__ __device__ inline KeyRange visible_keys(const AttentionParams& params, int query) {
  const int diagonal = query + params.keys - params.queries;
  return {params.window_left < 0 ? 0 : std::max(diagonal - params.window_left, 0),
          params.window_right < 0 ? params.keys
                                  : std::min(diagonal + params.window_right + 1, params.keys)};
}
// The tiles of keys that a tile of queries sees, by length and window.
__host__ __device__ inline KeyRange visible_tiles(const AttentionParams& params, int first_query,
                                                  int tile_queries, int tile_keys) {
  const int last_query = std::min(first_query + tile_queries, params.queries) - 1;
  const int begin = visible_keys(params, first_query).begin;
  const int end = visible_keys(params, last_query).end;
  return begin < end ? KeyRange{begin / tile_keys, divide_up(end, tile_keys)} : KeyRange{0, 0};
}
// Those of all tiles of queries.
__host__ __device__ inline int64_t count_visible_tiles(const AttentionParams& params,
                                                       int tile_queries, int tile_keys) {
  if (params.window_left < 0 && params.window_right < 0)
    return int64_t{divide_up(params.queries, tile_queries)} * divide_up(params.keys, tile_keys);
  int64_t count = 0;
  for (int query = 0; query < params.queries; query += tile_queries) {
    const KeyRange tiles = visible_tiles(params, query, tile_queries, tile_keys);
    count += tiles.end - tiles.begin;
  }
  return count;
}

}  // namespace megasoftmax
