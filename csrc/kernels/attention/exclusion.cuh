#pragma once
// Which keys a query does not see: by length, window and mask. Found before the product, while
// registers are free, and applied after it, so that nothing that a score holds matters where it is
// excluded.

#include "params.h"
#include "sm80/tile.cuh"

namespace megasoftmax {

struct KeyRange {
  int begin, end;

  __device__ bool contains(int key) const { return key >= begin && key < end; }
};

// By length and window.
__device__ inline KeyRange visible_keys(const AttentionParams& params, int query) {
  const int diagonal = query + params.keys - params.queries;
  return {
      params.window_left < 0 ? 0 : max(diagonal - params.window_left, 0),
      params.window_right < 0 ? params.keys : min(diagonal + params.window_right + 1, params.keys)};
}
// The queries that see a key; a range of them.
__device__ inline KeyRange visible_from(const AttentionParams& params, int key) {
  const int diagonal = key + params.queries - params.keys;
  return {params.window_right < 0 ? 0 : max(diagonal - params.window_right, 0),
          params.window_left < 0 ? params.queries
                                 : min(diagonal + params.window_left + 1, params.queries)};
}

// A bit for each of a lane's elements.
template <int kM, int kN>
struct Excluded {
  static constexpr int kWords = kM * kN * 4 / 32 > 0 ? kM * kN * 4 / 32 : 1;
  uint32_t words[kWords] = {};

  __device__ void add(int m, int n, int i) {
    const int bit = (m * kN + n) * 4 + i;
    words[bit / 32] |= 1u << bit % 32;
  }
  __device__ bool has(int m, int n, int i) const {
    const int bit = (m * kN + n) * 4 + i;
    return (words[bit / 32] >> bit % 32 & 1) != 0;
  }
  __device__ bool any() const {
    uint32_t all = 0;
#pragma unroll
    for (const uint32_t word : words) all |= word;
    return all != 0;
  }

  // Adds those of queries from `first_query` and keys from `first_key` on, where queries are in
  // rows, or in columns, that are beyond the tensor, outside of the window, or masked.
  template <bool kKeysInRows>
  __device__ __forceinline__ void find(const AttentionParams& params, int batch, int head,
                                       int first_query, int first_key) {
    const int lane = thread_index_anew() % 32;
    const auto for_each = [&](auto&& excludes) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = m * 16 + i / 2 * 8 + lane / 4, column = n * 8 + lane % 4 * 2 + i % 2;
            if (excludes(first_query + (kKeysInRows ? column : row),
                         first_key + (kKeysInRows ? row : column)))
              add(m, n, i);
          }
        }
      }
    };
    for_each([&](int query, int key) {
      return !visible_keys(params, query).contains(key) || query >= params.queries;
    });
    if (params.mask.data == nullptr) return;
    const bool* const mask = params.mask.row<const bool>(batch, head, 0);
    for_each([&](int query, int key) {
      return mask[min(query, params.queries - 1) * params.mask.query_stride +
                  min(key, params.keys - 1) * params.mask.column_stride];
    });
  }

  __device__ __forceinline__ void apply(Accumulators<kM, kN>& elements, float value) const {
    if (!any()) return;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (has(m, n, i)) elements[m][n][i] = value;
        }
      }
    }
  }
};

}  // namespace megasoftmax
