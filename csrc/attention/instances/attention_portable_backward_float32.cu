#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<float, BiasKind::kNone>(const BackwardLaunch&,
                                                                  cudaStream_t);
template cudaError_t launch_backward_with<float, BiasKind::kSoftcap>(const BackwardLaunch&,
                                                                     cudaStream_t);
template cudaError_t launch_small_backward<float>(Sm80, const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
