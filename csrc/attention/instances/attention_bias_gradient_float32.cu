#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_bias_gradient<float>(Sm80, const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
