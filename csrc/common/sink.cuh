#pragma once
// Reading a sink.

#include "tensors.h"
#include "vector.cuh"

namespace megasoftmax {

__host__ __device__ inline float sink_logit(const SinkLogit& sink, int64_t head) {
  if (sink.data == nullptr) return sink.value;
  return with_dtype(sink.type, [&](auto tag) {
    return to_float(static_cast<const decltype(tag)*>(sink.data)[head * sink.stride]);
  });
}

}  // namespace megasoftmax
