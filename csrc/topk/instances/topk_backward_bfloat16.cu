#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t topk_backward_instance<__nv_bfloat16>(const TopkBackwardParams&,
                                                           const TopkPlan&, cudaStream_t);
}  // namespace megasoftmax
