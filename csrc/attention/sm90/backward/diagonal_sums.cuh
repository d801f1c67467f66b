#pragma once
// Sums of gradients of scores along diagonals of a tile, for the gradient of a relative bias.

#include "../../../common/math.cuh"
#include "../../fragments.cuh"
#include "../../sm80/tile.cuh"
#include "../ptx.cuh"

namespace megasoftmax {

// Sums tiles of gradients of scores along diagonals, by the warps of a warpgroup. The tiles are
// swizzled for products. First, products with ones add up blocks of 8 x 8 gradients that lie on a
// diagonal of blocks. Then the diagonals of these sums are added up.
template <int kKeys, int kQueries>
struct SumsOfDiagonals {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kKeyBlocks = kKeys / 8, kQueryBlocks = kQueries / 8;
  // A block of zeros precedes and follows the sums. A block has 8 rows and padding, so that threads
  // of neighbouring diagonals read different banks.
  static constexpr int kBlocks = kKeyBlocks + kQueryBlocks + 1, kPitch = 72;
  static constexpr int kBytes = kBlocks * kPitch * 4;
  static constexpr int kPanelBytes = kQueries * 128;
  static_assert(kKeyBlocks == 16 && kQueryBlocks % 4 == 0 && kQueryBlocks <= kKeyBlocks);

  float* sums;

  __device__ static int thread() { return thread_index_anew() % kThreads; }
  // Called by all warps after a barrier.
  __device__ void clear() const {
    const int thread = this->thread();
    if (thread < kPitch) sums[thread] = sums[(kBlocks - 1) * kPitch + thread] = 0.f;
  }
  // Clears the diagonals of a tile of keys and all queries. A thread clears those that it adds to
  // later, so that no barrier is needed.
  __device__ static void clear(float* diagonals, int queries) {
    for (int i = (thread() + queries + kThreads - kQueries) % kThreads; i < kKeys - 1 + queries;
         i += kThreads)
      diagonals[i] = 0.f;
  }
  // Adds up four blocks at a time. After the last key the first one follows: up to there the keys
  // of a block are `first` eights after its queries, then 16 eights less.
  template <class T>
  __device__ __forceinline__ void add_blocks(uint32_t scores) const {
    constexpr int kFours = kQueryBlocks / 4;
    const uint32_t thread = this->thread(), row = thread % 8, block = thread / 8 % 4;
    const FirstElement mine(thread);
    const uint32_t ones = round_pair<T>(mine.row == mine.column, mine.row == mine.column + 1);
    const uint32_t zeros = shared_address(sums + (kBlocks - 1) * kPitch);
    const uint32_t first_of_row = scores + (block * 8 + row) * 128;
    float* const place = sums + mine.row * 8 + mine.column;
    const uint32_t i = thread / 32;
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const auto add = [&](int begin, int end, int distance, bool is_behind) {
        uint32_t loaded[kFours][4];
#pragma unroll
        for (int j = begin; j < end; ++j) {
          const uint32_t vector = (4 * (four + j) + i + block) % 16;
          uint32_t from =
              first_of_row + j * 4096 + vector / 8 * kPanelBytes + (vector % 8 ^ row) * 16;
          // The last key is in these blocks.
          if (four + j == 3 && (i + block >= 4) != is_behind) from = zeros;
          load_matrices(loaded[j], from);
        }
        float sum[4] = {};
#pragma unroll
        for (int j = begin; j < end; ++j) multiply_add<T>(sum, loaded[j], ones, ones);
        *reinterpret_cast<float2*>(place + (distance + kQueryBlocks) * kPitch) =
            make_float2(sum[0] + sum[2], sum[1] + sum[3]);
      };
      const int first = 4 * four + i;
      add(0, std::min(kFours, 4 - four), first, false);
      if (4 - four <= kFours) add(3 - four, kFours, first - 16, true);
    }
  }
  // Adds the sums to `diagonals`. The diagonal of the tile's first query and key is number `queries
  // - 1 - query`. The same thread always adds to a diagonal, and so in the same order.
  template <class T>
  __device__ __forceinline__ void add_to(float* diagonals, int queries, int query,
                                         uint32_t scores) const {
    constexpr int kCount = kKeys + kQueries - 1;
#pragma unroll 1
    for (int i = (thread() + query) % kThreads; i < kCount; i += kThreads) {
      const int distance = i - (kQueries - 1), number = queries - 1 - query + distance;
      if (number < 0) continue;
      const int offset = (i + 1) % 8;
      const float* const block = sums + (i + 1) / 8 * kPitch + offset;
      const float* const next_block = block + kPitch - 8;
      float sum = 0.f;
#pragma unroll
      for (int row = 0; row < 8; ++row) sum += (row + offset < 8 ? block : next_block)[row * 9];
      // A gradient that is not finite spreads to its row in a product, so such diagonals are summed
      // again.
      if (!(fabsf(sum) < INFINITY)) sum = sum_of<T>(scores, distance);
      add_to_global(diagonals + number, sum);
    }
  }

 private:
  // Sums one diagonal, gradient by gradient.
  template <class T>
  __device__ static float sum_of(uint32_t scores, int distance) {
    float sum = 0.f;
    const int end = min(kQueries, kKeys - distance);
#pragma unroll 1
    for (int query = max(-distance, 0); query < end; ++query) {
      const int key = query + distance;
      Pack<T, 2> pair;
      pair.words[0] = load_word(scores + key / 64 * kPanelBytes +
                                Tile<T, kQueries, 64>::place(query, key % 64 / 2 * 2));
      sum += key % 2 == 0 ? pair[0] : pair[1];
    }
    return sum;
  }
};

}  // namespace megasoftmax
