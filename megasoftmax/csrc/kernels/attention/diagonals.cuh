#pragma once
// Sums along diagonals of a tile of gradients of scores, for the gradient of a table.

#include "../common/ptx.cuh"
#include "../common/vector.cuh"
#include "fragments.cuh"
#include "sm80/tile.cuh"

namespace megasoftmax {

// Gradient by gradient. `Scores` tells where they lie.
template <class Scores>
struct SumsOneByOne {
  using T = typename Scores::Element;
  static constexpr int kKeys = Scores::kKeys, kQueries = Scores::kQueries;
  static constexpr int kCount = kKeys + kQueries - 1;

  // Of a diagonal, with a number from that of the last query and the first key on.
  __device__ static float sum(uint32_t scores, int number) {
    const int distance = number - (kQueries - 1);
    const int end = min(kQueries, kKeys - distance);
    float sum = 0.f;
#pragma unroll 1
    for (int query = max(-distance, 0); query < end; ++query) {
      const uint32_t place = scores + Scores::place(query + distance, query);
      Pack<T, 4 / sizeof(T)> word;
      word.words[0] = load_word(place / 4 * 4);
      sum += place % 4 == 0 ? word[0] : word[sizeof(T) == 2];
    }
    return sum;
  }
};

// Of a tile in 16 bits, by kWarps warps. First blocks of 8 x 8 gradients that lie diagonally behind
// each other are added up, by products with ones where kHasProducts; then the diagonals of these
// sums.
template <class Scores, int kWarps, bool kHasProducts>
struct SumsOfDiagonals {
  using T = typename Scores::Element;
  using OneByOne = SumsOneByOne<Scores>;
  static constexpr int kKeys = Scores::kKeys, kQueries = Scores::kQueries;
  static constexpr int kCount = OneByOne::kCount;
  static constexpr int kKeyBlocks = kKeys / 8, kQueryBlocks = kQueries / 8;
  // Sums are followed and led by a block of zeros. Of a block 8 rows, and space: so a thread each
  // for neighbouring diagonals reads another bank.
  static constexpr int kBlocks = kKeyBlocks + kQueryBlocks + 1, kPitch = 72;
  static constexpr int kBytes = kBlocks * kPitch * 4;
  static_assert(kKeyBlocks % 4 == 0 && kQueryBlocks % 4 == 0 && kQueryBlocks <= kKeyBlocks);

  float* sums;

  // By 64 threads, for all.
  __device__ void clear(int thread) const {
    if (thread < 64) sums[thread] = sums[(kBlocks - 1) * kPitch + thread] = 0.f;
  }
  // Four blocks at a time. Behind the last key comes the first one again: up to there the keys of a
  // block are `first` eights after its queries, then kKeyBlocks less.
  __device__ __forceinline__ void add_blocks(uint32_t scores, int thread) const {
    constexpr int kFours = kQueryBlocks / 4, kFoursOfKeys = kKeyBlocks / 4;
    const int warp = thread / 32, row = thread % 8, block = thread / 8 % 4;
    const FirstElement mine(thread);
    const uint32_t ones = round_pair<T>(mine.row == mine.column, mine.row == mine.column + 1);
    const uint32_t zeros = shared_address(sums + (kBlocks - 1) * kPitch);
#pragma unroll 1
    for (int i = warp % 4; i < 4; i += kWarps) {
#pragma unroll
      for (int four = 0; four < kFoursOfKeys; ++four) {
        if (kWarps > 4 && four % (kWarps / 4) != warp / 4) continue;
        const auto add = [&](int begin, int end, int distance, bool is_behind) {
          uint32_t loaded[kFours][4];
#pragma unroll
          for (int j = begin; j < end; ++j) {
            uint32_t from = scores + Scores::row_of_block((4 * (four + j) + i + block) % kKeyBlocks,
                                                          4 * j + block, row);
            // The keys end among these blocks.
            if (four + j == kFoursOfKeys - 1 && (i + block >= 4) != is_behind) from = zeros;
            load_matrices(loaded[j], from);
          }
          float sum[4] = {};
#pragma unroll
          for (int j = begin; j < end; ++j) add_four(sum, loaded[j], ones);
          store(sums + (distance + kQueryBlocks) * kPitch, mine, sum[0] + sum[2], sum[1] + sum[3]);
        };
        const int first = 4 * four + i;
        add(0, std::min(kFours, kFoursOfKeys - four), first, false);
        if (kFoursOfKeys - four <= kFours)
          add(kFoursOfKeys - 1 - four, kFours, first - kKeyBlocks, true);
      }
    }
  }
  // The same as one by one, when all threads have added blocks.
  __device__ __forceinline__ float sum(uint32_t scores, int number) const {
    const int offset = (number + 1) % 8;
    const float* const block = sums + (number + 1) / 8 * kPitch + offset;
    const float* const next_block = block + kPitch - 8;
    float sum = 0.f;
#pragma unroll
    for (int row = 0; row < 8; ++row) sum += (row + offset < 8 ? block : next_block)[row * 9];
    // Products spread what is not finite to neighbours in its row.
    return kHasProducts && !(fabsf(sum) < INFINITY) ? OneByOne::sum(scores, number) : sum;
  }

 private:
  // Adds up a lane's gradients of four blocks: elements 0 and 2 of `sum` together are the sum of
  // the first of each block, 1 and 3 that of the second.
  __device__ static void add_four(float (&sum)[4], const uint32_t (&blocks)[4], uint32_t ones) {
    if constexpr (kHasProducts) {
      multiply_add<T>(sum, blocks, ones, ones);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Pack<T, 2> pair;
        pair.words[0] = blocks[i];
        sum[i % 2 * 2] += pair[0];
        sum[i % 2 * 2 + 1] += pair[1];
      }
    }
  }
  // A lane's two neighbours to a block of sums, which has queries in rows.
  __device__ static void store(float* block, const FirstElement& mine, float first, float second) {
    if constexpr (Scores::kHasKeysInRows) {
      block += mine.column * 8 + mine.row;
      block[0] = first;
      block[8] = second;
    } else {
      *reinterpret_cast<float2*>(block + mine.row * 8 + mine.column) = make_float2(first, second);
    }
  }
};

}  // namespace megasoftmax
