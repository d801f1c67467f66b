#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_backward_instance<__nv_bfloat16>(AttentionBackwardParams, int,
                                                                cudaStream_t);
}  // namespace megasoftmax
