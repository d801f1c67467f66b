#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<Tf32, BiasKind::kAny>(const BackwardLaunch&,
                                                                cudaStream_t);
}  // namespace megasoftmax
