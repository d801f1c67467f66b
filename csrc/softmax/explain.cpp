// How a launch on contiguous tensors would run. megasoftmax/explain/softmax.py asks this of the
// compiled part, or of this file compiled without CUDA. It has the same members in the same order.

#include "plan.h"

namespace megasoftmax {

struct Call {
  int64_t rows, columns;
  int64_t queries;      // of each head; a divisor of the rows
  int64_t left, right;  // of the window, -1: no limit
  int64_t element_bytes;
  int64_t is_masked, is_backward;
  int64_t has_bias_gradient;  // of a bias that no rows share
  int64_t has_dropout;
  int64_t multiprocessors, shared_bytes, max_cluster;  // of the device
};

struct Explanation {
  int64_t kind;             // one of Rows
  int64_t visible_columns;  // of the widest row
  int64_t chunks;           // the most that a row can need
  int64_t regime;           // row of the table in limits.h
  int64_t blocks_per_row;
  int64_t rows_at_a_time;       // over the whole GPU; 0 for other rows
  int64_t units, unit_batches;  // of the widest row; 0 for rows without units
  int64_t threads;              // of a block; 0 for tiles, whose launcher sizes blocks and grid
  int64_t blocks;  // of the grid; 0 for tiles, and where as many as run at a time take turns
  int64_t shared_bytes, workspace_bytes;
};

namespace {

// A tensor that is there, as a plan sees it.
Strided contiguous(const Shape& shape, int64_t element_bytes) {
  Strided tensor;
  tensor.data = &kLongRow;  // any address: nothing is read
  tensor.type = element_bytes == 4 ? DType::kFloat32 : DType::kFloat16;
  tensor.column_stride = 1;
  tensor.query_stride = shape.columns;
  tensor.head_stride = shape.queries * shape.columns;
  return tensor;
}

template <int kCount>
void fill(const RowRegime (&table)[kCount], const Plan& plan, const Call& call,
          const Device& device, const Shape& shape, Explanation& explanation, int64_t* obstacles) {
  for (int i = 0; i < plan.regime; ++i)
    obstacles[i] =
        obstacles_of(table[i], plan.chunks, call.rows, plan.asked, plan.chunk_bytes, device);
  const RowRegime& regime = table[plan.regime];
  explanation.kind = plan.kind;
  explanation.chunks = plan.chunks;
  explanation.regime = plan.regime;
  explanation.blocks_per_row = plan.schedule.blocks_per_row;
  explanation.rows_at_a_time = plan.schedule.owners;
  explanation.units = plan.schedule.max_units;
  explanation.unit_batches = plan.shared_bytes == 0 ? 0 : plan.schedule.unit_batches;
  explanation.shared_bytes = plan.shared_bytes;
  explanation.workspace_bytes = plan.workspace_bytes;
  if (regime.storage == Storage::kTile) return;
  explanation.threads = threads_of(regime, plan.schedule);
  if (!regime.takes_turns)
    explanation.blocks = shape.batches * shape.heads *
                         blocks_of_queries(regime.shape(), plan.kind, shape.queries) *
                         explanation.blocks_per_row;
}

}  // namespace
}  // namespace megasoftmax

// `obstacles`: bits for each row of the table before the regime, see limits.h.
extern "C" __attribute__((visibility("default"))) void megasoftmax_explain(
    const megasoftmax::Call* call_of_user, megasoftmax::Explanation* explanation,
    int64_t* obstacles) {
  using namespace megasoftmax;
  const Call& call = *call_of_user;
  *explanation = {};
  const Device device{.multiprocessors = static_cast<int>(call.multiprocessors),
                      .shared_bytes = static_cast<int>(call.shared_bytes),
                      .max_cluster = static_cast<int>(call.max_cluster)};
  Shape shape{1, call.rows / call.queries, call.queries, call.columns};
  Strided tensor = contiguous(shape, call.element_bytes);
  Window window{call.left, call.right};
  Dropout dropout;
  if (call.has_dropout != 0) dropout.seed = &kLongRow;  // any address
  drop_idle_limits(window, shape);
  explanation->visible_columns = visible_columns(shape, window);
  if (call.has_bias_gradient == 0)
    merge_dimensions(shape, window, VisibleRanges{}, SinkLogit{}, dropout, {&tensor});
  if (call.is_backward == 0) {
    ForwardParams params;
    params.shape = shape;
    params.scores = tensor;
    params.window = window;
    params.dropout = dropout;
    params.is_limited = window.is_limited();
    params.is_contiguous = true;
    if (call.is_masked != 0) params.mask = tensor;
    fill(kForwardRegimes, plan_forward(params, device, -1), call, device, shape, *explanation,
         obstacles);
  } else {
    BackwardParams params;
    params.shape = params.bias_shape = shape;
    params.gradient = params.probabilities = tensor;
    params.window = window;
    params.dropout = dropout;
    params.is_limited = window.is_limited();
    params.is_contiguous = true;
    if (call.has_bias_gradient != 0) params.bias_gradient = &params;
    fill(kBackwardRegimes, plan_backward(params, device, -1), call, device, shape, *explanation,
         obstacles);
  }
}
