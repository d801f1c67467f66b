#include "../sm80/dispatch.cuh"

namespace megasoftmax {
template cudaError_t launch_forward<Tf32>(Sm80, const ForwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
