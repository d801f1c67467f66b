#pragma once
// Keys: a logit and its column as one integer that orders as the selection does. The larger logit
// comes first, NaN before all others, -0 equals 0; among equals the lower column comes first. Keys
// of a row are distinct, so what is selected does not depend on who selects it.

#include <cstdint>

#include "../common/ptx.cuh"

namespace megasoftmax {

// Less than that of any logit.
inline constexpr uint64_t kNoKey = 0;

__device__ inline uint32_t ordered(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.f);  // -0 + 0 = 0
  if (logit != logit) return 0xffffffffu;
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ inline uint64_t key_of(float logit, int column) {
  return uint64_t{ordered(logit)} << 32 | ~static_cast<uint32_t>(column);
}
__device__ inline float logit_of(uint64_t key) {
  const auto bits = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(bits ^ (bits >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}
__device__ inline int column_of(uint64_t key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

// A number that at least k of the values of a warp's lanes reach, and at most `most` unless so many
// are equal: bit by bit, from the first in which they differ. 0 where fewer than k are not 0.
template <int kValues>
__device__ inline uint32_t threshold_of(const uint32_t (&values)[kValues], int k, int most) {
  uint32_t low = ~0u, high = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    low = min(low, values[i]);
    high = max(high, values[i]);
  }
  low = smallest_of_lanes(low);
  high = largest_of_lanes(high);
  if (low == high) return low;
  const int first = 31 - __clz(low ^ high);
  uint32_t found = high & ~((2u << first) - 1);
#pragma unroll 1
  for (uint32_t bit = 1u << first; bit != 0; bit >>= 1) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) count += values[i] >= (found | bit);
    count = sum_of_lanes(count);
    if (count >= k) found |= bit;
    if (count >= k && count <= most) break;
  }
  return found;
}

// The same for so many keys in shared memory, by one warp; at most 32 * kValues.
template <int kValues>
__device__ inline uint64_t threshold_of_keys(const uint64_t* keys, int count, int k, int most) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int at = lane + i * 32;
    values[i] = at < count ? static_cast<uint32_t>(keys[at] >> 32) : 0;
  }
  const uint32_t high = threshold_of(values, k, most);
  int greater = 0, reached = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int at = lane + i * 32;
    greater += values[i] > high;
    reached += values[i] >= high;
    values[i] = at < count && values[i] == high ? static_cast<uint32_t>(keys[at]) : 0;
  }
  greater = sum_of_lanes(greater);
  reached = sum_of_lanes(reached);
  if (reached <= most) return uint64_t{high} << 32;
  return uint64_t{high} << 32 | threshold_of(values, k - greater, most - greater);
}

}  // namespace megasoftmax
