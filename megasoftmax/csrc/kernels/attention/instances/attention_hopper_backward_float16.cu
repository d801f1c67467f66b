#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_hopper_backward_instance<__half>(const AttentionBackwardParams&, int,
                                                                cudaStream_t, bool&);
}  // namespace megasoftmax
