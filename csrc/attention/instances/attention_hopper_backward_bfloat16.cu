#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template bool attention_hopper_backward_is_there<__nv_bfloat16>(int, HopperBias);
template cudaError_t attention_hopper_backward_instance<__nv_bfloat16>(
    const AttentionBackwardParams&, int, cudaStream_t);
}  // namespace megasoftmax
