#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_forward_instance<float>(const ForwardLaunch&, cudaStream_t);
template cudaError_t attention_backward_instance<float>(const BackwardLaunch&, cudaStream_t);
const KernelRegistration<AttentionLaunchers, float> registration(kAttentionLaunchers<float>);
}  // namespace megasoftmax
