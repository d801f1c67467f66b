#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<__half, BiasKind::kNone>(const BackwardLaunch&,
                                                                   cudaStream_t);
template cudaError_t launch_backward_with<__half, BiasKind::kSoftcap>(const BackwardLaunch&,
                                                                      cudaStream_t);
template cudaError_t launch_small_backward<__half>(Sm80, const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
