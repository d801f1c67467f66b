#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template bool attention_hopper_forward_is_there<__half>(int, HopperBias);
template cudaError_t attention_hopper_forward_instance<__half>(const AttentionForwardParams&, int,
                                                               cudaStream_t);
}  // namespace megasoftmax
