#pragma once
// Dropout of a warp's weights.

#include "../common/dropout.cuh"
#include "fragments.cuh"
#include "params.h"

namespace megasoftmax {

// Calls drop(m, n, i) for this lane's elements that are dropped, of queries from `first_query` and
// keys from `first_key` on, multiples of 16 and 32, in rows or in columns.
template <bool kKeysInRows, int kM, int kN, class Drop>
__device__ __forceinline__ void for_each_dropped(const AttentionParams& params, int batch, int head,
                                                 int first_query, int first_key, Drop&& drop) {
  static_assert(kKeysInRows ? kM == 2 && kN % 2 == 0 : kN % 4 == 0);
  const FirstElement mine;
  const auto seed = static_cast<uint64_t>(__ldg(params.dropout.seed));
  const auto index = static_cast<uint32_t>(batch * params.heads + head);
  const uint32_t threshold = params.dropout.threshold;
  constexpr int kCalls = kKeysInRows ? kN / 2 : kM * kN / 4;
#pragma unroll
  for (int call = 0; call < kCalls; ++call) {
#pragma unroll
    for (int right = 0; right < 2; ++right) {
      const int m = kKeysInRows ? 0 : call / (kN / 4),
                n = kKeysInRows ? call * 2 : call % (kN / 4) * 4;
      const int row = mine.row + row_offset(m, 0), column = mine.column + column_offset(n, right);
      const RandomWords words =
          random_words(seed, index, first_query + (kKeysInRows ? column : row),
                       first_key + (kKeysInRows ? row : column));
#pragma unroll
      for (int query_step = 0; query_step < 2; ++query_step) {
#pragma unroll
        for (int key_step = 0; key_step < 4; ++key_step) {
          if (words.bits(query_step, key_step) >= threshold) continue;
          if constexpr (kKeysInRows) {
            drop(key_step / 2, n + query_step, key_step % 2 * 2 + right);
          } else {
            drop(m, n + key_step, query_step * 2 + right);
          }
        }
      }
    }
  }
}

}  // namespace megasoftmax
