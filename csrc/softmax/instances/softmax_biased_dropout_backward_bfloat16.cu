#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t softmax_biased_dropout_backward_instance<__nv_bfloat16>(const BackwardParams&,
                                                                             const Plan&,
                                                                             cudaStream_t);
}  // namespace megasoftmax
