#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_forward_instance<Tf32>(const AttentionForwardParams&, cudaStream_t);
template cudaError_t attention_combine_instance<Tf32>(const AttentionForwardParams&, cudaStream_t);
}  // namespace megasoftmax
