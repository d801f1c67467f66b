#pragma once
// Which regime of softmax_topk serves a launch, and how rows lie over its blocks. Plain host code.

#include <algorithm>

#include "../softmax/plan.h"
#include "params.h"

namespace megasoftmax {

struct TopkPlan {
  int regime;
  Schedule schedule;
  int shared_bytes;
  int64_t workspace_bytes, blocks;
};

inline int64_t topk_chunks(const TopkParams& params) {
  const int pack_elements = 16 / size_of(params.scores.type);
  return max_visible_chunks(params.shape.columns, params.shape.columns, pack_elements);
}

inline TopkPlan plan_topk_forward(const TopkForwardParams& params, const Device& device,
                                  int forced) {
  const int64_t chunks = topk_chunks(params), rows = params.rows;
  TopkPlan plan = {};
  plan.regime = forced;
  for (int i = 0; plan.regime < 0; ++i) {
    const TopkRegime& regime = kTopkRegimes[i];
    if (chunks <= regime.max_chunks && rows >= regime.min_rows &&
        regime.blocks_per_row <= device.max_cluster)
      plan.regime = i;
  }
  const TopkRegime& regime = kTopkRegimes[plan.regime];
  const int64_t units = divide_up<int64_t>(chunks, regime.threads * kUnitChunks);
  Schedule& schedule = plan.schedule;
  schedule.is_cluster = regime.blocks_per_row > 1;
  schedule.blocks_per_row = regime.blocks_per_row;
  if (regime.blocks_per_row == kTopkWholeGpu) {
    const int64_t resident = int64_t{device.multiprocessors} * kTopkWholeGpuBlocksPerSm;
    schedule.blocks_per_row = static_cast<int>(std::clamp<int64_t>(resident / rows, 1, units));
  }
  schedule.max_units = static_cast<int>(divide_up<int64_t>(units, schedule.blocks_per_row));
  schedule.unit_batches = divide_up(schedule.max_units, kMaxGroups);
  schedule.queries = Divider(params.shape.queries);
  schedule.heads = Divider(params.shape.heads);
  plan.shared_bytes = divide_up(schedule.max_units, schedule.unit_batches) * regime.threads *
                      static_cast<int>(sizeof(float));
  if (regime.blocks_per_row != 1)
    plan.workspace_bytes = rows * schedule.blocks_per_row * 8 * (1 + params.k);
  plan.blocks = std::min<int64_t>(rows, INT32_MAX / schedule.blocks_per_row) *
                schedule.blocks_per_row;
  return plan;
}

inline TopkPlan plan_topk_backward(const TopkBackwardParams& params) {
  const int64_t chunks = topk_chunks(params);
  TopkPlan plan = {};
  while (chunks > kTopkBackwardRegimes[plan.regime].max_chunks) ++plan.regime;
  const TopkBackwardRegime& regime = kTopkBackwardRegimes[plan.regime];
  const int64_t chunks_per_block =
      int64_t{regime.units} * regime.threads_per_row * kUnitChunks;
  Schedule& schedule = plan.schedule;
  schedule.blocks_per_row = static_cast<int>(divide_up(chunks, chunks_per_block));
  schedule.queries = Divider(params.shape.queries);
  schedule.heads = Divider(params.shape.heads);
  plan.blocks = divide_up<int64_t>(params.rows, regime.rows_per_block) * schedule.blocks_per_row;
  return plan;
}

}  // namespace megasoftmax
