#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t softmax_backward_float16(const BackwardParams& params, cudaStream_t stream) {
  return softmax_backward_instance<__half>(params, stream);
}
}  // namespace megasoftmax
