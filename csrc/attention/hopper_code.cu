// Tells whether this build has Hopper's kernels for the GPU. The operators and all libraries of
// kernels are compiled for the same GPUs, so one small kernel speaks for all.

#include <cuda_runtime.h>

#include "attention.h"

namespace megasoftmax {
namespace {

// Only code for 9.0a declares more shared memory than the driver may reserve.
constexpr int kBytes = kAttentionMaxDeclaredBytes;
static_assert(kBytes > kReservedSharedBytes);

__global__ void hopper_code_kernel() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ volatile char bytes[kBytes];
  bytes[threadIdx.x] = 0;
#endif
}

}  // namespace

bool has_hopper_code() {
  static const bool is_there = [] {
    cudaFuncAttributes attributes{};
    const auto* const kernel = reinterpret_cast<const void*>(hopper_code_kernel);
    if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess)
      return attributes.sharedSizeBytes >= kBytes;
    cudaGetLastError();  // the kernels of all architectures are left
    return false;
  }();
  return is_there;
}

}  // namespace megasoftmax
