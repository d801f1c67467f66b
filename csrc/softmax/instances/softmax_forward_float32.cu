#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t softmax_forward_instance<float>(const ForwardParams&, const Plan&,
                                                     cudaStream_t);
}  // namespace megasoftmax
