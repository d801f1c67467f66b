#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template bool has_code<__half>(Sm90);
template cudaError_t launch_bias_gradient<__half>(Sm90, const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
