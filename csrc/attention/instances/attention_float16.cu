#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_forward_instance<__half>(const ForwardLaunch&, cudaStream_t);
template cudaError_t attention_backward_instance<__half>(const BackwardLaunch&, cudaStream_t);
const KernelRegistration<AttentionLaunchers, __half> registration(kAttentionLaunchers<__half>);
}  // namespace megasoftmax
