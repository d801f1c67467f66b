#pragma once
// The element types of scores, probabilities, biases and sinks. Compiles without nvcc.

#include <cstdint>

#include "host_device.h"

namespace megasoftmax {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32 };

__host__ __device__ constexpr int size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

// The name of an element type in names of kernels, such as "softmax_float16". vector.cuh has them.
template <class T>
inline constexpr const char* kTypeName = nullptr;

}  // namespace megasoftmax
