#pragma once
// Dropout of a row: which of its entries are kept, as common/dropout.cuh says.
//
// One call of Philox decides 2 x 4 entries, 8 rows and 8 columns apart. So 8 calls decide a block,
// 32 consecutive columns, of both rows. The lanes share out the calls of the blocks that rows see.
// A lane then has entries of one column of 8, and exchanges bits with others until it has those of
// its vectors, 8 consecutive columns: two or three shuffles for 32 entries. Vectors begin at
// blocks.
// The lanes of a warp have one row and use half of the words. If 16 lanes have a row, a warp has
// two rows, 8 apart, and uses all words.

#include <climits>

#include "../common/dropout.cuh"
#include "../common/ptx.cuh"
#include "row_vectors.cuh"

namespace megasoftmax {

// Without dropout.
struct AllEntries {
  template <int kEntries>
  struct Kept {
    template <class T, int kElements>
    __device__ void drop(int, Pack<T, kElements>&) const {}
  };
  template <int kElements>
  using Grid = LineGrid<kElements>;

  template <class Params>
  __device__ AllEntries(const Params&, const RowIndex&) {}
  template <class Params>
  __device__ static constexpr float factor(const Params&) {
    return 1.f;
  }
  template <int kLanes, bool kIsPair, int kElements, int kVectors>
  __device__ Kept<kElements * kVectors> of_tile(int, int) const {
    return {};
  }
};

// Vectors of a row from the beginning of a block on: the columns of block b begin at 32 * b, and of
// a row that is not aligned so do those behind the phase.
template <int kElements>
struct BlockGrid : VectorGrid<kElements> {
  __device__ static BlockGrid aligned_to(int64_t first_element, int columns) {
    return {VectorGrid<kElements>::aligned_to(first_element, columns)};
  }
  __device__ int begin(const Bounds& bounds) const {
    return (bounds.begin & -kDropoutColumns) - this->phase;
  }
};

// Bits of a lane's entries. Entry j of vector i has number e = i * kElements + j, and bit e / 4 % 8
// of byte e % 4 of word e / 32.
template <int kEntries>
struct KeptBits {
  static constexpr int kWords = (kEntries + 31) / 32;
  uint32_t words[kWords];

  // Zeros to the lanes of a pack, vector i, that are dropped.
  template <class T, int kElements>
  __device__ void drop(int i, Pack<T, kElements>& pack) const {
#pragma unroll
    for (int j = 0; j < kElements; j += 4) {
      const int four = (i * kElements + j) / 4;
      const uint32_t signs = words[kWords == 1 ? 0 : four / 8] << (7 - four % 8);
      if constexpr (sizeof(T) == 4) {
        pack.words[j] &= spread_signs<0x0000>(signs);
        pack.words[j + 1] &= spread_signs<0x1111>(signs);
        pack.words[j + 2] &= spread_signs<0x2222>(signs);
        pack.words[j + 3] &= spread_signs<0x3333>(signs);
      } else {
        pack.words[j / 2] &= spread_signs<0x1100>(signs);
        pack.words[j / 2 + 1] &= spread_signs<0x3322>(signs);
      }
    }
  }
};

class KeptEntries {
 public:
  template <int kElements>
  using Grid = BlockGrid<kElements>;
  template <int kEntries>
  using Kept = KeptBits<kEntries>;

  template <class Params>
  __device__ KeptEntries(const Params& params, const RowIndex& index)
      : seed_(params.dropout.is_given() ? uniform(static_cast<uint64_t>(__ldg(params.dropout.seed)))
                                        : 0),
        complement_((kDropoutSteps - params.dropout.threshold) * 0x10001),
        head_(
            static_cast<uint32_t>(index.batch * static_cast<int>(params.shape.heads) + index.head)),
        query_(static_cast<uint32_t>(index.query)) {}

  // What kept entries are multiplied by.
  template <class Params>
  __device__ static float factor(const Params& params) {
    return params.dropout.factor;
  }

