#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template bool attention_hopper_backward_is_there<__half>(int, HopperBias);
template cudaError_t attention_hopper_backward_instance<__half>(const AttentionBackwardParams&, int,
                                                                cudaStream_t);
}  // namespace megasoftmax
