#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t topk_forward_instance<float>(const TopkForwardParams&, const TopkPlan&,
                                                  cudaStream_t);
template cudaError_t topk_backward_instance<float>(const TopkBackwardParams&, const TopkPlan&,
                                                   cudaStream_t);
}  // namespace megasoftmax
