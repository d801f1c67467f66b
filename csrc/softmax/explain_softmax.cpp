// How a launch on contiguous tensors would run. megasoftmax/explain/softmax.py asks the compiled
// part, or this file compiled without CUDA.

#include "../common/named.h"
#include "plan.h"
#include "tuning.h"

namespace megasoftmax {
namespace {

// A tensor as a plan sees it. It is aligned, and nothing is read.
Strided contiguous_tensor(const Shape& shape, int64_t element_bytes) {
  Strided tensor = contiguous(shape.heads, shape.queries, shape.columns);
  tensor.data = reinterpret_cast<const void*>(uintptr_t{16});
  tensor.type = element_bytes == 4 ? DType::kFloat32 : DType::kFloat16;
  return tensor;
}

template <class Params>
Params params_of(const NamedIntegers& call) {
  Params params;
  const int64_t queries = call["queries"];
  params.shape = {1, call["rows"] / queries, queries, call["columns"]};
  params.window = {call["left"], call["right"]};
  static const int64_t seed = 0;
  if (call["has_dropout"] != 0) params.dropout.seed = &seed;
  if (call["has_softcap"] != 0) params.softcap = Softcap(1, 1);
  return params;
}

template <class Add>
void add_plan(const Plan& plan, RowRegimes regimes, const Window& window, const Shape& shape,
              const Device& device, Add&& add) {
  const RowRegime& regime = regimes[plan.regime];
  const int64_t heads = plan.owners.batches * plan.owners.heads;
  const bool has_segments = plan.schedule.max_segments > 0;
  add("kind", static_cast<int>(plan.kind));
  add("visible_columns", visible_columns(shape, window));
  add("vectors", plan.vectors);
  add("regime", plan.regime);
  add("blocks_per_row", plan.schedule.blocks_per_row);
  add("rows_at_a_time", plan.schedule.owners);
  add("segments", plan.schedule.max_segments);
  add("warp_tiles_per_segment", has_segments ? plan.schedule.warp_tiles_per_segment : 0);
  add("threads", plan.threads);
  add("blocks",
      regime.is_persistent ? 0 : heads * plan.blocks_per_head * plan.schedule.blocks_per_row);
  add("shared_bytes", plan.shared_bytes);
  add("workspace_bytes", plan.workspace_bytes);
  // Of each regime before it: bits of Obstacle
  for (int i = 0; i < plan.regime; ++i)
    add("obstacles", obstacles_of(regimes[i], plan.vectors, plan.owners.rows(), plan.requested,
                                  plan.vector_bytes, device));
}

}  // namespace
}  // namespace megasoftmax

// `text`: the numbers that megasoftmax/explain/softmax.py names. Returns lines as `add_plan` adds
// them. A plan without a regime's threads is that of a tile, whose launcher sizes blocks and grid.
extern "C" __attribute__((visibility("default"))) const char* megasoftmax_softmax_plan(
    const char* text) {
  using namespace megasoftmax;
  const NamedIntegers call(text);
  const Device device{.multiprocessors = static_cast<int>(call["multiprocessors"]),
                      .shared_bytes = static_cast<int>(call["shared_bytes"]),
                      .max_cluster = static_cast<int>(call["max_cluster"])};
  const auto regimes_of = [&](const RowTable& table) {
    return call["is_tuned"] != 0 ? table.regimes() : table.built_in();
  };
  return named_lines([&](auto&& add) {
    if (call["is_backward"] == 0) {
      auto params = params_of<ForwardParams>(call);
      const Shape shape = params.shape;
      params.scores = contiguous_tensor(shape, call["element_bytes"]);
      if (call["is_masked"] != 0) params.mask = params.scores;
      prepare(params);
      const RowRegimes regimes = regimes_of(forward_table);
      add_plan(plan_forward(params, regimes, device, -1), regimes, params.window, shape, device,
               add);
    } else {
      auto params = params_of<BackwardParams>(call);
      const Shape shape = params.shape;
      params.gradient = params.probabilities = contiguous_tensor(shape, call["element_bytes"]);
      params.has_bias_gradient = call["has_bias_gradient"] != 0;
      params.bias_shape = shape;
      prepare(params);
      const RowRegimes regimes = regimes_of(backward_table);
      add_plan(plan_backward(params, regimes, device, -1), regimes, params.window, shape, device,
               add);
    }
  });
}

// The fewest rows of each regime, for all launches of the process; `count` 0: those of limits.h.
// Returns 1, or 0 where they may change bits and were not taken. megasoftmax/build/tuned.py calls
// it.
extern "C" __attribute__((visibility("default"))) int megasoftmax_set_min_rows(int is_backward,
                                                                               const int* min_rows,
                                                                               int count) {
  using namespace megasoftmax;
  RowTable& table = is_backward != 0 ? backward_table : forward_table;
  return table.replace({min_rows, static_cast<size_t>(count)});
}
