#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_forward_instance<__half>(const ForwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
