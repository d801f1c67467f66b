#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t softmax_dropout_forward_instance<__half>(const ForwardParams&, const Plan&,
                                                              cudaStream_t);
}  // namespace megasoftmax
