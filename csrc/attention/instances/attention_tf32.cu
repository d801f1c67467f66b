#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_forward_instance<Tf32>(const ForwardLaunch&, cudaStream_t);
template cudaError_t attention_backward_instance<Tf32>(const BackwardLaunch&, cudaStream_t);
const KernelRegistration<AttentionLaunchers, Tf32> registration(kAttentionLaunchers<Tf32>);
}  // namespace megasoftmax
