#pragma once
// Dropout of a row: which of its entries are kept, as common/dropout.cuh says.
//
// One call of Philox decides 4 entries of a row, 8 columns apart, and so 8 calls decide 32
// consecutive columns, a block. The lanes of a row share out the calls of the blocks that the row
// sees, and each then fetches the bits of its chunks by a shuffle (Philox 6 instructions per entry,
// all else 5).

#include <algorithm>

#include "../common/dropout.cuh"
#include "../common/ptx.cuh"
#include "params.h"

namespace megasoftmax {

// Without dropout.
struct AllEntries {
  template <class Params>
  __device__ AllEntries(const Params&, const RowIndex&) {}
  template <class Params>
  __device__ static constexpr float factor(const Params&) {
    return 1.f;
  }
  template <int kLanes, int kElements, int kChunks>
  __device__ uint32_t of_batch(int, int) const {
    return 0;
  }
  template <int kElements>
  __device__ static void drop(uint32_t, float (&)[kElements]) {}
};

class KeptEntries {
 public:
  template <class Params>
  __device__ KeptEntries(const Params& params, const RowIndex& index)
      : seed_(uniform(static_cast<uint64_t>(__ldg(params.dropout.seed)))),
        complement_((kDropoutSteps - params.dropout.threshold) * 0x10001),
        head_(
            static_cast<uint32_t>(index.batch * static_cast<int>(params.shape.heads) + index.head)),
        query_(static_cast<uint32_t>(index.query)) {}

  // Of what is kept.
  template <class Params>
  __device__ static float factor(const Params& params) {
    return params.dropout.factor;
  }

  // Bit i * kElements + j: is entry j of this lane's chunk i kept? kLanes lanes, of a whole warp or
  // of parts that are alike, take the chunks from column `first` on in turn. Unspecified from `end`
  // on.
  template <int kLanes, int kElements, int kChunks>
  __device__ uint32_t of_batch(int first, int end) const {
    static_assert(kLanes >= kPlaces && kLanes <= 32 && kElements * kChunks <= kBlock);
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int first_block = first >> kBlockBits;  // before column 0 there is one too
    const int blocks =
        __reduce_max_sync(kAllLanes, ((end + kBlock - 1) >> kBlockBits) - first_block);

    // As many lanes as there are decide a block together, 2^shared; lane b << shared has block b.
    const int shared = min(max(__clz(blocks - 1) - __clz(kLanes - 1), 0), kPlaceBits);
    const int block = first_block + (lane >> shared), own = lane & ((1 << shared) - 1);
    uint32_t mine = 0;
#pragma unroll 2
    for (int i = 0; i < kPlaces >> shared; ++i) {
      const int place = (i << shared) + own;
      mine |= kept_at(block, place) << place;
    }
#pragma unroll 1
    for (int distance = 1; distance < 1 << shared; distance *= 2)
      mine |= __shfl_xor_sync(kAllLanes, mine, distance);
    // Chunks that do not begin at the beginning of a block may reach one more than there are lanes.
    uint32_t behind = 0;
    if (blocks > kLanes) {
      const uint32_t kept = kept_at(first_block + kLanes, lane % kPlaces);
      const int first_lane = static_cast<int>(threadIdx.x) % 32 - lane;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint32_t found = __ballot_sync(kAllLanes, (kept >> step * kPlaces & 1) != 0);
        behind |= (found >> first_lane & 0xff) << step * kPlaces;
      }
    }

    const auto bits_of = [&](int number) {
      const uint32_t bits = __shfl_sync(kAllLanes, mine, number << shared, kLanes);
      return number < kLanes ? bits : behind;
    };
    const bool straddles = __any_sync(kAllLanes, first % kElements != 0);
    uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int offset = first - first_block * kBlock + (i * kLanes + lane) * kElements;
      const int number = offset >> kBlockBits;
      const uint32_t low = bits_of(number), high = straddles ? bits_of(number + 1) : 0;
      const uint32_t bits = __funnelshift_r(low, high, offset);  // modulo 32
      kept |= (bits & ((1u << kElements) - 1)) << i * kElements;
    }
    return kept;
  }

  // Zeros where the lowest bits of `kept` are not set.
  template <int kElements>
  __device__ static void drop(uint32_t kept, float (&values)[kElements]) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) values[j] = (kept >> j & 1) != 0 ? values[j] : 0.f;
  }

 private:
  static constexpr int kBlockBits = 5, kBlock = 1 << kBlockBits;   // columns of a block
  static constexpr int kPlaceBits = 3, kPlaces = 1 << kPlaceBits;  // calls for it
  static constexpr unsigned kAllLanes = 0xffffffffu;

  // Bits 0, 8, 16 and 24: are the entries of a block at `place` and every 8 columns on kept?
  __device__ uint32_t kept_at(int block, int place) const {
    const RandomWords words(static_cast<uint32_t>(block), query_ / 16, head_,
                            query_ % 8 * 8 + static_cast<uint32_t>(place), seed_);
    const bool is_low = query_ / 8 % 2 == 0;
    const uint32_t first = is_low ? words.words[0] : words.words[2],
                   second = is_low ? words.words[1] : words.words[3];
    // The sum of a half has its highest bit where the entry is kept.
    const auto sums = [&](uint32_t word) { return (word & 0x7fff7fff) + complement_; };
    return bytes_of_signs(sums(first), sums(second)) & 0x01010101;
  }

  uint64_t seed_;
  uint32_t complement_, head_, query_;
};

}  // namespace megasoftmax
