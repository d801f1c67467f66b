#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_hopper_forward_instance<__nv_bfloat16>(const AttentionForwardParams&,
                                                                      int, cudaStream_t, bool&);
}  // namespace megasoftmax
