#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<__half, HopperBias::kTable>(const BackwardLaunch&,
                                                                      cudaStream_t);
template cudaError_t launch_backward_with<__half, HopperBias::kKeys>(const BackwardLaunch&,
                                                                     cudaStream_t);
}  // namespace megasoftmax
