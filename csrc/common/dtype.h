#pragma once
// The element types of scores, probabilities, biases and sinks. Compiles without nvcc.

#include <cstdint>

#include "host_device.h"

namespace megasoftmax {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32 };

__host__ __device__ constexpr int size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

// Element types in names of launchers, see kernels.h. vector.cuh specializes kTypeName.
constexpr const char* name_of(DType type) {
  return type == DType::kFloat16 ? "float16" : type == DType::kBFloat16 ? "bfloat16" : "float32";
}
inline constexpr const char* kTf32Name = "tf32";
template <class T>
inline constexpr const char* kTypeName = nullptr;

}  // namespace megasoftmax
