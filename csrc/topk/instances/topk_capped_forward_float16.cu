#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t topk_capped_forward_instance<__half>(const TopkForwardParams&, const TopkPlan&,
                                                          cudaStream_t);
}  // namespace megasoftmax
