#pragma once
// Which regime of softmax_topk serves a launch, and how rows lie over its blocks. Plain host code.

#include <algorithm>

#include "../softmax/plan.h"
#include "params.h"

namespace megasoftmax {

// How a tile's rows lie in shared memory and over the threads of its block.
struct TopkTiles {
  int lanes;  // of a row: 1, 2, 4 ... or 32
  int log2_lanes;
  int rows_per_tile;
  int lane_chunks;                 // of a lane: 1, 2, 4 or 8
  int chunks;                      // of a row
  int log2_places;                 // of chunks, in all lanes of a row
  bool is_ragged;                  // not all are taken
  uint32_t results_of_first_lane;  // a bit for each: lanes write them in turn
};

struct TopkPlan {
  int regime;  // a row of kTopkRegimes, or kTopkTile
  TopkTiles tiles;
  Schedule schedule;
  bool has_unit_stride;  // forward: and neither mask nor bias
  int shared_bytes;
  int64_t workspace_bytes, blocks;
};

// Of the row in memory, forward, which may begin anywhere, or of the row that is written.
inline int64_t topk_chunks(const TopkParams& params, bool is_written) {
  const int pack_elements = 16 / size_of(params.scores.type);
  const int64_t columns = params.shape.columns;
  if (columns == 0) return 0;
  const int64_t straddling = grid_elements(columns, pack_elements) - 1 + pack_elements - 1;
  return columns % pack_elements == 0 && (is_written || params.is_contiguous)
             ? columns / pack_elements
             : (columns + straddling) / pack_elements;
}

inline constexpr int kTopkTile = -1;

// From one row to the next, in chunks and for each of its lanes: eight neighbouring threads find
// eight different banks.
constexpr int tile_pitch(int lane_chunks) { return lane_chunks | 1; }

// Lists of keys are as long as k or the next longer of 2, 4, 8 and 16.
constexpr int tile_list_length(int k) {
  int length = 2;
  while (length < k) length *= 2;
  return length;
}

inline TopkPlan plan_topk_tiles(const TopkForwardParams& params, int chunks) {
  TopkPlan plan = {};
  plan.regime = kTopkTile;
  TopkTiles& tiles = plan.tiles;
  tiles.lanes = 1;
  while (tiles.lanes * kMaxTileChunks < chunks) tiles.lanes = 1 << ++tiles.log2_lanes;
  // Lanes take steps of so many logits as they sort at a time.
  const int step = std::max(tile_list_length(params.k) * size_of(params.scores.type) / 16, 1);
  tiles.lane_chunks = step;
  while (tiles.lanes * tiles.lane_chunks < chunks) tiles.lane_chunks *= 2;
  while (1 << tiles.log2_places < tiles.lanes * tiles.lane_chunks) ++tiles.log2_places;
  tiles.is_ragged = 1 << tiles.log2_places != chunks;
  tiles.rows_per_tile = kTileThreads / tiles.lanes;
  tiles.chunks = chunks;
  for (int i = 0; i < kTileMaxK; i += tiles.lanes) tiles.results_of_first_lane |= 1u << i;
  const int results =
      tiles.rows_per_tile * params.k * static_cast<int>(sizeof(float) + sizeof(int));
  plan.shared_bytes = std::max(kTileThreads * tile_pitch(tiles.lane_chunks) * 16, results);
  plan.blocks = divide_up<int64_t>(params.rows, tiles.rows_per_tile);
  return plan;
}

inline TopkPlan plan_topk_forward(const TopkForwardParams& params, const Device& device,
                                  int forced) {
  const int64_t chunks = topk_chunks(params, false), rows = params.rows;
  const bool suits_tiles = params.is_contiguous && !params.can_exclude &&
                           params.shape.columns * size_of(params.scores.type) % 16 == 0;
  if (forced < 0 && suits_tiles && chunks <= kTileMaxChunks && params.k <= kTileMaxK)
    return plan_topk_tiles(params, static_cast<int>(chunks));
  TopkPlan plan = {};
  plan.has_unit_stride = !params.can_exclude && params.scores.column_stride == 1;
  const auto can_serve = [&](const TopkRegime& regime) {
    return params.k <= regime.threads && (plan.has_unit_stride || regime.takes_any_row());
  };
  const auto serves = [&](const TopkRegime& regime) {
    return can_serve(regime) && chunks <= regime.max_chunks && rows >= regime.min_rows &&
           regime.blocks_per_row <= device.max_cluster &&
           (regime.blocks_per_row != kWholeGpu || rows <= device.multiprocessors);
  };
  while (!serves(kTopkRegimes[plan.regime])) ++plan.regime;
  if (forced >= 0 && can_serve(kTopkRegimes[forced])) plan.regime = forced;
  const TopkRegime& regime = kTopkRegimes[plan.regime];
  const int64_t units = divide_up<int64_t>(chunks, regime.threads * regime.chunks_per_thread);
  Schedule& schedule = plan.schedule;
  schedule.is_cluster = regime.blocks_per_row > 1;
  schedule.blocks_per_row = regime.blocks_per_row;
  if (regime.blocks_per_row == kWholeGpu) {
    const int64_t resident =
        int64_t{device.multiprocessors} *
        topk_blocks_per_sm_of_whole_gpu(plan.has_unit_stride, device.shared_bytes);
    schedule.blocks_per_row =
        static_cast<int>(std::clamp<int64_t>(resident / rows, 1, std::max<int64_t>(units, 1)));
  }
  schedule.max_units = static_cast<int>(divide_up<int64_t>(units, schedule.blocks_per_row));
  schedule.unit_batches = std::max(divide_up(schedule.max_units, kMaxGroups), 1);
  schedule.queries = Divider(params.shape.queries);
  schedule.heads = Divider(params.shape.heads);
  plan.shared_bytes = groups_bytes(schedule.max_units, schedule.unit_batches, regime.threads);
  const int64_t partials_bytes = schedule.blocks_per_row * partial_bytes(params.k);
  if (schedule.is_cluster) {
    plan.shared_bytes += static_cast<int>(partials_bytes);
  } else if (regime.blocks_per_row != 1) {
    plan.workspace_bytes = rows * partials_bytes;
  }
  plan.blocks =
      std::min<int64_t>(rows, INT32_MAX / schedule.blocks_per_row) * schedule.blocks_per_row;
  return plan;
}

inline TopkPlan plan_topk_backward(const TopkBackwardParams& params, const Device& device) {
  const int64_t chunks = topk_chunks(params, true);
  TopkPlan plan = {};
  while (chunks > kTopkBackwardRegimes[plan.regime].max_chunks) ++plan.regime;
  const TopkBackwardRegime& regime = kTopkBackwardRegimes[plan.regime];
  const int64_t units =
      divide_up<int64_t>(chunks, int64_t{regime.threads_per_row} * regime.chunks_per_thread);
  const int64_t blocks_of_rows = divide_up<int64_t>(params.rows, regime.rows_per_block);
  // Few rows are cut into more blocks, until all of the GPU has work.
  const int64_t resident = int64_t{device.multiprocessors} * regime.blocks_per_sm;
  Schedule& schedule = plan.schedule;
  schedule.max_units =
      static_cast<int>(std::clamp<int64_t>(blocks_of_rows * units / resident, 1, regime.units));
  schedule.blocks_per_row = static_cast<int>(divide_up<int64_t>(units, schedule.max_units));
  schedule.queries = Divider(params.shape.queries);
  schedule.heads = Divider(params.shape.heads);
  plan.blocks = blocks_of_rows * schedule.blocks_per_row;
  return plan;
}

}  // namespace megasoftmax
