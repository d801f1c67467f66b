#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_forward_with<__half, HopperBias::kTable>(const ForwardLaunch&,
                                                                     cudaStream_t);
template cudaError_t launch_forward_with<__half, HopperBias::kKeys>(const ForwardLaunch&,
                                                                    cudaStream_t);
}  // namespace megasoftmax
