#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_backward_instance<__nv_bfloat16>(const BackwardLaunch&,
                                                                cudaStream_t);
}  // namespace megasoftmax
