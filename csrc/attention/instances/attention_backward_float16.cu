#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_backward_instance<__half>(AttentionBackwardParams, int,
                                                         cudaStream_t);
}  // namespace megasoftmax
