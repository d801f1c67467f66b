#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<__half, HopperBias::kNone>(const BackwardLaunch&,
                                                                     cudaStream_t);
template cudaError_t launch_backward_with<__half, HopperBias::kSoftcap>(const BackwardLaunch&,
                                                                        cudaStream_t);
}  // namespace megasoftmax
