#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<float, BiasKind::kAny>(const BackwardLaunch&,
                                                                 cudaStream_t);
}  // namespace megasoftmax
