#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t topk_backward_instance<__half>(const TopkBackwardParams&, const TopkPlan&,
                                                    cudaStream_t);
}  // namespace megasoftmax
