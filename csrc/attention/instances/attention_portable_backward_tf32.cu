#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<Tf32, BiasKind::kNone>(const BackwardLaunch&,
                                                                 cudaStream_t);
template cudaError_t launch_backward_with<Tf32, BiasKind::kSoftcap>(const BackwardLaunch&,
                                                                    cudaStream_t);
template cudaError_t launch_small_backward<Tf32>(Sm80, const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
