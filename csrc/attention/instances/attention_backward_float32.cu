#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_backward_instance<float>(AttentionBackwardParams, int, cudaStream_t);
}  // namespace megasoftmax
