#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template bool has_code<__nv_bfloat16>(Sm90);
template cudaError_t launch_bias_gradient<__nv_bfloat16>(Sm90, const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
