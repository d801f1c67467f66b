#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_backward<__half>(Sm90, const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
