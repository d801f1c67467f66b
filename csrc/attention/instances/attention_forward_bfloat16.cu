#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_forward_instance<__nv_bfloat16>(const ForwardLaunch&, cudaStream_t);
}  // namespace megasoftmax
