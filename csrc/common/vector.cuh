#pragma once
// Packs of elements: the unit in which every kernel moves memory. A pack is held as 32-bit words,
// so that it stays in whole registers from the load to the arithmetic.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "dtype.h"
#include "halves.cuh"
#include "limits.h"
#include "ptx.cuh"

namespace megasoftmax {

// A float32 element whose products are made of its TF32 part. Products of float have the precision
// of float32.
struct Tf32 {
  float value;
};

template <>
inline constexpr const char* kTypeName<float> = name_of(DType::kFloat32);
template <>
inline constexpr const char* kTypeName<Tf32> = kTf32Name;
template <>
inline constexpr const char* kTypeName<__half> = name_of(DType::kFloat16);
template <>
inline constexpr const char* kTypeName<__nv_bfloat16> = name_of(DType::kBFloat16);

template <class T>
inline constexpr int kPackElements = 16 / sizeof(T);

template <class T, int kElements = kPackElements<T>>
struct alignas(sizeof(T) * kElements < 16 ? sizeof(T) * kElements : 16) Pack {
  static constexpr int kBytes = sizeof(T) * kElements;
  static constexpr int kWords = kBytes / 4;
  static constexpr int kLaneBits = 8 * sizeof(T);
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;

  uint32_t words[kWords];

  __device__ float operator[](int lane) const {
    const uint32_t word = words[lane * sizeof(T) / 4];
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word);
    } else if constexpr (std::is_same_v<T, __half>) {
      return __half2float(
          __ushort_as_half(static_cast<uint16_t>(lane % 2 == 0 ? word : word >> 16)));
    } else {
      return __uint_as_float(lane % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
  }

  // A lane that is known at run time only. The pack stays in registers.
  __device__ float at(int lane) const {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t other = unknown(words[i]);
      word = lane * static_cast<int>(sizeof(T)) / 4 == i ? other : word;
    }
    Pack<T, 4 / sizeof(T)> single;
    single.words[0] = sizeof(T) == 2 && lane % 2 != 0 ? word >> 16 : word;
    return single[0];
  }

  // To the nearest, ties to even.
  __device__ static Pack round(const float (&values)[kElements]) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        pack.words[i] = __float_as_uint(values[i]);
      } else if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        pack.words[i] = reinterpret_cast<const uint32_t&>(pair);
      } else {
        pack.words[i] = rounded_to_bfloat16(values[2 * i], values[2 * i + 1]);
      }
    }
    return pack;
  }

  // -inf in every lane.
  static constexpr uint32_t kLowestWord = std::is_same_v<T, float>    ? 0xff800000u
                                          : std::is_same_v<T, __half> ? 0xfc00fc00u
                                                                      : 0xff80ff80u;
  __device__ static Pack lowest() {
    Pack pack;
#pragma unroll
    for (int i = 0; i < kWords; ++i) pack.words[i] = kLowestWord;
    return pack;
  }
  // The bits of -inf where `bits`, which covers whole lanes of that word, are set.
  __device__ void lower(int word, uint32_t bits) { fill<kLowestWord>(word, bits); }
  // The bits of kFill there.
  template <uint32_t kFill>
  __device__ void fill(int word, uint32_t bits) {
    words[word] = (words[word] & ~bits) | (kFill & bits);
  }
  // The bits of kFill to the lanes outside [begin, end), without branches: three instructions a
  // word for each end that cuts the pack.
  template <uint32_t kFill>
  __device__ void fill_outside(int begin, int end) {
    const int kept_bits = min(end, kElements) * kLaneBits;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      fill<kFill>(i, __funnelshift_lc(0u, ~0u, static_cast<uint32_t>(max(kept_bits - 32 * i, 0))));
    if (begin <= 0) return;
    const int cut_bits = min(begin, kElements) * kLaneBits;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      fill<kFill>(i, __funnelshift_lc(~0u, 0u, static_cast<uint32_t>(max(cut_bits - 32 * i, 0))));
  }

  __device__ Bits bits(int lane) const {
    const uint32_t word = words[lane * sizeof(T) / 4];
    return static_cast<Bits>(kLaneBits == 32 || lane % 2 == 0 ? word : word >> 16);
  }

  // Lanes that are 0 in `other`, two lanes to an operation where they are halves. Bits that mean
  // 0 do so as float16 and as bfloat16.
  __device__ void clear_where_zero(const Pack& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = other[i] != 0.f ? words[i] : 0;
      } else {
        words[i] &= __hneu2_mask(reinterpret_cast<const __half2&>(other.words[i]), __half2{});
      }
    }
  }

  // Lanes that are -inf or NaN.
  __device__ void clear_lowest() {
    // The least finite number.
    constexpr uint32_t kLeast = kLowestWord - (sizeof(T) == 4 ? 1 : 0x10001);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = (*this)[i] >= __uint_as_float(kLeast) ? words[i] : 0;
      } else {
        words[i] &= Halves<T>::reaching(words[i], kLeast);
      }
    }
  }

  __device__ void flip_signs() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] ^= sizeof(T) == 4 ? 0x80000000u : 0x80008000u;
  }

  // The pack as a queue of elements: drops the first, appends one.
  __device__ void shift_in(Bits element) {
    if constexpr (kLaneBits == 32) {
#pragma unroll
      for (int i = 0; i + 1 < kWords; ++i) words[i] = words[i + 1];
      words[kWords - 1] = element;
    } else {
#pragma unroll
      for (int i = 0; i + 1 < kWords; ++i)
        words[i] = __funnelshift_r(words[i], words[i + 1], kLaneBits);
      words[kWords - 1] = words[kWords - 1] >> kLaneBits | static_cast<uint32_t>(element)
                                                               << kLaneBits;
    }
  }
};

