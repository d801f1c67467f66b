#pragma once
// Two halves of a word at a time, float16 or bfloat16. Before compute capability 8.0 bfloat16 has
// no arithmetic, and float16 no minimum and maximum.

#include "ptx.cuh"

namespace megasoftmax {

template <class T>
using PairOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// Both halves as float32, of bfloat16: its bits are the upper ones.
__device__ inline float low_bfloat16(uint32_t word) { return __uint_as_float(word << 16); }
__device__ inline float high_bfloat16(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// To the nearest, ties to even.
__device__ inline uint32_t rounded_to_bfloat16(float low, float high) {
#if __CUDA_ARCH__ >= 800
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
#else
  const auto rounded = [](float x) {
    const uint32_t bits = __float_as_uint(x);
    return x == x ? bits + 0x7fffu + (bits >> 16 & 1) : 0x7fffffffu;
  };
  return upper_halves(rounded(low), rounded(high));
#endif
}

template <class T>
struct Halves {
  using Pair = PairOf<T>;
  __device__ static Pair pair(uint32_t word) { return reinterpret_cast<const Pair&>(word); }
  __device__ static uint32_t word(Pair pair) { return reinterpret_cast<const uint32_t&>(pair); }

  // The larger, or the smaller, of each two halves. It is NaN only if both are.
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    return word(__hmax2(pair(a), pair(b)));
#else
    if constexpr (std::is_same_v<T, __half>) {
      return chosen(a, b, __hgt2_mask(pair(a), pair(b)) | __hneu2_mask(pair(b), pair(b)));
    } else {
      return of_floats(fmaxf(low_bfloat16(a), low_bfloat16(b)),
                       fmaxf(high_bfloat16(a), high_bfloat16(b)));
    }
#endif
  }
  __device__ static uint32_t smaller(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    return word(__hmin2(pair(a), pair(b)));
#else
    if constexpr (std::is_same_v<T, __half>) {
      return chosen(a, b, __hlt2_mask(pair(a), pair(b)) | __hneu2_mask(pair(b), pair(b)));
    } else {
      return of_floats(fminf(low_bfloat16(a), low_bfloat16(b)),
                       fminf(high_bfloat16(a), high_bfloat16(b)));
    }
#endif
  }
  // Float16 infinities become the largest finite numbers, and larger bfloat16 numbers 2^63. NaN
  // stays.
  __device__ static uint32_t made_finite(uint32_t a) {
    constexpr uint32_t kLargest = std::is_same_v<T, __half> ? 0x7bffu : 0x5f00u;
    constexpr uint32_t kNegative = kLargest | 0x8000u;
#if __CUDA_ARCH__ >= 800
    return word(
        __hmax2_nan(__hmin2_nan(pair(a), pair(kLargest * 0x10001u)), pair(kNegative * 0x10001u)));
#else
    constexpr uint32_t kInfinity = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
    const auto finite = [](uint32_t half) {
      const uint32_t magnitude = half & 0x7fffu;
      return magnitude > kLargest && magnitude <= kInfinity ? (half & 0x8000u) | kLargest : half;
    };
    return finite(a & 0xffffu) | finite(a >> 16) << 16;
#endif
  }
  // All bits of the halves that are not below those of `least`; none of NaN.
  __device__ static uint32_t reaching(uint32_t a, uint32_t least) {
    if constexpr (std::is_same_v<T, __half> || kIsAmpere) {
      return __hge2_mask(pair(a), pair(least));
    } else {
      const auto mask = [](float x, float y) { return x >= y ? ~0u : 0u; };
      return upper_halves(mask(low_bfloat16(a), low_bfloat16(least)),
                          mask(high_bfloat16(a), high_bfloat16(least)));
    }
  }
  // -0 becomes 0, and every NaN the same one.
  __device__ static uint32_t normalized(uint32_t a) {
#if __CUDA_ARCH__ >= 800
    return word(__hadd2(pair(a), pair(0)));
#else
    if constexpr (std::is_same_v<T, __half>) {
      return word(__hadd2(pair(a), pair(0)));
    } else {
      return of_floats(low_bfloat16(a) + 0.f, high_bfloat16(a) + 0.f);
    }
#endif
  }

  // Both halves times a factor, rounded once but for 2^-17 of the product.
  __device__ static uint32_t times(uint32_t a, float factor) {
#if __CUDA_ARCH__ >= 800
    static_assert(std::is_same_v<T, __nv_bfloat16>, "float16 has no room for the rest");
    const __nv_bfloat162 most = __float2bfloat162_rn(factor);
    const __nv_bfloat162 rest = __float2bfloat162_rn(factor - __low2float(most));
    return word(__hfma2(pair(a), most, __hmul2(pair(a), rest)));
#else
    return rounded_to_bfloat16(low_bfloat16(a) * factor, high_bfloat16(a) * factor);
#endif
  }

 private:
  __device__ static uint32_t chosen(uint32_t a, uint32_t b, uint32_t is_first) {
    return (a & is_first) | (b & ~is_first);
  }
  // Two floats that bfloat16 can represent.
  __device__ static uint32_t of_floats(float low, float high) {
    return upper_halves(__float_as_uint(low), __float_as_uint(high));
  }
};

}  // namespace megasoftmax
