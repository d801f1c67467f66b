#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_backward_instance<Tf32>(const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