// The largest lane of all, two lanes to an operation where they are halves; not NaN unless all are.
template <class T, int kElements, int kPacks>
__device__ inline float largest_lane(const Pack<T, kElements> (&packs)[kPacks]) {
  const auto max = [](uint32_t a, uint32_t b) -> uint32_t {
    if constexpr (std::is_same_v<T, float>) {
      return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
    } else {
      return Halves<T>::larger(a, b);
    }
  };
  Pack<T, kElements> largest = packs[0];
#pragma unroll
  for (int i = 1; i < kPacks; ++i) {
#pragma unroll
    for (int word = 0; word < largest.kWords; ++word)
      largest.words[word] = max(largest.words[word], packs[i].words[word]);
  }
#pragma unroll
  for (int word = 1; word < largest.kWords; ++word)
    largest.words[0] = max(largest.words[0], largest.words[word]);
  return sizeof(T) == 4 ? largest[0] : fmaxf(largest[0], largest[1]);
}

// The smallest.
template <class T, int kElements, int kPacks>
__device__ inline float smallest_lane(const Pack<T, kElements> (&packs)[kPacks]) {
  const auto min = [](uint32_t a, uint32_t b) -> uint32_t {
    if constexpr (std::is_same_v<T, float>) {
      return __float_as_uint(fminf(__uint_as_float(a), __uint_as_float(b)));
    } else {
      return Halves<T>::smaller(a, b);
    }
  };
  Pack<T, kElements> smallest = packs[0];
#pragma unroll
  for (int i = 1; i < kPacks; ++i) {
#pragma unroll
    for (int word = 0; word < smallest.kWords; ++word)
      smallest.words[word] = min(smallest.words[word], packs[i].words[word]);
  }
#pragma unroll
  for (int word = 1; word < smallest.kWords; ++word)
    smallest.words[0] = min(smallest.words[0], smallest.words[word]);
  return sizeof(T) == 4 ? smallest[0] : fminf(smallest[0], smallest[1]);
}

// One branch per element type: `body` is called with a value of the type that `type` names.
#pragma nv_exec_check_disable  // a body of the host is for the host alone
template <class Body>
__host__ __device__ decltype(auto) with_dtype(DType type, Body&& body) {
  switch (type) {
    case DType::kFloat16:
      return body(__half{});
    case DType::kBFloat16:
      return body(__nv_bfloat16{});
    default:
      return body(float{});
  }
}

// Calls body with a value of a result's type. Results of T have type T or float32, and those of
// float32 any type.
template <class T, class Body>
__device__ decltype(auto) with_result_dtype(DType type, Body&& body) {
  if constexpr (sizeof(T) == 2) {
    return type == DType::kFloat32 ? body(float{}) : body(T{});
  } else {
    return with_dtype(type, body);
  }
}

__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(Tf32 x) { return x.value; }
__host__ __device__ inline float to_float(__half x) { return __half2float(x); }
__host__ __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// To the nearest, ties to even.
template <class T>
__host__ __device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

template <class T>
__device__ inline bool is_aligned(const T* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Stops the compiler from computing an address anew for every access with a constant offset.
template <class T>
__device__ inline T* keep_in_register(T* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

// Load and store whole packs, at addresses that are aligned to their size or to 16 bytes.
// kStreaming: they are used once, and do not displace what caches hold. Loads of rows that wait in
// registers, and stores of rows that wait in the shared memory of a cluster (1%), take less time
// without it on an H200.
template <class T, int kElements>
using PackWord = std::conditional_t<sizeof(T) * kElements == 8, uint2, uint4>;

template <class T, int kElements, bool kStreaming = false>
__device__ inline Pack<T, kElements> load_pack(const T* source) {
  const auto* const words = reinterpret_cast<const PackWord<T, kElements>*>(source);
  Pack<T, kElements> pack;
  auto* const loaded = reinterpret_cast<PackWord<T, kElements>*>(&pack);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(*words)); ++i)
    loaded[i] = kStreaming ? __ldcs(words + i) : words[i];
  return pack;
}
template <bool kStreaming = false, class T, int kElements>
__device__ inline void store_pack(T* destination, const Pack<T, kElements>& pack) {
  auto* const words = reinterpret_cast<PackWord<T, kElements>*>(destination);
  const auto* const stored = reinterpret_cast<const PackWord<T, kElements>*>(&pack);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(*words)); ++i) {
    if constexpr (kStreaming) {
      __stcs(words + i, stored[i]);
    } else {
      words[i] = stored[i];
    }
  }
}

