#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_heads<__nv_bfloat16>(Sm90, const ForwardLaunch&, cudaStream_t);
template cudaError_t launch_heads<__nv_bfloat16>(Sm90, const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
