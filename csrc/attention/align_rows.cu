// Copies 16-bit rows to where they begin at multiples of 16 bytes.

#include "../common/launch.cuh"
#include "attention.h"

namespace megasoftmax {
namespace {

constexpr int kAlignThreads = 256;

struct AlignParams {
  const uint16_t* from;
  uint4* to;
  int64_t count;                    // of vectors
  Divider vectors, queries, heads;  // of a row, of a head, of a batch
  int64_t batch_stride, head_stride, query_stride;
  int columns;
};

// Two neighbours of a row from number `first` on, which begin at a multiple of 4 bytes. What lies
// beyond the row is 0.
__device__ uint32_t load_pair(const uint16_t* row, int first, int columns) {
  if (first >= 0 && first + 1 < columns) return *reinterpret_cast<const uint32_t*>(row + first);
  const auto entry = [&](int i) { return i >= 0 && i < columns ? uint32_t{row[i]} : 0; };
  return entry(first) | entry(first + 1) << 16;
}

// A vector for each thread.
__global__ void __launch_bounds__(kAlignThreads)
    attention_align_rows_kernel(const __grid_constant__ AlignParams params) {
  const int64_t place = int64_t{blockIdx.x} * kAlignThreads + threadIdx.x;
  if (place >= params.count) return;
  int64_t row, vector, of_head, query, batch, head;
  params.vectors.split(place, row, vector);
  params.queries.split(row, of_head, query);
  params.heads.split(of_head, batch, head);
  const uint16_t* const from = params.from + batch * params.batch_stride +
                               head * params.head_stride + query * params.query_stride;
  const int first = static_cast<int>(vector) * 8;
  const bool is_odd = reinterpret_cast<uintptr_t>(from + first) % 4 != 0;
  uint32_t pairs[5];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = load_pair(from, first - is_odd + 2 * i, params.columns);
  if (!is_odd) {
    params.to[place] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    return;
  }
  pairs[4] = load_pair(from, first + 7, params.columns);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(pairs[i], pairs[i + 1], 16);
  params.to[place] = {words[0], words[1], words[2], words[3]};
}

}  // namespace

cudaError_t attention_align_rows(const Strided& rows, int64_t batches, int64_t heads,
                                 int64_t queries, int columns, void* aligned, cudaStream_t stream) {
  AlignParams params;
  params.from = static_cast<const uint16_t*>(rows.data);
  params.to = static_cast<uint4*>(aligned);
  params.vectors = Divider(divide_up(columns, 8));
  params.queries = Divider(queries);
  params.heads = Divider(heads);
  params.count = batches * heads * queries * params.vectors.divisor;
  params.batch_stride = rows.batch_stride;
  params.head_stride = rows.head_stride;
  params.query_stride = rows.query_stride;
  params.columns = columns;
  if (params.count == 0) return cudaSuccess;
  const int64_t blocks = divide_up<int64_t>(params.count, kAlignThreads);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch(attention_align_rows_kernel, dim3(static_cast<unsigned>(blocks)),
                dim3(kAlignThreads), 0, Together::kNot, 1, stream, params);
}

}  // namespace megasoftmax
