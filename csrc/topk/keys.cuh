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

// How many values of a warp's lanes reach a number.
template <int kValues>
__device__ inline int count_reaching(const uint32_t (&values)[kValues], uint32_t number) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) count += values[i] >= number;
  return sum_of_lanes(count);
}

// A number that at least k of the values of a warp's lanes reach, and at most `most` of them unless
// more are equal. It halves the range between the largest value and the least, or the least of the
// first kFirst. Values of 0 do not count. The result is 0 if fewer than k values reach the least.
template <int kFirst = 0, int kValues>
__device__ inline uint32_t threshold_of(const uint32_t (&values)[kValues], int k, int most) {
  uint32_t before = ~0u, high = 0;  // `before`: the least
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (kFirst == 0 || i < kFirst) before = min(before, values[i] - 1);
    high = max(high, values[i]);
  }
  uint32_t low = smallest_of_lanes(before) + 1;
  high = largest_of_lanes(high);
  int count = count_reaching(values, max(low, 1u));
  if (count < k) return 0;
#pragma unroll 1
  while (low < high && count > most) {
    const uint32_t middle = high - (high - low) / 2;
    const int reaching = count_reaching(values, middle);
    if (reaching < k) {
      high = middle - 1;
    } else {
      low = middle;
      count = reaching;
    }
  }
  return low;
}
// A few candidates too many cost less than a threshold that leaves just k. Of many each costs more,
// as ranking takes the square of their number.
__device__ inline int most_reaching(int k) { return k + min(k / 2, 32) + 4; }

// A threshold that at least k of `count` keys in shared memory reach, by one warp. There are at
// most 32 * kValues keys.
template <int kValues>
__device__ inline uint64_t threshold_of_keys(const uint64_t* keys, int count, int k) {
  const int most = most_reaching(k), lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int at = lane + i * 32;
    values[i] = at < count ? static_cast<uint32_t>(keys[at] >> 32) : 0;
  }
  const uint32_t high = threshold_of(values, k, most);
  if (count_reaching(values, high) <= most) return uint64_t{high} << 32;
  int greater = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int at = lane + i * 32;
    greater += values[i] > high;
    values[i] = at < count && values[i] == high ? static_cast<uint32_t>(keys[at]) : 0;
  }
  greater = sum_of_lanes(greater);
  return uint64_t{high} << 32 | threshold_of(values, k - greater, most - greater);
}

}  // namespace megasoftmax
