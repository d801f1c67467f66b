#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_hopper_backward_instance<__nv_bfloat16>(
    const AttentionBackwardParams&, int, cudaStream_t, bool&);
}  // namespace megasoftmax
