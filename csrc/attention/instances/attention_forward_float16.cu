#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_forward_instance<__half>(const AttentionForwardParams&,
                                                        cudaStream_t);
template cudaError_t attention_combine_instance<__half>(const AttentionForwardParams&,
                                                        cudaStream_t);
}  // namespace megasoftmax
