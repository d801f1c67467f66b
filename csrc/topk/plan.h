#pragma once
// Plans a launch of softmax_topk: which regime serves it, and how its rows lie over blocks. Plain
// host code.

#include <algorithm>
#include <string_view>

#include "../softmax/plan.h"
#include "params.h"

namespace megasoftmax {

// How a tile's rows lie in shared memory and over the threads of its block.
struct TopkTiles {
  int lanes;  // of a row: 1, 2, 4 ... or 32
  int log2_lanes;
  int rows_per_tile;
  int lane_vectors;                // of a lane: 1, 2, 4 or 8, or of kRouterElements
  int vectors;                     // of a row
  int log2_places;                 // for vectors, in all lanes of a row
  bool is_ragged;                  // some places are empty
  uint32_t results_of_first_lane;  // a bit for each result; lanes write results in turn
};

inline constexpr int kTopkTile = -1, kTopkRouter = -2;

struct TopkPlan {
  std::string_view name;  // of the regime, "tile" or "router"
  int regime;             // in kTopkRegimes or kTopkBackwardRegimes, kTopkTile or kTopkRouter
  int64_t vectors;        // that a row can need at most
  int threads;            // of a block
  int rows_per_block;
  int64_t blocks;
  int shared_bytes;  // of a block, besides what kernels declare themselves
  int64_t workspace_bytes;
  bool has_unit_stride;  // forward; and neither mask nor bias, but perhaps capped
  TopkTiles tiles;
  TopkSchedule schedule;
};

// Vectors of a row in memory, which may begin anywhere, or of a row that is written.
inline int64_t topk_vectors(const TopkParams& params, bool is_written) {
  const int pack_elements = 16 / size_of(params.scores.type);
  const int64_t columns = params.shape.columns;
  if (columns == 0) return 0;
  const int64_t straddling = grid_elements(columns, pack_elements) - 1 + pack_elements - 1;
  return columns % pack_elements == 0 && (is_written || params.is_contiguous)
             ? columns / pack_elements
             : (columns + straddling) / pack_elements;
}

// Vectors from one row of a tile to the next, for each of its lanes: eight neighbouring threads
// find eight different banks.
constexpr int tile_pitch(int lane_vectors) { return lane_vectors | 1; }
// Of the rows alone: lists of candidates lie behind them.
constexpr int tile_bytes(int lane_vectors) { return kTileThreads * tile_pitch(lane_vectors) * 16; }

// The length of lists of keys: 2, 4, 8 or 16, the first that holds k.
constexpr int tile_list_length(int k) {
  int length = 2;
  while (length < k) length *= 2;
  return length;
}

// How many candidates a row ranks at most. From one row to the next, candidates and the list that
// they are put into have a place more, so that rows find different banks.
constexpr int most_ranked(int list_length) { return 2 * list_length; }
constexpr int ranked_pitch(int list_length) { return most_ranked(list_length) + list_length + 1; }

// Routers have two lengths alone.
constexpr int router_list_length(int k) { return std::max(tile_list_length(k), 8); }

// least_vectors and most_vectors: of a lane. list_length and key_bytes: of its keys.
inline TopkPlan plan_topk_tiles(const TopkForwardParams& params, int vectors, int least_vectors,
                                int most_vectors, int list_length, int key_bytes) {
  TopkPlan plan = {};
  plan.name = "tile";
  plan.regime = kTopkTile;
  plan.vectors = vectors;
  plan.threads = kTileThreads;
  TopkTiles& tiles = plan.tiles;
  tiles.lanes = 1;
  while (tiles.lanes * most_vectors < vectors) tiles.lanes = 1 << ++tiles.log2_lanes;
  tiles.lane_vectors = least_vectors;
  while (tiles.lanes * tiles.lane_vectors < vectors) tiles.lane_vectors *= 2;
  while (1 << tiles.log2_places < tiles.lanes * tiles.lane_vectors) ++tiles.log2_places;
  tiles.is_ragged = 1 << tiles.log2_places != vectors;
  tiles.rows_per_tile = kTileThreads / tiles.lanes;
  tiles.vectors = vectors;
  for (int i = 0; i < kTileMaxK; i += tiles.lanes) tiles.results_of_first_lane |= 1u << i;
  const int results =
      tiles.rows_per_tile * params.k * static_cast<int>(sizeof(float) + sizeof(int));
  plan.shared_bytes = tile_bytes(tiles.lane_vectors);
  if (tiles.lanes >= kRankingLanes)
    plan.shared_bytes += tiles.rows_per_tile * ranked_pitch(list_length) * key_bytes;
  plan.shared_bytes = std::max(plan.shared_bytes, results);
  plan.rows_per_block = tiles.rows_per_tile;
  plan.blocks = divide_up<int64_t>(params.rows, tiles.rows_per_tile);
  return plan;
}

inline TopkPlan plan_topk_forward(const TopkForwardParams& params, const Device& device,
                                  int forced) {
  if (params.are_of_router()) {
    const int elements = 16 / size_of(params.scores.type), of_lane = kRouterElements / elements;
    const int of_row = static_cast<int>(params.shape.columns) / elements;
    TopkPlan plan =
        plan_topk_tiles(params, of_row, of_lane, of_lane, router_list_length(params.k), 8);
    plan.name = "router";
    plan.regime = kTopkRouter;
    return plan;
  }
  const int64_t vectors = topk_vectors(params, false), rows = params.rows;
  const bool suits_tiles = params.is_contiguous && !params.can_exclude &&
                           params.have_plain_rows() &&
                           params.shape.columns * size_of(params.scores.type) % 16 == 0;
  if (forced < 0 && suits_tiles && vectors <= kTileMaxVectors && params.k <= kTileMaxK)
    // Lanes take steps of as many logits as they sort at a time.
    return plan_topk_tiles(
        params, static_cast<int>(vectors),
        std::max(tile_list_length(params.k) * size_of(params.scores.type) / 16, 1), kMaxTileVectors,
        tile_list_length(params.k), size_of(params.scores.type) == 2 ? 4 : 8);
  TopkPlan plan = {};
  plan.has_unit_stride =
      (!params.can_exclude || params.are_capped_alone()) && params.scores.column_stride == 1;
  const auto can_serve = [&](const TopkRegime& regime) {
    return params.k <= regime.threads && (plan.has_unit_stride || regime.takes_any_row());
  };
  const auto serves = [&](const TopkRegime& regime) {
    return can_serve(regime) && vectors <= regime.max_vectors && rows >= regime.min_rows &&
           regime.blocks_per_row <= device.max_cluster &&
           (regime.blocks_per_row != kWholeGpu || rows <= device.multiprocessors);
  };
  while (!serves(kTopkRegimes[plan.regime])) ++plan.regime;
  if (forced >= 0 && can_serve(kTopkRegimes[forced])) plan.regime = forced;
  const TopkRegime& regime = kTopkRegimes[plan.regime];
  plan.name = regime.name;
  plan.vectors = vectors;
  plan.threads = regime.threads;
  plan.rows_per_block = 1;
  const int64_t segments = divide_up<int64_t>(vectors, regime.threads * regime.vectors_per_thread);
  TopkSchedule& schedule = plan.schedule;
  schedule.is_cluster = regime.blocks_per_row > 1;
  schedule.blocks_per_row = regime.blocks_per_row;
  if (regime.blocks_per_row == kWholeGpu) {
    const int64_t resident =
        int64_t{device.multiprocessors} *
        topk_blocks_per_sm_of_whole_gpu(plan.has_unit_stride, device.shared_bytes);
    schedule.blocks_per_row =
        static_cast<int>(std::clamp<int64_t>(resident / rows, 1, std::max<int64_t>(segments, 1)));
  }
  schedule.max_segments = static_cast<int>(divide_up<int64_t>(segments, schedule.blocks_per_row));
  schedule.segments_per_group = std::max(divide_up(schedule.max_segments, kMaxGroups), 1);
  schedule.queries = Divider(params.shape.queries);
  schedule.heads = Divider(params.shape.heads);
  plan.shared_bytes =
      groups_bytes(schedule.max_segments, schedule.segments_per_group, regime.threads);
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
  const int64_t vectors = topk_vectors(params, true);
  TopkPlan plan = {};
  while (vectors > kTopkBackwardRegimes[plan.regime].max_vectors) ++plan.regime;
  const TopkBackwardRegime& regime = kTopkBackwardRegimes[plan.regime];
  plan.name = regime.name;
  plan.vectors = vectors;
  plan.threads = regime.threads();
  plan.rows_per_block = regime.rows_per_block;
  plan.shared_bytes = regime.ring_bytes();
  const int64_t segments =
      divide_up<int64_t>(vectors, int64_t{regime.threads_per_row} * regime.vectors_per_thread);
  const int64_t blocks_of_rows = divide_up<int64_t>(params.rows, regime.rows_per_block);
  // A few rows are cut into more blocks, until the whole GPU has work.
  const int64_t resident = int64_t{device.multiprocessors} * regime.blocks_per_sm;
  TopkSchedule& schedule = plan.schedule;
  schedule.max_segments = static_cast<int>(
      std::clamp<int64_t>(blocks_of_rows * segments / resident, 1, regime.segments));
  schedule.blocks_per_row = static_cast<int>(divide_up<int64_t>(segments, schedule.max_segments));
  schedule.queries = Divider(params.shape.queries);
  schedule.heads = Divider(params.shape.heads);
  plan.blocks = blocks_of_rows * schedule.blocks_per_row;
  return plan;
}

}  // namespace megasoftmax
