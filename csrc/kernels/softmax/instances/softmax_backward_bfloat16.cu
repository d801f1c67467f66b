#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t softmax_backward_bfloat16(const BackwardParams& params, const Plan& plan,
                                      cudaStream_t stream) {
  return softmax_backward_instance<__nv_bfloat16>(params, plan, stream);
}
}  // namespace megasoftmax
