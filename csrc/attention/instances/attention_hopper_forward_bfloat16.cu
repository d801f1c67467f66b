#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template bool attention_hopper_forward_is_there<__nv_bfloat16>(int, HopperBias);
template cudaError_t attention_hopper_forward_instance<__nv_bfloat16>(const AttentionForwardParams&,
                                                                      int, cudaStream_t);
}  // namespace megasoftmax
