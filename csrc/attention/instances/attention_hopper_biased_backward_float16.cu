#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<__half, HopperBias::kTile>(const BackwardLaunch&,
                                                                     cudaStream_t);
template cudaError_t launch_backward_with<__half, HopperBias::kRows>(const BackwardLaunch&,
                                                                     cudaStream_t);
}  // namespace megasoftmax
