#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<__nv_bfloat16, BiasKind::kNone>(const BackwardLaunch&,
                                                                          cudaStream_t);
template cudaError_t launch_backward_with<__nv_bfloat16, BiasKind::kSoftcap>(const BackwardLaunch&,
                                                                             cudaStream_t);
template cudaError_t launch_small_backward<__nv_bfloat16>(Sm80, const BackwardLaunch&,
                                                          cudaStream_t);
}  // namespace megasoftmax
