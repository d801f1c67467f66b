#pragma once
// Reading a SinkLogit.

#include "tensors.h"
#include "vector.cuh"

namespace megasoftmax {

__host__ __device__ inline float SinkLogit::of_head(int64_t head) const {
  if (data == nullptr) return value;
  return with_dtype(type, [&](auto tag) {
    return to_float(static_cast<const decltype(tag)*>(data)[head * stride]);
  });
}

}  // namespace megasoftmax
