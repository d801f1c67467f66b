#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t attention_backward_float16(const AttentionBackwardParams& params, cudaStream_t stream) {
  return attention_backward_instance<__half>(params, stream);
}
}  // namespace megasoftmax
