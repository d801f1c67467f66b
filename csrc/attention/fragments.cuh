#pragma once
// Results of matrix instructions: which lane of a warp holds which element.

#include "../common/ptx.cuh"
#include "../common/vector.cuh"

namespace megasoftmax {

// kM * 16 rows and kN * 8 columns of a warp. A lane's element [m][n][i] lies row_offset(m, i) rows
// and column_offset(n, i) columns from the lane's first element. Elements 2 * half and the next are
// neighbours in one row.
template <int kM, int kN>
using Accumulators = float[kM][kN][4];

__host__ __device__ constexpr int row_offset(int m, int i) { return m * 16 + i / 2 * 8; }
__host__ __device__ constexpr int column_offset(int n, int i) { return n * 8 + i % 2; }

// Where a lane's first element lies. The four lanes from a multiple of 4 on share their rows.
struct FirstElement {
  int row, column;

  __device__ explicit FirstElement(unsigned thread = thread_index_anew())
      : row(thread % 32 / 4), column(thread % 4 * 2) {}
};

// The sum over the lanes that share a row.
__device__ inline float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Two neighbours as a tile has them. 16-bit ones are one word, an operand of a matrix instruction.
template <class T>
using Pair = std::conditional_t<sizeof(T) == 2, uint32_t, float2>;

template <class T>
__device__ inline Pair<T> round_pair(float first, float second) {
  if constexpr (sizeof(T) == 4) {
    return {first, second};
  } else {
    return Pack<T, 2>::round({first, second}).words[0];
  }
}

// round_pair after negative numbers became 0. NaN stays.
template <class T>
__device__ inline Pair<T> round_positive_pair(float first, float second) {
  Pair<T> pair;
  if constexpr (sizeof(T) == 4) {
    pair = {first < 0.f ? 0.f : first, second < 0.f ? 0.f : second};
  } else if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// What a step of a matrix instruction sums over: 32 bytes of a row.
template <class T>
inline constexpr int kStep = 32 / static_cast<int>(sizeof(T));

// Columns kStep<T> * step and on of a result as a matrix `a`. If kArePositive, negative elements
// become 0. With 32-bit elements, columns 2 * i and 2 * i + 1 take the places of columns i and i +
// 4 of the matrix, so that each lane has what it needs. The matrix `b` has its rows in the same
// order.
template <class T, bool kArePositive = false, int kN>
__device__ inline void as_matrix_a(uint32_t (&a)[4], const float (&results)[kN][4], int step) {
  if constexpr (sizeof(T) == 4) {
    static_assert(!kArePositive);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(results[step][i % 2 * 2 + i / 2]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = results[2 * step + i / 2] + i % 2 * 2;
      a[i] =
          kArePositive ? round_positive_pair<T>(pair[0], pair[1]) : round_pair<T>(pair[0], pair[1]);
    }
  }
}

}  // namespace megasoftmax
