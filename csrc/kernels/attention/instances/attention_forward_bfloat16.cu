#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t attention_forward_bfloat16(const AttentionForwardParams& params, cudaStream_t stream) {
  return attention_forward_instance<__nv_bfloat16>(params, stream);
}
}  // namespace megasoftmax
