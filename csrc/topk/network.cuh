#pragma once
// Sorting networks: the longest of a thread's keys in registers, without a branch.

#include <cstdint>

namespace megasoftmax {

template <class Key>
__device__ inline void put_in_order(Key& larger, Key& smaller) {
  const Key a = larger, b = smaller;
  larger = max(a, b);
  smaller = min(a, b);
}

// Batcher's odd-even merge sort: 5 comparisons for 4 keys, 19 for 8, 63 for 16. Largest first.
// Sorted blocks of kBlock keys are merged in steps; recursion, since such loops are not unrolled.
template <int kBlock = 1, int kStep = kBlock, class Key, int kCount>
__device__ __forceinline__ void sort(Key (&keys)[kCount]) {
  static_assert((kCount & (kCount - 1)) == 0);
  if constexpr (kBlock < kCount) {
#pragma unroll
    for (int i = 0; i + kStep < kCount; ++i) {
      const int offset = i - kStep % kBlock;
      if (offset >= 0 && offset % (2 * kStep) < kStep &&
          i / (2 * kBlock) == (i + kStep) / (2 * kBlock))
        put_in_order(keys[i], keys[i + kStep]);
    }
    if constexpr (kStep > 1) {
      sort<kBlock, kStep / 2>(keys);
    } else {
      sort<2 * kBlock>(keys);
    }
  }
}

// The largest of two sorted lists, sorted: keeps the larger of the i-th best of one and the i-th
// worst of the other, which rises and then falls or falls and then rises, and sorts that.
template <class Key, int kCount>
__device__ inline void merge_sorted(Key (&best)[kCount], const Key (&others)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) best[i] = max(best[i], others[kCount - 1 - i]);
#pragma unroll
  for (int step = kCount / 2; step >= 1; step /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((i & step) == 0) put_in_order(best[i], best[i + step]);
    }
  }
}

}  // namespace megasoftmax
