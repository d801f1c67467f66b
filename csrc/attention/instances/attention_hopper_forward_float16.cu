#include "../sm90/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_forward<__half>(Sm90, const ForwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
