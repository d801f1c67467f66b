#pragma once
// Launching a kernel with its dynamic shared memory, and the one macro that hands an error up.

#include <cuda_runtime.h>

#define MEGASOFTMAX_RETURN_IF_ERROR(expression)                                        \
  do {                                                                                 \
    if (const cudaError_t error_ = (expression); error_ != cudaSuccess) return error_; \
  } while (0)

namespace megasoftmax {

inline constexpr int kSharedMemoryWithoutOptIn =
    47 * 1024;  // of 48 KB, less what kernels declare themselves

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
  if (shared_bytes > kSharedMemoryWithoutOptIn) {
    MEGASOFTMAX_RETURN_IF_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace megasoftmax
