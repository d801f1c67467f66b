#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<__nv_bfloat16, BiasKind::kAny>(const BackwardLaunch&,
                                                                         cudaStream_t);
}  // namespace megasoftmax
