#include "../dispatch.cuh"

namespace megasoftmax {
template cudaError_t attention_forward_instance<__nv_bfloat16>(const ForwardLaunch&, cudaStream_t);
template cudaError_t attention_backward_instance<__nv_bfloat16>(const BackwardLaunch&,
                                                                cudaStream_t);
const KernelRegistration<AttentionLaunchers, __nv_bfloat16> has_kernels(
    kAttentionLaunchers<__nv_bfloat16>);
}  // namespace megasoftmax
