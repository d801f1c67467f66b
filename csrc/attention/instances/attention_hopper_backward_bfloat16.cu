#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward<__nv_bfloat16>(Sm90, const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
