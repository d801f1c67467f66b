#pragma once
// Shared memory of a block of Hopper's forward: where its tiles lie, and the barriers by which its
// warps wait for each other.

#include "../../../common/limits.h"
#include "../../bias.cuh"
#include "../../exclusion.cuh"
#include "../../limits.h"
#include "../../tile_of_queries.cuh"
#include "../plan.h"
#include "../ptx.cuh"

namespace megasoftmax {

// Maps of boxes of 64 columns: 64 queries, the keys of a tile, 64 queries of the bias, and of the
// output the 16 queries of a warp. A bias of HopperBias::kRows has boxes of 64 queries and all keys
// of a tile.
struct TensorMaps {
  CUtensorMap query, key, value, bias, output;
};

// A tile of queries as the block tells it its warps, and the keys that it sees by length, window
// and range: for each query; for each 64 queries the keys from the first to the last that one of
// them sees, and the keys that all of them see.
template <int kQueries>
struct AssignedTile {
  static constexpr int kGroups = kQueries / 64;

  int number;     // of the tile; negative: there is no other
  int first_key;  // of the first step; kNoKey: there is none
  TileOfQueries block;
  alignas(8) KeyRange seen[kGroups], whole[kGroups], rows[kQueries];

  // Finds the ranges of 64 queries, by the lanes of a warp.
  __device__ void find(const AttentionParams& params, const TileOfQueries& tile, int group) {
    const int lane = thread_index_anew() % 32;
    const int first_row = group * 64 + lane;
    KeyRange ranges[2];  // both on their way at a time
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = tile.first_query + first_row + 32 * half;
      ranges[half] =
          visible_keys(params, tile.batch, tile.head, max(min(query, params.queries - 1), 0));
    }
    int first = INT32_MAX, end = 0, whole_first = 0, whole_end = INT32_MAX;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = tile.first_query + first_row + 32 * half;
      const bool is_query = query >= 0 && query < params.queries;
      KeyRange& range = ranges[half];
      if (is_query && range.begin < range.end) {
        first = min(first, range.begin);
        end = max(end, range.end);
      } else {
        range = {0, 0};
      }
      if (is_query) {
        whole_first = max(whole_first, range.begin);
        whole_end = min(whole_end, range.end);
      }
      rows[first_row + 32 * half] = range;
    }
    first = smallest_of_lanes(first);
    end = largest_of_lanes(end);
    whole_first = largest_of_lanes(whole_first);
    whole_end = smallest_of_lanes(whole_end);
    if (lane == 0) {
      if (group == 0) block = tile;
      seen[group] = {first, end};
      whole[group] = {whole_first, whole_end};
    }
  }
  // The first key from `key` on in the range of some 64 queries, or INT32_MAX.
  __device__ int next(int key) const {
    int found = INT32_MAX;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const KeyRange range = seen[group];
      if (key < range.end) found = min(found, max(key, range.begin));
    }
    return found;
  }
  // The key after the last one that is seen.
  __device__ int end() const {
    int found = 0;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) found = max(found, seen[group].end);
    return found;
  }
};

// Stands for a key that is not there. It lies beyond all keys, and is a multiple of 64, as first
// keys of steps are.
inline constexpr int kNoKey = INT32_MAX / 64 * 64;
static_assert(kNoKey > kMaxPositions);

template <HopperBias kBias, int kIndex>
struct HopperMemory {
  static constexpr AttentionHopperTile kTile =
      kBias == HopperBias::kRows ? kAttentionHopperTiles[kIndex].with_rows_anywhere()
                                 : kAttentionHopperTiles[kIndex];
  static constexpr int kDim = kTile.head_dim, kValueDim = kTile.value_dim, kKeys = kTile.keys;
  static constexpr int kPanels = divide_up(kDim, 64), kValuePanels = divide_up(kValueDim, 64);
  static constexpr int kWarpgroups = kTile.warpgroups, kQueries = kTile.queries();
  static constexpr int kThreads = kTile.threads(), kStages = 2;
  static_assert(shares_registers(kTile));
  static_assert(takes_bias(kTile, kBias));
  static_assert(kDim % 16 == 0 && kValueDim % 16 == 0 && kQueries % kMaskTile == 0);
  static_assert(kKeys == kMaskTile || kKeys == 2 * kMaskTile);

