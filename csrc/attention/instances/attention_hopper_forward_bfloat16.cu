#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_forward<__nv_bfloat16>(Sm90, const ForwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
