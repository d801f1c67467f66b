#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t softmax_forward_bfloat16(const ForwardParams& params, const Plan& plan,
                                     cudaStream_t stream) {
  return softmax_forward_instance<__nv_bfloat16>(params, plan, stream);
}
}  // namespace megasoftmax
