#pragma once
// The one macro that hands an error up. Compiles without nvcc.

#include <cuda_runtime_api.h>

#define MEGASOFTMAX_RETURN_IF_ERROR(expression)                                        \
  do {                                                                                 \
    if (const cudaError_t error_ = (expression); error_ != cudaSuccess) return error_; \
  } while (0)
