#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_forward_with<__half, HopperBias::kTile>(const ForwardLaunch&,
                                                                    cudaStream_t);
template cudaError_t launch_forward_with<__half, HopperBias::kRows>(const ForwardLaunch&,
                                                                    cudaStream_t);
}  // namespace megasoftmax
