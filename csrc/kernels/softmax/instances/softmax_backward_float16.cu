#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t softmax_backward_float16(const BackwardParams& params, const Plan& plan,
                                     cudaStream_t stream) {
  return softmax_backward_instance<__half>(params, plan, stream);
}
}  // namespace megasoftmax
