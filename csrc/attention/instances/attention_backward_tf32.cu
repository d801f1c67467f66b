#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_backward_instance<Tf32>(AttentionBackwardParams, int, cudaStream_t);
}  // namespace megasoftmax
