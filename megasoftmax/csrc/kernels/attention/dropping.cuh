#pragma once
// Dropout of a warp's weights. What decides over two neighbours lies in the halves of one word, for
// the instructions of common/ptx.cuh that compare both.

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

// An element of a lane's accumulators.
struct Element {
  int m, n, i;
};

// Of a head. Queries are in rows, or in columns.
template <bool kKeysInRows>
class Dropping {
 public:
  uint32_t least;  // in both halves: what is below is dropped

  // All lanes of the warp must come here.
  __device__ Dropping(const AttentionParams& params, int batch, int head)
      : least(params.dropout.threshold * 0x10001),
        head_(static_cast<uint32_t>(batch * params.heads + head)),
        seed_(uniform(static_cast<uint64_t>(__ldg(params.dropout.seed)))) {}

  // Of this lane's first pair of 16 queries and 32 keys, and of those further on. The first query
  // is a multiple of 16, the first key too: the lane changes nothing but the place.
  __device__ RandomPairs pairs(int first_query, int first_key) const {
    const FirstElement mine;
    const auto words = [&](int right) {
      const int row = mine.row, column = mine.column + right;
      return RandomWords(static_cast<uint32_t>(first_key) / 32,
                         static_cast<uint32_t>(first_query) / 16, head_,
                         kKeysInRows ? column * 8 + row : row * 8 + column, seed_);
    };
    return {words(0), words(1)};
  }

  // Calls body(first, second, halves) for this lane's elements of queries in rows, two keys that
  // lie 8 apart at a time, as the words have them.
  template <int kM, int kN, class Body>
  __device__ __forceinline__ void for_each_word(int first_query, int first_key, Body&& body) const {
    static_assert(!kKeysInRows && kN % 4 == 0);
#pragma unroll
    for (int call = 0; call < kM * kN / 4; ++call) {
      const int m = call / (kN / 4), n = call % (kN / 4) * 4;
      const RandomPairs random = pairs(first_query + m * 16, first_key + n * 8);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const Element first{m, n + word % 2 * 2, word / 2 * 2 + right};
          body(first, Element{m, first.n + 1, first.i},
               (right == 0 ? random.left : random.right).words[word]);
        }
      }
    }
  }

  // Calls body(m, n, half, halves) for this lane's pairs, elements 2 * half and the next of [m][n],
  // of queries from `first_query` and keys from `first_key` on, multiples of 16 and of 32, or of 16
  // where rows are 16 keys.
  template <int kM, int kN, class Body>
  __device__ __forceinline__ void for_each_pair(int first_query, int first_key, Body&& body) const {
    static_assert(kKeysInRows ? kM <= 2 && kN % 2 == 0 : kN % 4 == 0);
    constexpr int kCalls = kKeysInRows ? kN / 2 : kM * kN / 4;
#pragma unroll
    for (int call = 0; call < kCalls; ++call) {
      const int m = kKeysInRows ? 0 : call / (kN / 4),
                n = kKeysInRows ? call * 2 : call % (kN / 4) * 4;
      const int row = m * 16, column = n * 8;
      const RandomPairs random = pairs(first_query + (kKeysInRows ? column : row),
                                       first_key + (kKeysInRows ? row : column));
#pragma unroll
      for (int query_step = 0; query_step < 2; ++query_step) {
#pragma unroll
        for (int key_step = 0; key_step < (kKeysInRows ? 2 * kM : 4); ++key_step) {
          uint32_t halves = random.halves(query_step, key_step);
          if constexpr (kKeysInRows && kM == 1) {
            if (first_key % 32 != 0) halves = random.halves(query_step, 2 + key_step);
          }
          if constexpr (kKeysInRows) {
            body(key_step / 2, n + query_step, key_step % 2, halves);
          } else {
            body(m, n + key_step, query_step, halves);
          }
        }
      }
    }
  }

  // Clears what is dropped of weights, or of their gradients, with queries in rows.
  template <int kM, int kN>
  __device__ __forceinline__ void clear(Accumulators<kM, kN>& weights, int first_query,
                                        int first_key) const {
    for_each_pair<kM, kN>(first_query, first_key, [&](int m, int n, int half, uint32_t halves) {
      float* const pair = weights[m][n] + 2 * half;
      clear_below(pair[0], pair[1], halves, least);
    });
  }

 private:
  uint32_t head_;
  uint64_t seed_;
};

// Clears what is dropped of kM * 16 queries and the keys of a tile, rounded to pairs, on the way to
// a product (multiply_weights).
template <int kM>
class DropOfRounded {
 public:
  __device__ DropOfRounded(const AttentionParams& params, int batch, int head, int first_query,
                           int first_key)
      : dropping_(params, batch, head), first_query_(first_query), first_key_(first_key) {}

  // Of matrix `a` m, and of a step of 16 keys; steps come in their order.
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
