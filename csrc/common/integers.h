#pragma once
// Integer arithmetic for grids and row indices. Compiles without nvcc.

#include <cstdint>

#include "host_device.h"

namespace megasoftmax {

template <class Integer>
__host__ __device__ constexpr Integer divide_up(Integer a, Integer b) {
  return (a + b - 1) / b;
}

template <class Integer>
__host__ __device__ constexpr Integer round_up(Integer a, Integer multiple) {
  return divide_up(a, multiple) * multiple;
}

// Quotient and remainder by a divisor known at launch: a multiplication where the dividend fits 31
// bits. An int always does, and must not be negative.
struct Divider {
  int64_t divisor = 1;
  uint32_t magic = 0;
  uint32_t shift = 0;

  Divider() = default;
  explicit Divider(int64_t value) : divisor(value) {
    if (value < 1) return;  // a divisor of 0 is never used
    if (value > INT32_MAX) {
      shift = 31;  // what fits 31 bits is the remainder
      return;
    }
    while ((int64_t{1} << shift) < value) ++shift;
    magic =
        static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - value)) / value + 1);
  }

  template <class Integer>
  __host__ __device__ void split(Integer dividend, Integer& quotient, Integer& remainder) const {
    if (sizeof(Integer) == 4 || (int64_t{dividend} | divisor) >> 31 == 0) {
      const uint32_t n = static_cast<uint32_t>(dividend);
      const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(magic) * n) >> 32);
      const uint32_t q = (high + n) >> shift;
      quotient = static_cast<Integer>(q);
      remainder = static_cast<Integer>(n - q * static_cast<uint32_t>(divisor));
    } else {
      const auto q = static_cast<Integer>(dividend / divisor);
      remainder = static_cast<Integer>(dividend - q * divisor);
      quotient = q;
    }
  }
};

}  // namespace megasoftmax