  // In this order: queries of each stage and warpgroup, whose place later has their results; keys
  // of each stage; values of each stage; rows of a mask or a bias of keys of each stage, and ones;
  // the bias of each stage and warpgroup, or the table of each stage; barriers; assigned tiles;
  // steps.
  static constexpr int kPanelBytes = kKeys * 128, kQueryPanelBytes = 64 * 128;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kKeyBytes = kPanels * kPanelBytes;
  static constexpr int kValueBytes = kValuePanels * kPanelBytes;
  static constexpr int kQueryStages = kTile.query_stages;
  static constexpr int kKeysAt = kQueryStages * kWarpgroups * kQueryBytes;
  static constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
  static_assert(kValuePanels <= kPanels);  // results have the place of queries
  // The step of a product with a mask or a bias of keys: columns of ones times rows of keys, see
  // RowsOfKeys. The rows are the first of 16, in panels of 64 keys, the columns the first of 16.
  // The rows of the ones are alike, so 8 of them are there.
  static constexpr bool kHasMasked = takes_key_mask(kTile, kBias);
  static constexpr int kMaskedPanelBytes = 16 * 128, kOnesBytes = 8 * 128;
  static constexpr int kMaskedBytes = kKeys / 64 * kMaskedPanelBytes;
  static constexpr int kMaskedAt = kValuesAt + kStages * kValueBytes;
  static constexpr int kOnesAt = kMaskedAt + kStages * kMaskedBytes;
  static constexpr int kBiasAt = kHasMasked ? kOnesAt + kOnesBytes : kMaskedAt;
  using Diagonals = DiagonalTile<false, kQueries, kKeys>;
  static constexpr bool kIsTable = kBias == HopperBias::kTable;
  static constexpr bool kIsRows = kBias == HopperBias::kRows;
  static constexpr int kBiasStages = is_dense(kBias) ? kTile.bias_stages : kStages;
  static constexpr int kBiasSharers = kIsTable ? kWarpgroups : 1;  // warpgroups with one tile of it
  static constexpr int kBiasPanelBytes = 64 * 128;
  static constexpr int kBiasRowBytes = RowsAnywhere::row_bytes(kKeys);
  static constexpr int kBiasBytes = kIsTable  ? Diagonals::kBytes
                                    : kIsRows ? 64 * kBiasRowBytes
                                              : kKeys / 64 * kBiasPanelBytes;
  static_assert(!kIsRows || kBiasBytes % 128 == 0);
  static constexpr int kBiasTilesOfStage = kWarpgroups / kBiasSharers;
  static constexpr int kBiasTiles = !is_bias(kBias) ? 0 : kBiasStages * kBiasTilesOfStage;
  // Behind the tiles of HopperBias::kRows: a row of zeros, for queries beyond the last one.
  static constexpr int kZerosAt = kBiasAt + kBiasTiles * kBiasBytes;
  static constexpr int kBarriersAt = kZerosAt + (kIsRows ? kBiasRowBytes : 0);
  static constexpr int kBiasBarrier = 5 + 4 * kStages;
  using Assignment = AssignedTile<kQueries>;  // two, in turn
  static constexpr int kAssignmentsAt = kBarriersAt + 8 * (kBiasBarrier + 2 * kBiasTiles);
  static constexpr int kStepsAt = kAssignmentsAt + 2 * static_cast<int>(sizeof(Assignment));
  static constexpr int kBytes = kStepsAt + kStages * static_cast<int>(sizeof(int));
  static_assert(kBytes <= least_shared_bytes(kHopperMajor, kHopperMajor));

  // Warps beside the copying warp: those that fill in entries of a table, and those that find what
  // queries see, unless a launch is unmasked. With HopperMask::kKeys the first one writes rows of
  // keys.
  static constexpr int kFillers = 3;
  static constexpr int kFinders = kIsTable ? kFillers : kWarpgroups;

  uint32_t address;

