// Prepares a launch, plans it, and selects the instance by element type.

#include "../common/device.h"
#include "../softmax/softmax.h"
#include "instances/instances.h"
#include "topk.h"

namespace megasoftmax {

namespace {
int forced_regime = -1;

bool check_and_prepare(TopkParams& params) {
  if (!fits_indices(params.shape, Window{}) || params.k < 0 || params.k > kMaxK) return false;
  prepare(params);
  return true;
}

TopkPlan plan_at_hand(const TopkForwardParams& params, cudaStream_t stream) {
  return plan_for(stream, [&](const Device& device) {
    return plan_topk_forward(params, device, forced_regime);
  });
}
}  // namespace

int64_t topk_forward_workspace(TopkForwardParams params, cudaStream_t stream) {
  if (params.shape.rows() == 0 || !check_and_prepare(params)) return 0;
  return plan_at_hand(params, stream).workspace_bytes;
}

cudaError_t topk_forward(TopkForwardParams params, cudaStream_t stream) {
  if (params.shape.rows() == 0) return cudaSuccess;
  if (!check_and_prepare(params) || params.k > params.shape.columns) return cudaErrorInvalidValue;
  const TopkPlan plan = plan_at_hand(params, stream);
  return with_dtype(params.scores.type, [&](auto tag) {
    return topk_forward_instance<decltype(tag)>(params, plan, stream);
  });
}

cudaError_t topk_backward(TopkBackwardParams params, cudaStream_t stream) {
  if (params.shape.rows() == 0 || params.shape.columns == 0) return cudaSuccess;
  if (!check_and_prepare(params)) return cudaErrorInvalidValue;
  const TopkPlan plan = plan_topk_backward(params, current_device());
  return with_dtype(params.scores.type, [&](auto tag) {
    return topk_backward_instance<decltype(tag)>(params, plan, stream);
  });
}

void force_topk_regime(int regime) { forced_regime = regime; }

}  // namespace megasoftmax
