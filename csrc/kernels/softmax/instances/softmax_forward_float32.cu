#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t softmax_forward_float32(const ForwardParams& params, const Plan& plan,
                                    cudaStream_t stream) {
  return softmax_forward_instance<float>(params, plan, stream);
}
}  // namespace megasoftmax
