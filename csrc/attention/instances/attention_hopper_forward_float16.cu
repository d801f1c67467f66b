#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_forward_with<__half, HopperBias::kNone>(const ForwardLaunch&,
                                                                    cudaStream_t);
template cudaError_t launch_forward_with<__half, HopperBias::kSoftcap>(const ForwardLaunch&,
                                                                       cudaStream_t);
}  // namespace megasoftmax
