// How softmax_topk would run on contiguous logits. megasoftmax/explain/topk.py asks this of the
// compiled part, or of this file compiled without CUDA. It has the same members in the same order.

#include "plan.h"

namespace megasoftmax {

struct TopkCall {
  int64_t rows, columns, k;
  int64_t element_bytes;
  int64_t is_masked, is_backward;
  int64_t multiprocessors, shared_bytes, max_cluster;  // of the device
};

struct TopkExplanation {
  char name[16];   // of the regime; "tile" for short rows in tiles
  int64_t chunks;  // the most that a row can need
  int64_t threads, blocks;
  int64_t rows_per_block, blocks_per_row;
  int64_t shared_bytes, workspace_bytes;
};

namespace {

template <class Regime>
void fill(const Regime& regime, TopkExplanation& found) {
  for (int i = 0; i < 16; ++i) found.name[i] = regime.name[i];
}

template <class Params>
Params params_of(const TopkCall& call) {
  Params params;
  params.shape = Shape{1, 1, call.rows, call.columns};
  params.rows = call.rows;
  params.k = static_cast<int>(call.k);
  params.scores.type = call.element_bytes == 4 ? DType::kFloat32 : DType::kFloat16;
  params.scores.column_stride = 1;
  params.scores.query_stride = call.columns;
  params.is_contiguous = true;
  params.can_exclude = call.is_masked != 0;
  return params;
}

}  // namespace
}  // namespace megasoftmax

extern "C" __attribute__((visibility("default"))) void megasoftmax_explain_topk(
    const megasoftmax::TopkCall* call, megasoftmax::TopkExplanation* explanation) {
  using namespace megasoftmax;
  TopkExplanation& found = *explanation;
  found = {};
  const Device device{.multiprocessors = static_cast<int>(call->multiprocessors),
                      .shared_bytes = static_cast<int>(call->shared_bytes),
                      .max_cluster = static_cast<int>(call->max_cluster)};
  TopkPlan plan = {};
  if (call->is_backward != 0) {
    const auto params = params_of<TopkBackwardParams>(*call);
    plan = plan_topk_backward(params, device);
    const TopkBackwardRegime& regime = kTopkBackwardRegimes[plan.regime];
    fill(regime, found);
    found.chunks = topk_chunks(params, true);
    found.threads = regime.threads();
    found.rows_per_block = regime.rows_per_block;
    found.shared_bytes = regime.ring_bytes();
  } else {
    const auto params = params_of<TopkForwardParams>(*call);
    plan = plan_topk_forward(params, device, -1);
    found.chunks = topk_chunks(params, false);
    found.shared_bytes = plan.shared_bytes;
    found.threads = kTileThreads;
    found.rows_per_block = 1;
    if (plan.regime == kTopkTile) {
      fill(TopkRegime{"tile", 0, 0, 0, 0, 0, 0}, found);
      found.rows_per_block = plan.tiles.rows_per_tile;
    } else {
      fill(kTopkRegimes[plan.regime], found);
      found.threads = kTopkRegimes[plan.regime].threads;
    }
  }
  found.blocks = plan.blocks;
  found.blocks_per_row = plan.regime == kTopkTile ? 1 : plan.schedule.blocks_per_row;
  found.workspace_bytes = plan.workspace_bytes;
}
