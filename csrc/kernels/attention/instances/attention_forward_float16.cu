#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t attention_forward_float16(const AttentionForwardParams& params, cudaStream_t stream) {
  return attention_forward_instance<__half>(params, stream);
}
}  // namespace megasoftmax
