#pragma once
// Dropout of a warp's weights. The random bits of two neighbours are the halves of one word,
// because instructions of common/ptx.cuh compare both halves at once.

#include "../common/dropout.cuh"
#include "fragments.cuh"
#include "params.h"

namespace megasoftmax {

// Random bits of 2 x 4 pairs that lie 8 queries and 8 keys apart.
struct RandomPairs {
  RandomWords left, right;

  __device__ uint32_t halves(int query_step, int key_step) const {
    const int word = query_step * 2 + key_step / 2;
    return __byte_perm(left.words[word], right.words[word], key_step % 2 == 0 ? 0x5410 : 0x7632);
  }
};

// Dropout of a head. Queries are in rows, or in columns.
template <bool kKeysInRows>
class Dropping {
 public:
  uint32_t least;  // in both halves: what is below is dropped

  // The seed, or 0 without dropout. All lanes of the warp must call it, also through a constructor
  // without a seed. `uniform` runs without dropout too: when it stood under the condition of the
  // load, ptxas of CUDA 13.0 negated the predicate of its instruction, REDUX. Callers under a
  // condition, such as the one of KeptBits, rely on this.
  __device__ static uint64_t seed(const AttentionParams& params) {
    const int64_t seed = params.dropout.is_given() ? __ldg(params.dropout.seed) : 0;
    return uniform(static_cast<uint64_t>(seed));
  }
  __device__ Dropping(const AttentionParams& params, int batch, int head)
      : Dropping(params, batch, head, seed(params)) {}
  __device__ Dropping(const AttentionParams& params, int batch, int head, uint64_t seed)
      : least(params.dropout.threshold * 0x10001),
        head_(static_cast<uint32_t>(batch * params.heads + head)),
        seed_(seed) {}

  // Random bits of this lane's first column of 16 queries and 32 keys, or of the column to the
  // right of it, and of the columns that follow. The first query and the first key are multiples of
  // 16. They change the counter of Philox, and the lane changes only the place.
  __device__ RandomWords words(int first_query, int first_key, int right) const {
    const FirstElement mine;
    const int row = mine.row, column = mine.column + right;
    return RandomWords(static_cast<uint32_t>(first_key) / 32,
                       static_cast<uint32_t>(first_query) / 16, head_,
                       kKeysInRows ? column * 8 + row : row * 8 + column, seed_);
  }
  __device__ RandomPairs pairs(int first_query, int first_key) const {
    return {words(first_query, first_key, 0), words(first_query, first_key, 1)};
  }

  // Calls body(m, n, half, halves) for this lane's pairs of keys in rows: elements 2 * half and the
  // next of [m][n]. `first_query` is a multiple of 16, `first_key` of 32, or of 16 if rows are 16
  // keys.
  template <int kM, int kN, class Body>
  __device__ __forceinline__ void for_each_pair(int first_query, int first_key, Body&& body) const {
    static_assert(kKeysInRows && kM <= 2 && kN % 2 == 0);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const RandomPairs random = pairs(first_query + n * 8, first_key);
#pragma unroll
      for (int query_step = 0; query_step < 2; ++query_step) {
#pragma unroll
        for (int key_step = 0; key_step < 2 * kM; ++key_step) {
          uint32_t halves = random.halves(query_step, key_step);
          if constexpr (kM == 1) {
            if (first_key % 32 != 0) halves = random.halves(query_step, 2 + key_step);
          }
          body(key_step / 2, n + query_step, key_step % 2, halves);
        }
      }
    }
  }

  // Clears dropped weights of 16 queries in rows and 32 keys, from group `n` of 8 keys on. A word
  // has two keys that lie 8 apart.
  template <int kN>
  __device__ __forceinline__ void clear(float (&weights)[kN][4], int n,
                                        const RandomPairs& random) const {
    static_assert(!kKeysInRows && kN % 4 == 0);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int first = n + word % 2 * 2, i = word / 2 * 2;
      clear_below(weights[first][i], weights[first + 1][i], random.left.words[word], least);
      clear_below(weights[first][i + 1], weights[first + 1][i + 1], random.right.words[word],
                  least);
    }
  }
  // Clears what is dropped of all weights of a tile, or of their gradients.
  template <int kM, int kN>
  __device__ __forceinline__ void clear(Accumulators<kM, kN>& weights, int first_query,
                                        int first_key) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; n += 4)
        clear(weights[m], n, pairs(first_query + m * 16, first_key + n * 8));
    }
  }

 private:
  uint32_t head_;
  uint64_t seed_;
};

// Clears dropped weights of kM * 16 queries and the keys of a tile, rounded to pairs, on the way to
// a product (multiply_weights).
template <int kM>
class DropOfRounded {
 public:
  __device__ DropOfRounded(const AttentionParams& params, int batch, int head, int first_query,
                           int first_key)
      : dropping_(params, batch, head), first_query_(first_query), first_key_(first_key) {}

  // Clears those of matrix `a` m and of a step of 16 keys. Steps come in order.
  __device__ void operator()(uint32_t (&a)[4], int m, int step) {
    if (step % 2 == 0) pairs_[m] = dropping_.pairs(first_query_ + m * 16, first_key_ + step * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] &= halves_from(pairs_[m].halves(i % 2, step % 2 * 2 + i / 2), dropping_.least);
  }

 private:
  Dropping<false> dropping_;
  int first_query_, first_key_;
  RandomPairs pairs_[kM];
};

}  // namespace megasoftmax
