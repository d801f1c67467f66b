#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t softmax_backward_float32(const BackwardParams& params, const Plan& plan,
                                     cudaStream_t stream) {
  return softmax_backward_instance<float>(params, plan, stream);
}
}  // namespace megasoftmax
