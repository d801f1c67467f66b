#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward_with<__half, BiasKind::kTile>(const BackwardLaunch&,
                                                                   cudaStream_t);
}  // namespace megasoftmax
