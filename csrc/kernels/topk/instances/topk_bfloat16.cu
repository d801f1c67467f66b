#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t topk_forward_bfloat16(const TopkForwardParams& params, const TopkPlan& plan,
                                  cudaStream_t stream) {
  return topk_forward_instance<__nv_bfloat16>(params, plan, stream);
}
cudaError_t topk_backward_bfloat16(const TopkBackwardParams& params, const TopkPlan& plan,
                                   cudaStream_t stream) {
  return topk_backward_instance<__nv_bfloat16>(params, plan, stream);
}
}  // namespace megasoftmax