  // Bits of the vectors from column `first` of a BlockGrid on, which kLanes lanes take in turn.
  // They are unspecified from `end` on. kIsPair: the two rows of a warp lie 8 apart, and `first` is
  // the same for both. kMayKeepAll: nothing may be dropped.
  template <int kLanes, bool kIsPair, int kElements, int kVectors, bool kMayKeepAll = false>
  __device__ KeptBits<kElements * kVectors> of_tile(int first, int end) const {
    static_assert(!kIsPair || kLanes == 16);
    constexpr int kStep = kPlaces / kElements;  // lanes for 8 columns
    constexpr int kCallsPerWord = kIsPair ? 4 : 8;
    constexpr int kCalls = kElements * kVectors * kCallsPerWord / 32;
    static_assert(kCalls % 2 == 0 && (kIsPair || kElements * kVectors <= 32));
    constexpr int kColumnsOfTwoCalls = kLanes * (kIsPair ? 16 : 8);

    KeptBits<kElements * kVectors> kept = {};
    if (kMayKeepAll && complement_ == kDropoutSteps * 0x10001) {
#pragma unroll
      for (uint32_t& word : kept.words) word = ~0u;
      return kept;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int first_block =
        static_cast<int>(static_cast<unsigned>(first + kDropoutColumns - 1) / kDropoutColumns);
    const int phase = first_block * kDropoutColumns - first;
    const int columns = largest_of_lanes(end - first);

    // Which calls this lane makes. Its vectors are those of lane / kStep % 4 of the steps of a
    // block.
    const int own_block = first_block + lane % (kIsPair ? 16 * kStep : kLanes) / (4 * kStep);
    const int own_place = lane / kStep % 4 +
                          4 * (kStep == 2 ? lane % 2
                               : kIsPair  ? lane / 16
                                          : 0) -
                          phase;
    const auto call = [&](int number) {
      constexpr bool kIsSplit = !kIsPair && kStep == 1;  // two calls for a vector of a lane
      const int block = own_block + (kIsPair    ? number * 4
                                     : kIsSplit ? (number >> 1) * (kLanes / 4)
                                                : number * (kLanes / 8));
      return bits_of_call<kIsPair>(block, (own_place + (kIsSplit ? (number & 1) * 4 : 0)) & 7,
                                   number);
    };
    const auto two_calls = [&](int number) { return call(number) | call(number + 1); };

#pragma unroll
    for (int number = 0; number < kCalls; number += 2) {
      if (number / 2 * kColumnsOfTwoCalls < columns)
        kept.words[number / kCallsPerWord] |= two_calls(number);
    }
#pragma unroll
    for (uint32_t& word : kept.words) word = exchanged<kIsPair, kStep>(word);
    if (phase > 0) {
      // The first entries of 8 columns are found 8 columns on: those of the lane before are theirs,
      // and of the first lane those of the last lane's vector before. Its first vector shows them
      // only in a warp tile that is not the row's first.
      constexpr int kBits = kElements / 4;  // of a vector in a byte
      constexpr uint32_t kLow = 0x01010101u * ((1 << kBits) - 1);
      uint32_t firsts = 0;
#pragma unroll
      for (int j = 0; j < kElements - 1; ++j)
        firsts |= j < phase ? (kElements == 8 ? 0x55u : 0xffu) << (j / 4 + j % 4 * 8) : 0u;
      const auto of_lane_before = [&](uint32_t word) {
        return __shfl_sync(kAllLanes, word, (lane - kStep) & (kLanes - 1), kLanes);
      };
      uint32_t before = kIsPair ? 0 : of_lane_before(exchanged<kIsPair, kStep>(two_calls(-2)));
#pragma unroll
      for (uint32_t& word : kept.words) {
        const uint32_t same = of_lane_before(word);
        const uint32_t shifted = (same << kBits & ~kLow) | (before >> (8 - kBits) & kLow);
        if (lane % kStep == 0)
          word = (word & ~firsts) | ((lane % kLanes == 0 ? shifted : same) & firsts);
        before = same;
      }
    }
    return kept;
  }

 private:
  static constexpr int kPlaces = 8;  // calls for a block
  static constexpr unsigned kAllLanes = 0xffffffffu;

  // Byte s of the result is of the entries of a block at `place` and 8 * s columns on: the bit of
  // this call, or of a pair two bits, of the lower row and of the one 8 further.
  template <bool kIsPair>
  __device__ uint32_t bits_of_call(int block, int place, int number) const {
    const RandomWords words(static_cast<uint32_t>(block), query_ / 16, head_,
                            query_ % 8 * 8 + static_cast<uint32_t>(place), seed_);
    // The sum of a half has its highest bit where the entry is kept.
    const auto sums = [&](uint32_t word) { return (word & 0x7fff7fff) + complement_; };
    const auto bytes = [&](uint32_t first, uint32_t second, int bit) {
      return bytes_of_signs(sums(first), sums(second)) & 0x01010101u << bit;
    };
    if constexpr (kIsPair) {
      return bytes(words.words[0], words.words[1], number % 4 * 2) |
             bytes(words.words[2], words.words[3], number % 4 * 2 + 1);
    } else {
      const bool is_low = query_ / 8 % 2 == 0;
      return bytes(is_low ? words.words[0] : words.words[2],
                   is_low ? words.words[1] : words.words[3], number & 7);
    }
  }

  // From entries of a column of 8, in bytes of steps, to those of a step, in bytes of columns: the
  // number of the byte, and of a pair the lowest bit of that of the bit, change places with bits of
  // the number of the lane.
  template <bool kIsPair, int kStep>
  __device__ static uint32_t exchanged(uint32_t word) {
    const auto lane = static_cast<uint32_t>(threadIdx.x) % 32;
    const auto other = [&](int distance) { return __shfl_xor_sync(kAllLanes, word, distance); };
    word = __byte_perm(word, other(2 * kStep), (lane & 2 * kStep) == 0 ? 0x5410 : 0x3276);
    word = __byte_perm(word, other(kStep), (lane & kStep) == 0 ? 0x6240 : 0x3715);
    if constexpr (kIsPair) {
      const bool is_lower = lane < 16;
      const uint32_t own = is_lower ? 0x55555555u : 0xaaaaaaaau, from = other(16);
      word = (word & own) | (__funnelshift_l(from, from, is_lower ? 1 : 31) & ~own);
    }
    return word;
  }

  uint64_t seed_;
  uint32_t complement_, head_, query_;
};

// Queries of pairs come in this order: 0, 8, 1, 9, 2 ... of each 16.
__device__ inline int query_in_pairs(int number) {
  return (number & ~15) | (number >> 1 & 7) | (number & 1) << 3;
}
__device__ inline int lower_of_pair(int query) { return query & ~8; }

}  // namespace megasoftmax
