#pragma once
// A mask and a bias of keys as rows of a product with ones.

#include "../bias.cuh"
#include "ptx.cuh"

namespace megasoftmax {

// Bit i: whether a mask of keys excludes key first_key + i. 0 without one. Called by a warp.
__device__ inline uint32_t excluded_bits(const AttentionParams& params, int batch, int head,
                                         int first_key) {
  if (params.mask.data == nullptr) return 0;
  const auto* const mask = reinterpret_cast<const uint8_t*>(params.mask_row(batch, head, 0));
  const int key = min(first_key + thread_index_anew() % 32, params.keys - 1);
  return __ballot_sync(~0u, mask[key * params.mask.column_stride] != 0);
}

// Each lane has some keys of a tile. A bias over the scale is the sum of three numbers of 16 bits,
// which keep its 24 bits, or with float16 err by at most 2^-25. Logits made so differ from
// scale * score + bias by a few units of the last place. So a tile with a large bias has none of it
// here, and other warps add it.
template <class T, int kKeys, bool kHasBias>
class RowsOfKeys {
 public:
  static constexpr int kOfLane = kKeys / 32, kParts = kHasBias ? 3 : 1;

  // Starts to load what store() takes. It may be used a step later, so nothing is made of it here.
  __device__ void load(const AttentionParams& params, int batch, int head, int first_key) {
    const int key = first_key + first();
    if (params.block_mask.words != nullptr) {
      masked_[0] =
          __ldg(params.block_mask.of(batch, head) + params.block_mask.layout.bits() + key / 32);
    } else if (params.mask.data != nullptr) {
      const auto* const mask = reinterpret_cast<const uint8_t*>(params.mask_row(batch, head, 0));
#pragma unroll
      for (int i = 0; i < kOfLane; ++i)
        masked_[i] = __ldg(mask + min(key + i, params.keys - 1) * params.mask.column_stride);
    }
    if constexpr (kHasBias) {
      const BiasRows<T> bias(params, batch, head);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int64_t at = min(key + i, params.keys - 1) * bias.key_stride;
        biases_[i] = bias.type == DType::kFloat32
                         ? __ldg(static_cast<const uint32_t*>(bias.first) + at)
                         : __ldg(static_cast<const uint16_t*>(bias.first) + at);
      }
    }
  }
  // A bit for each of this lane's keys that a mask excludes.
  __device__ uint32_t excluded(const AttentionParams& params) const {
    if (params.block_mask.words != nullptr) return masked_[0] >> first() % 32;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) bits |= (masked_[i] != 0 ? 1u : 0u) << i;
    return bits;
  }
  __device__ static int first() { return thread_index_anew() % 32 * kOfLane; }
  // Writes the rows, in panels of 64 keys. Swizzled: vector v of row r is vector v ^ r. Returns
  // whether the bias is left to other warps.
  __device__ bool store(const AttentionParams& params, uint32_t rows, int panel_bytes) const {
    if constexpr (!kHasBias) {
      store_excluded(excluded(params), rows, panel_bytes);
      return false;
    } else {
      const uint32_t mine = address_in(rows, panel_bytes), bits = excluded(params);
      const float inverse_scale = 1.f / params.logit_scale;
      float left[kOfLane];
      bool has_large = false;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const float bias = of_word(params.bias.type, biases_[i]);
        left[i] = bias * inverse_scale;
        has_large |= fabsf(bias) < INFINITY && (fabsf(bias) >= kLarge || !(fabsf(left[i]) < kMost));
      }
      has_large = __any_sync(~0u, has_large);
#pragma unroll
      for (int i = 0; i < kOfLane; i += 2) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          if (has_large) left[j] = 0.f;
          if ((bits >> j & 1) != 0) left[j] = -INFINITY;
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const Pack<T, 2> pack = Pack<T, 2>::round({left[i], left[i + 1]});
          store_word((mine ^ part * 16) + part * 128 + 2 * i, pack.words[0]);
#pragma unroll
          for (int j = 0; j < 2; ++j)  // nothing is left of infinity
            left[i + j] = fabsf(left[i + j]) == INFINITY ? 0.f : left[i + j] - pack[j];
        }
      }
      return has_large;
    }
  }
  // Writes the row of a mask without a bias. `bits`: which of this lane's keys are excluded.
  __device__ static void store_excluded(uint32_t bits, uint32_t row, int panel_bytes) {
    constexpr uint32_t kExcluded = std::is_same_v<T, __half> ? 0xfc00 : 0xff80;  // -infinity
    const uint32_t mine = address_in(row, panel_bytes);
#pragma unroll
    for (int i = 0; i < kOfLane; i += 2)
      store_word(mine + 2 * i,
                 (bits >> i & 1) * kExcluded | (bits >> (i + 1) & 1) * kExcluded << 16);
  }
  // Writes eight rows of columns of ones, by the first threads of a block. Swizzled: the first
  // vector of row r is vector r.
  __device__ static void store_ones(uint32_t ones) {
    const int thread = thread_index_anew();
    if (thread >= 64) return;
    const bool has_ones = thread / 8 == thread % 8;
    store_four(ones + 16 * thread, {has_ones ? round_pair<T>(1.f, 1.f) : 0,
                                    has_ones ? round_pair<T>(1.f, 0.f) : 0, 0, 0});
  }

 private:
  // The least large bias, and what the first part has room for.
  static constexpr float kLarge = 4096.f, kMost = 32768.f;

  // Where this lane's keys lie in a row.
  __device__ static uint32_t address_in(uint32_t row, int panel_bytes) {
    return row + first() / 64 * panel_bytes + first() % 64 * 2;
  }

  __device__ static float of_word(DType type, uint32_t word) {
    if (type == DType::kFloat32) return __uint_as_float(word);
    Pack<T, 2> pack;
    pack.words[0] = word;
    return pack[0];
  }

  // The word of the block mask that has this lane's bits; or the mask's bytes. Entries of the bias.
  uint32_t masked_[kOfLane] = {}, biases_[kOfLane];
};

}  // namespace megasoftmax
