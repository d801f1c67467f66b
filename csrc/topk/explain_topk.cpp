// How softmax_topk would run on contiguous logits. megasoftmax/explain/topk.py asks the compiled
// part, or this file compiled without CUDA.

#include "../common/named.h"
#include "plan.h"

namespace megasoftmax {
namespace {

template <class Params>
Params params_of(const NamedIntegers& call) {
  Params params;
  params.shape = {1, 1, call["rows"], call["columns"]};
  params.k = static_cast<int>(call["k"]);
  params.scores = contiguous(1, call["rows"], call["columns"]);
  params.scores.type = call["element_bytes"] == 4 ? DType::kFloat32 : DType::kFloat16;
  if (call["is_masked"] != 0) params.mask.data = &params.mask;  // any address: nothing is read
  if (call["has_softcap"] != 0) params.softcap = Softcap(1, 1);
  params.sigmoid = call["is_of_router"] != 0;
  prepare(params);
  return params;
}

TopkForwardParams forward_params_of(const NamedIntegers& call) {
  auto params = params_of<TopkForwardParams>(call);
  params.limits.are_given = call["has_limits"] != 0;
  return params;
}

}  // namespace
}  // namespace megasoftmax

// `text`: the numbers that megasoftmax/explain/topk.py names.
extern "C" __attribute__((visibility("default"))) const char* megasoftmax_topk_plan(
    const char* text) {
  using namespace megasoftmax;
  const NamedIntegers call(text);
  const Device device{.multiprocessors = static_cast<int>(call["multiprocessors"]),
                      .shared_bytes = static_cast<int>(call["shared_bytes"]),
                      .max_cluster = static_cast<int>(call["max_cluster"])};
  const TopkPlan plan = call["is_backward"] != 0
                            ? plan_topk_backward(params_of<TopkBackwardParams>(call), device)
                            : plan_topk_forward(forward_params_of(call), device, -1);
  return named_lines([&](auto&& add) {
    add("regime", plan.name);
    add("vectors", plan.vectors);
    add("threads", plan.threads);
    add("rows_per_block", plan.rows_per_block);
    add("blocks_per_row", plan.schedule.blocks_per_row);
    add("blocks", plan.blocks);
    add("shared_bytes", plan.shared_bytes);
    add("workspace_bytes", plan.workspace_bytes);
  });
}
