#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_forward_instance<float>(const ForwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
