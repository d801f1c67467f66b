#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_forward_with<__nv_bfloat16, HopperBias::kTable>(const ForwardLaunch&,
                                                                            cudaStream_t);
template cudaError_t launch_forward_with<__nv_bfloat16, HopperBias::kKeys>(const ForwardLaunch&,
                                                                           cudaStream_t);
}  // namespace megasoftmax
