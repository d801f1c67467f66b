#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_backward_instance<__half>(const BackwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
