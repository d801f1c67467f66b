#include "../dispatch.cuh"
#include "instances.h"

namespace megasoftmax {
cudaError_t attention_backward_bfloat16(const AttentionBackwardParams& params,
                                        cudaStream_t stream) {
  return attention_backward_instance<__nv_bfloat16>(params, stream);
}
}  // namespace megasoftmax
