#pragma once
// What both kernels of Hopper's backward do with a tile.

#include "../../fragments.cuh"
#include "../../params.h"
#include "memory.cuh"

namespace megasoftmax {

// Writes columns 32 * side and on of 64 rows of results of a warpgroup to a panel of 32 columns,
// swizzled as tensor copies read it. If only 16 columns are left, the others keep what was there:
// they lie outside of the tensor.
template <int kN>
__device__ __forceinline__ void store_sums(char* panel, const float (&results)[kN][4], int side) {
  const FirstElement mine;
  const int warp = thread_index_anew() / 32 % 4;
  // Odd rows take columns in another order, 16 apart. Otherwise two rows would meet in one bank.
  const int eights = std::min(4, kN - 4 * side);  // of columns
  const bool is_odd = mine.row % 2 != 0 && eights == 4;
  const int vector = (is_odd ? 4 : 0) ^ mine.column / 4 ^ mine.row;
  const int first = (warp * 16 + mine.row) * 128 + vector * 16 + mine.column % 4 * 4;
#pragma unroll
  for (int n = 0; n < eights; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto result = [&](int i) {
        return is_odd ? results[4 * side + (n ^ 2) % eights][2 * half + i]
                      : results[4 * side + n][2 * half + i];
      };
      *reinterpret_cast<float2*>(panel + (first ^ n * 32) + half * 1024) =
          make_float2(result(0), result(1));
    }
  }
}

// Starts to add the sums of a warpgroup, a part of dQ of a tile, to those in global memory, or to
// write them. Called by one thread. `batch`: see AttentionBackwardParams::batch_of_sums.
template <bool kWrites, class Memory>
__device__ __forceinline__ void start_sums(const BackwardTensorMaps& maps, const Memory& memory,
                                           int warpgroup, int head, int query, int batch) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int column = 64 * Memory::column_panel(warpgroup) + 32 * side;
    if (column >= Memory::kDim) continue;
    constexpr auto start = kWrites ? start_store_of_box : start_sum_of_box;
    start(maps.query_gradient_sum, memory.sums(warpgroup) + side * Memory::kSumPanelBytes, column,
          query + 64 * Memory::query_panel(warpgroup), head, batch);
  }
  end_stores();
}

// Starts to copy the keys and values of a block. Called by one thread.
template <class Memory>
__device__ __forceinline__ void start_copy_of_keys(const Memory& memory,
                                                   const BackwardTensorMaps& maps, int first_key,
                                                   int key_head, int batch) {
  const Barrier there = memory.keys_are_there();
  there.arrive_and_expect(Memory::kKeyBytes + Memory::kValueBytes);
  start_copy_of_panels<Memory::kPanels>(memory.keys(), maps.key, there, Memory::kKeys, first_key,
                                        key_head, batch);
  start_copy_of_panels<Memory::kValuePanels>(memory.values(), maps.value, there, Memory::kKeys,
                                             first_key, key_head, batch);
}

// The gradient of a score from a weight, which is negative if dropout drops it, and its gradient.
template <bool kMayDrop>
__device__ __forceinline__ float score_gradient(float gradient, float weight, float delta,
                                                float dropout_factor) {
  if constexpr (!kMayDrop) return (gradient - delta) * weight;
  return fmaf(weight < 0.f ? 0.f : gradient, dropout_factor, -delta) * fabsf(weight);
}
// Calls body.operator()<does a launch drop weights?>().
template <bool kIsUnmasked, class Body>
__device__ __forceinline__ void with_dropout(const AttentionParams& params, Body&& body) {
  if (!kIsUnmasked && params.dropout.seed != nullptr) {
    body.template operator()<!kIsUnmasked>();
  } else {
    body.template operator()<false>();
  }
}

}  // namespace megasoftmax
