#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_forward_with<__nv_bfloat16, HopperBias::kNone>(const ForwardLaunch&,
                                                                           cudaStream_t);
template cudaError_t launch_forward_with<__nv_bfloat16, HopperBias::kSoftcap>(const ForwardLaunch&,
                                                                              cudaStream_t);
}  // namespace megasoftmax
