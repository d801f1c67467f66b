#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t topk_capped_forward_instance<__nv_bfloat16>(const TopkForwardParams&,
                                                                 const TopkPlan&, cudaStream_t);
}  // namespace megasoftmax
