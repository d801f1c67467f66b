// Merges what queries make of two parts of their keys.

#include "../common/launch.cuh"
#include "../common/vector.cuh"
#include "attention.h"

namespace megasoftmax {
namespace {

constexpr int kMergeThreads = 256;

// Entries of a row, as many as one access takes: some of 4 or 8 bytes at least, or one.
template <class T, int kCount>
struct Entries {
  static __device__ void load(const T* from, float (&values)[kCount]) {
    if constexpr (kCount == 1) {
      values[0] = static_cast<float>(*from);
    } else {
      const auto pack = *reinterpret_cast<const Pack<T, kCount>*>(from);
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = pack[i];
    }
  }
  static __device__ void store(T* to, const float (&values)[kCount]) {
    if constexpr (kCount == 1) {
      *to = static_cast<T>(values[0]);
    } else {
      *reinterpret_cast<Pack<T, kCount>*>(to) = Pack<T, kCount>::round(values);
    }
  }
};

// A warp for each row; a lane takes kCount columns at a time. What is computed is in
// reference/attention.py.
template <class Sum, class T, int kCount>
__global__ void __launch_bounds__(kMergeThreads)
    attention_merge_kernel(const __grid_constant__ MergeParams params) {
  const int64_t row = (int64_t{blockIdx.x} * kMergeThreads + threadIdx.x) / 32;
  if (row >= params.rows) return;
  int64_t of_head, query, batch, head;
  params.queries.split(row, of_head, query);
  params.heads.split(of_head, batch, head);
  float* const mine = params.statistics.row<float>(batch, head, query);
  const float* const others = params.other_statistics.row<float>(batch, head, query);
  const float max = mine[0], other_max = others[0];
  float log_sum = mine[params.statistics.column_stride],
        other_log_sum = others[params.other_statistics.column_stride];
  float of_both = fmaxf(max, other_max);
  if (other_log_sum == -INFINITY) of_both = max;
  if (log_sum == -INFINITY) of_both = other_max;
  if (log_sum != -INFINITY) log_sum += max - of_both;
  if (other_log_sum != -INFINITY) other_log_sum += other_max - of_both;
  const float larger = fmaxf(log_sum, other_log_sum);
  const bool is_empty = log_sum == -INFINITY && other_log_sum == -INFINITY;
  const float total = is_empty ? -INFINITY : larger + log1pf(expf(-fabsf(log_sum - other_log_sum)));
  const float kept = is_empty ? 0.f : expf(log_sum - total);
  const float share = is_empty ? 0.f : expf(other_log_sum - total);

  Sum* const output = params.output.row<Sum>(batch, head, query);
  const T* const other = params.other_output.row<T>(batch, head, query);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int column = lane * kCount; column < params.columns; column += 32 * kCount) {
    float values[kCount], more[kCount];
    Entries<Sum, kCount>::load(output + column, values);
    Entries<T, kCount>::load(other + column, more);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = fmaf(more[i], share, values[i] * kept);
    Entries<Sum, kCount>::store(output + column, values);
  }
  __syncwarp();  // all lanes have read the statistics
  if (lane != 0) return;
  mine[0] = of_both;
  mine[params.statistics.column_stride] = total;
  mine[2 * params.statistics.column_stride] = of_both + total;
}

// Whether accesses of 4 columns begin where they may, in the row of every query.
bool are_aligned(const Strided& rows, int64_t columns) {
  const int size = size_of(rows.type);
  return (rows.batch_stride | rows.head_stride | rows.query_stride | columns) % 4 == 0 &&
         reinterpret_cast<uintptr_t>(rows.data) % (4 * size) == 0;
}

template <class Sum, class T>
cudaError_t launch_merge(const MergeParams& params, cudaStream_t stream) {
  const bool has_packs = are_aligned(params.output, params.columns) &&
                         are_aligned(params.other_output, params.columns);
  const auto kernel =
      has_packs ? attention_merge_kernel<Sum, T, 4> : attention_merge_kernel<Sum, T, 1>;
  const int64_t blocks = divide_up<int64_t>(params.rows, kMergeThreads / 32);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kMergeThreads), 0, Together::kNot,
                1, stream, params);
}

}  // namespace

cudaError_t attention_merge(const MergeParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  return with_dtype(params.other_output.type, [&](auto of_type) {
    using T = decltype(of_type);
    return params.output.type == DType::kFloat32 ? launch_merge<float, T>(params, stream)
                                                 : launch_merge<T, T>(params, stream);
  });
}

}  // namespace megasoftmax
