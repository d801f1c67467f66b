#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_forward_instance<Tf32>(const ForwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
