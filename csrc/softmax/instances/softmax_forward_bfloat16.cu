#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t softmax_forward_instance<__nv_bfloat16>(const ForwardParams&, const Plan&,
                                                             cudaStream_t);
}  // namespace megasoftmax
