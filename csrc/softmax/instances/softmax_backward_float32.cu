#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t softmax_backward_instance<float>(const BackwardParams&, const Plan&,
                                                      cudaStream_t);
}  // namespace megasoftmax
