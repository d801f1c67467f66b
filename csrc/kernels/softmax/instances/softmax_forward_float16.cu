#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t softmax_forward_float16(const ForwardParams& params, const Plan& plan,
                                    cudaStream_t stream) {
  return softmax_forward_instance<__half>(params, plan, stream);
}
}  // namespace megasoftmax
