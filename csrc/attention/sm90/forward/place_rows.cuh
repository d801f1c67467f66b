#pragma once
// Rows of a dense bias that begin anywhere, forward: warps that would be idle move them within
// their rows of shared memory, to where the products expect them.

#include "../rows_anywhere.h"
#include "block.cuh"

namespace megasoftmax {

// Each half of a warp has one of two rows, 8 apart, which have one shift. A lane moves 16 bytes.
// All lanes have read their rows before one writes.
template <class T, HopperBias kBias, HopperMask kMask, int kIndex>
__device__ __forceinline__ void HopperForward<T, kBias, kMask, kIndex>::place_rows_anywhere(
    const AttentionForwardParams& params, uint32_t tile, int shift_of_first, int queries) {
  constexpr int kRowBytes = Memory::kBiasRowBytes, kVectors = kKeys / RowsAnywhere::kVector;
  constexpr int kAtATime = 2;  // registers have room for no more
  static_assert(kVectors == 16);
  const RowsAnywhere anywhere(params.bias);
  const unsigned lane = thread_index_anew() % 32u, vector = lane % kVectors;
#pragma unroll 1
  for (int j = 0; j < 8; ++j) {
    const uint32_t shift = uniform(shift_of_first + anywhere.left_of(j));
    const uint32_t row = tile + (j + lane / kVectors * 8) * kRowBytes;
    const uint32_t from = row + 16 * (shift / RowsAnywhere::kVector + vector);
    const uint32_t to = row + Memory::place_of_vector(j, vector);
    const auto place = [&]<int kWords>() {
#pragma unroll 1
      for (int first = 0; first < 64 * kRowBytes; first += 16 * kAtATime * kRowBytes) {
        uint32_t words[kAtATime][4], next[kAtATime][4];
#pragma unroll
        for (int i = 0; i < kAtATime; ++i) {
          load_four(words[i], from + first + 16 * i * kRowBytes);
          load_four(next[i], from + first + 16 * i * kRowBytes + 16);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kAtATime; ++i) {
          const auto word = [&](int at) { return at < 4 ? words[i][at] : next[i][at - 4]; };
          uint32_t moved[4];
#pragma unroll
          for (int at = 0; at < 4; ++at)
            moved[at] = __funnelshift_r(word(at + kWords), word(at + kWords + 1), 16 * shift);
          store_four(to + first + 16 * i * kRowBytes, moved);
        }
      }
    };
    switch (shift % RowsAnywhere::kVector / 2) {
      case 0:
        place.template operator()<0>();
        break;
      case 1:
        place.template operator()<1>();
        break;
      case 2:
        place.template operator()<2>();
        break;
      default:
        place.template operator()<3>();
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int row = queries; row < 64; ++row)  // beyond the last query
    if (lane < kVectors) store_four(tile + row * kRowBytes + 16 * vector, {0, 0, 0, 0});
}

}  // namespace megasoftmax