  __device__ static int bias_tile(int stage, int warpgroup) {
    return stage * kBiasTilesOfStage + warpgroup / kBiasSharers;
  }
  __device__ static Diagonals diagonals(char* memory, int stage) {
    return {reinterpret_cast<float*>(memory + kBiasAt + stage * kBiasBytes)};
  }
  __device__ static Assignment& assignment(char* memory, int number) {
    return reinterpret_cast<Assignment*>(memory + kAssignmentsAt)[number % 2];
  }
  // What a step of a stage's keys is told: the key of the next step, and whether a mask excludes
  // some keys, see FollowedTiles; or whether a bias of keys is large, see RowsOfKeys.
  __device__ static int& step(char* memory, int stage) {
    return reinterpret_cast<int*>(memory + kStepsAt)[stage];
  }
  __device__ static int queries_at(int number, int warpgroup) {
    return (number % kQueryStages * kWarpgroups + warpgroup) * kQueryBytes;
  }
  __device__ uint32_t queries(int number, int warpgroup) const {
    return address + queries_at(number, warpgroup);
  }
  __device__ uint32_t keys(int stage) const { return address + kKeysAt + stage * kKeyBytes; }
  __device__ uint32_t values(int stage) const { return address + kValuesAt + stage * kValueBytes; }
  __device__ uint32_t masked(int stage) const { return address + kMaskedAt + stage * kMaskedBytes; }
  __device__ uint32_t ones() const { return address + kOnesAt; }
  __device__ uint32_t bias(int stage, int warpgroup) const {
    return address + kBiasAt + bias_tile(stage, warpgroup) * kBiasBytes;
  }
  __device__ uint32_t zeros() const { return address + kZerosAt; }
  __device__ Barrier barrier(int index) const { return {address + kBarriersAt + 8 * index}; }
  __device__ Barrier queries_are_there() const { return barrier(0); }
  __device__ Barrier queries_are_used() const { return barrier(1); }
  __device__ Barrier keys_are_there(int stage) const { return barrier(2 + stage); }
  __device__ Barrier values_are_there(int stage) const { return barrier(2 + kStages + stage); }
  __device__ Barrier keys_are_used(int stage) const { return barrier(2 + 2 * kStages + stage); }
  __device__ Barrier values_are_used(int stage) const { return barrier(2 + 3 * kStages + stage); }
  __device__ Barrier tile_is_assigned() const { return barrier(2 + 4 * kStages); }
  __device__ Barrier ranges_are_there() const { return barrier(3 + 4 * kStages); }
  __device__ Barrier tile_is_done() const { return barrier(4 + 4 * kStages); }
  __device__ Barrier bias_is_there(int stage, int warpgroup) const {
    return barrier(kBiasBarrier + 2 * bias_tile(stage, warpgroup));
  }
  __device__ Barrier bias_is_used(int stage, int warpgroup) const {
    return barrier(kBiasBarrier + 2 * bias_tile(stage, warpgroup) + 1);
  }
  // A warp calls this before it arrives at tile_is_done for a tile, counted within the block.
  // Without it, a fast warp could arrive twice in one phase, in place of a slow warp. Then the next
  // tile would be assigned while the slow warp still reads the assignment of this one.
  __device__ void wait_until_tile_before_is_done(int tile) const {
    tile_is_done().wait((tile & 1) ^ 1);
  }
  // Called by one thread before others use the barriers.
  __device__ void init_barriers(bool is_unmasked, bool masks_keys) const {
    tile_is_assigned().init(1);
    ranges_are_there().init(kFinders);
    queries_are_there().init(is_unmasked ? 1 : 2);  // and what is assigned is known
    queries_are_used().init(4 * kWarpgroups);
    // The copying warp arrives too, once it knows the next tile.
    tile_is_done().init(1 + 4 * kWarpgroups + (kIsTable ? kFillers : 0));
    for (int stage = 0; stage < kStages; ++stage) {
      keys_are_there(stage).init(masks_keys ? 2 : 1);  // and rows of keys are written
      values_are_there(stage).init(1);
      keys_are_used(stage).init(4 * kWarpgroups);
      values_are_used(stage).init(4 * kWarpgroups);
    }
    for (int i = 0; i < kBiasTiles; ++i) {
      barrier(kBiasBarrier + 2 * i).init(kIsTable ? kFillers : 1);
      barrier(kBiasBarrier + 2 * i + 1).init(4 * kBiasSharers);
    }
    publish_barriers();
  }
};

}  // namespace megasoftmax
