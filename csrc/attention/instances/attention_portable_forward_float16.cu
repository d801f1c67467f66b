#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_forward<__half>(Sm80, const ForwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
