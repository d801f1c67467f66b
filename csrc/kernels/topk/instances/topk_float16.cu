#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t topk_forward_float16(const TopkForwardParams& params, const TopkPlan& plan,
                                 cudaStream_t stream) {
  return topk_forward_instance<__half>(params, plan, stream);
}
cudaError_t topk_backward_float16(const TopkBackwardParams& params, const TopkPlan& plan,
                                  cudaStream_t stream) {
  return topk_backward_instance<__half>(params, plan, stream);
}
}  // namespace megasoftmax