// Lane j is source[j * stride] where begin <= j < end, 0 elsewhere. With kUnroll = 1 the elements
// come one after the other: slower than all at once, but it costs the fast path beside it no
// registers.
template <class T, int kElements, int kUnroll = 1>
__device__ inline Pack<T, kElements> load_partial(const T* source, int64_t stride, int begin,
                                                  int end) {
  using Bits = typename Pack<T, kElements>::Bits;
  const auto* bits = reinterpret_cast<const Bits*>(source);
  Pack<T, kElements> pack = {};
#pragma unroll kUnroll
  for (int j = 0; j < kElements; ++j)
    pack.shift_in(j >= begin && j < end ? bits[j * stride] : Bits{0});
  return pack;
}

// destination[j] is lane j where begin <= j < end.
template <class T, int kElements>
__device__ inline void store_partial(T* destination, const Pack<T, kElements>& pack, int begin,
                                     int end) {
  auto* bits = reinterpret_cast<typename Pack<T, kElements>::Bits*>(destination);
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
    if (j >= begin && j < end) bits[j] = pack.bits(j);
  }
}

// Where the whole 16 bytes of a range begin and end.
__device__ inline char* first_aligned(char* begin) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + 15) & ~uintptr_t{15});
}
__device__ inline char* last_aligned(char* end) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) & ~uintptr_t{15});
}
__device__ inline void fill_ends_with_zero(char* begin, char* end, int thread, int threads) {
  const auto first = reinterpret_cast<uintptr_t>(begin), last = reinterpret_cast<uintptr_t>(end);
  if (((first | last) & 15) == 0) return;
#pragma unroll 1
  for (int i = thread * 2; i < 16; i += threads * 2) {
    char* const head = begin + i;
    char* const tail = last_aligned(end) + i;
    if (i < static_cast<int>(-first & 15) && head < end) *reinterpret_cast<uint16_t*>(head) = 0;
    if (i < static_cast<int>(last & 15) && tail >= begin) *reinterpret_cast<uint16_t*>(tail) = 0;
  }
}

// Writes zeros to [begin, end). Each thread writes 16 bytes at a time, and 2 at the ends.
__device__ inline void fill_zero(char* begin, char* end, int thread, int threads) {
  const auto* const stop = reinterpret_cast<uint4*>(last_aligned(end));
  auto* at = reinterpret_cast<uint4*>(first_aligned(begin)) + thread;
#pragma unroll 2
  for (; at < stop; at += threads) __stcs(at, uint4{0, 0, 0, 0});
  fill_ends_with_zero(begin, end, thread, threads);
}

// Zeros in the shared memory of a block, which one thread copies to long ranges of global memory.
// Before compute capability 9.0 all threads write zeros, by fill_zero.
class ZeroBlock {
 public:
  ZeroBlock() = default;
  // By all threads of the block.
  template <int kThreads>
  __device__ static ZeroBlock make() {
#if __CUDA_ARCH__ >= 900
    __shared__ __align__(16) uint4 zeros[kBytes / 16];
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kBytes / 16; i += kThreads) zeros[i] = {};
    publish_writes();
    __syncthreads();
    return ZeroBlock(shared_address(zeros));
#else
    return ZeroBlock(0);
#endif
  }
  // Does what fill_zero does.
  __device__ void fill(char* begin, char* end, int thread, int threads) const {
#if __CUDA_ARCH__ >= 900
    if (thread == 0) {
      char* const stop = last_aligned(end);
#pragma unroll 1
      for (char* at = first_aligned(begin); at < stop; at += kBytes)
        start_store(at, zeros_, static_cast<uint32_t>(min(stop - at, ptrdiff_t{kBytes})));
    }
    fill_ends_with_zero(begin, end, thread, threads);
#else
    fill_zero(begin, end, thread, threads);
#endif
  }
  // Before the thread that copied leaves the block.
  __device__ static void finish() {
    end_stores();
    wait_for_reads_of_stores();
  }

 private:
  static constexpr int kBytes = kZeroBytes;
  __device__ explicit ZeroBlock(uint32_t zeros) : zeros_(zeros) {}
  uint32_t zeros_ = 0;
};

}  // namespace megasoftmax
