// Copies 16-bit rows: to where they begin at multiples of 16 bytes, and from there to the rows of a
// shifted bias.

#include "../common/launch.cuh"
#include "attention.h"

namespace megasoftmax {
namespace {

constexpr int kAlignThreads = 256, kRowsOfBlock = kAlignThreads / 32;  // a warp for each

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

struct UnshiftParams {
  Strided pairs, table;
  Divider heads, blocks;  // of a batch, of a head
  int queries, keys;
};

// Elements `shift` to `shift` + 7 of two vectors.
__device__ uint4 eight_of(const uint4& first, const uint4& second, int shift) {
  const uint32_t words[8] = {first.x,  first.y,  first.z,  first.w,
                             second.x, second.y, second.z, second.w};
  uint32_t by_four[6], by_two[5];
#pragma unroll
  for (int i = 0; i < 6; ++i) by_four[i] = (shift & 4) != 0 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) by_two[i] = (shift & 2) != 0 ? by_four[i + 1] : by_four[i];
  const auto word = [&](int i) {
    return __funnelshift_r(by_two[i], by_two[i + 1], shift % 2 * 16);
  };
  return {word(0), word(1), word(2), word(3)};
}

// A row of pairs for each warp, and the zeros behind it. The first one begins `queries` - 1
// elements behind the first element of a head, and each is one element shorter than a row of the
// table. A lane writes vectors that memory has aligned. Those that rows share go element by
// element.
__global__ void __launch_bounds__(kAlignThreads)
    attention_unshift_rows_kernel(const __grid_constant__ UnshiftParams params) {
  int of_all, block, batch, head;
  params.blocks.split(static_cast<int>(blockIdx.x), of_all, block);
  params.heads.split(of_all, batch, head);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int query = block * kRowsOfBlock + static_cast<int>(threadIdx.x) / 32;
  if (query >= params.queries) return;
  const bool is_first = query == 0, is_last = query == params.queries - 1;
  const int64_t pitch = params.table.query_stride - 1;
  uint16_t* const row =
      params.table.row<uint16_t>(batch, head, 0) + params.queries - 1 + int64_t{query} * pitch;
  const uint16_t* const from = params.pairs.row<const uint16_t>(batch, head, query);
  const int length = static_cast<int>(pitch) + (is_last ? 1 : 0);
  const int before = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / 2);
  const int shift = (8 - before) % 8;  // of the first whole vector
  const auto* const vectors = reinterpret_cast<const uint4*>(from);
#pragma unroll 4
  for (int at = 8 * lane - before; at < length; at += 8 * 32) {
    if (at >= 0 && at + 8 <= params.keys) {
      const uint4* const mine = vectors + at / 8;
      __stcs(reinterpret_cast<uint4*>(row + at),
             eight_of(__ldg(mine), __ldg(shift == 0 ? mine : mine + 1), shift));
    } else if (at >= params.keys && at + 8 <= length) {
      __stcs(reinterpret_cast<uint4*>(row + at), {});
    } else {
      for (int i = max(at, 0); i < min(at + 8, length); ++i)
        row[i] = i < params.keys ? __ldg(from + i) : uint16_t{0};
    }
  }
  if (!is_first) return;
  for (int i = lane; i < params.queries - 1; i += 32) row[i + 1 - params.queries] = 0;
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

cudaError_t attention_unshift_rows(const Strided& pairs, const Strided& table, int64_t batches,
                                   int64_t heads, int queries, int keys, cudaStream_t stream) {
  if (batches * heads == 0) return cudaSuccess;
  UnshiftParams params;
  params.pairs = pairs;
  params.table = table;
  params.heads = Divider(heads);
  params.blocks = Divider(divide_up(queries, kRowsOfBlock));
  params.queries = queries;
  params.keys = keys;
  const int64_t blocks = batches * heads * params.blocks.divisor;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch(attention_unshift_rows_kernel, dim3(static_cast<unsigned>(blocks)),
                dim3(kAlignThreads), 0, Together::kNot, 1, stream, params);
}

}  // namespace megasoftmax
