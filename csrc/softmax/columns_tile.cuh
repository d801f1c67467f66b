#pragma once
// What softmax over columns reads, keeps and adds up.
//
// A strip is what a thread reads of a row at once: 16 bytes where rows allow, else 4 or an element.
// The strips of all [outer, inner] lie in tiles of `lanes` strips side by side, so that a tile with
// fewer strips per row than lanes holds several of `outer`. A thread owns a strip's rows at equal
// distances; they wait in shared memory, in slots that only this thread uses.

#include <cuda_pipeline.h>

#include <algorithm>

#include "../common/integers.h"
#include "../common/reduce.cuh"
#include "../common/vector.cuh"
#include "columns.h"

namespace megasoftmax {

// A pack that is shorter than a word.
template <class T>
struct Element {
  T value;
  __device__ float operator[](int) const { return to_float(value); }
  __device__ static Element round(const float (&values)[1]) { return {static_cast<T>(values[0])}; }
  __device__ void flip_signs() { value = from_float<T>(-to_float(value)); }
};
template <class T, int kElements>
using Strip = std::conditional_t < sizeof(T) * kElements<4, Element<T>, Pack<T, kElements>>;

template <int kBytes>
using StripWord = std::conditional_t<
    kBytes >= 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

// A last read does not displace what caches hold.
template <class Strip>
__device__ inline Strip load_strip(const void* source, bool is_last) {
  using Word = StripWord<sizeof(Strip)>;
  const auto* const word = static_cast<const Word*>(source);
  const Word value = is_last ? __ldcs(word) : __ldcg(word);
  return reinterpret_cast<const Strip&>(value);
}
template <class Strip>
__device__ inline void store_strip(void* destination, const Strip& strip) {
  using Word = StripWord<sizeof(Strip)>;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Strip) / sizeof(Word)); ++i)
    __stcs(static_cast<Word*>(destination) + i, reinterpret_cast<const Word*>(&strip)[i]);
}

struct ColumnsTiling {
  ColumnsPolicy policy;
  int64_t strips;  // of all [outer, inner]
  Divider strips_per_row;
};

// What this thread has of the tile of its block: rows `step` elements apart, kBatch at a time. They
// arrive in kStages parts, so that the first is summed up while the last is on its way: -3% time
// at 1024 rows of bfloat16.
template <class T, int kElements>
struct ColumnsTile {
  using StripT = Strip<T, kElements>;
  static constexpr int kBatch = columns_batch(sizeof(StripT)), kStages = 2;
  using Batch = StripT[kBatch];

  const ColumnsTiling& tiling;
  int lanes, lane, rank;
  int64_t first_strip;  // of the tile
  int64_t offset, step;
  int rows, kept, rows_per_stage;

  __device__ ColumnsTile(const ColumnsTiling& tiling, const ColumnsShape& shape)
      : tiling(tiling), lanes(tiling.policy.lanes), lane(threadIdx.x & (lanes - 1)) {
    const unsigned blocks = tiling.policy.blocks;
    rank = static_cast<int>(blockIdx.x % blocks);
    first_strip = static_cast<int64_t>(blockIdx.x / blocks) * lanes;
    const int64_t strip = first_strip + lane;
    const int rows_at_a_time = kColumnsThreads / lanes;
    const int first_row = rank * rows_at_a_time + static_cast<int>(threadIdx.x) / lanes;
    const int stride = rows_at_a_time * static_cast<int>(blocks);
    int64_t outer, column;
    tiling.strips_per_row.split(strip, outer, column);
    offset = (outer * shape.length + first_row) * shape.inner + column * kElements;
    step = stride * shape.inner;
    rows = strip < tiling.strips && first_row < shape.length
               ? static_cast<int>((shape.length - first_row + stride - 1) / stride)
               : 0;
    kept = min(rows, tiling.policy.kept_strips);
    rows_per_stage = divide_up(tiling.policy.kept_strips / kBatch, kStages) * kBatch;
  }

  __device__ StripT* slots(char* shared, int input) const {
    return reinterpret_cast<StripT*>(shared) + input * tiling.policy.kept_strips * kColumnsThreads +
           threadIdx.x;
  }

  __device__ void start_load(StripT* slots, const T* data, int stage) const {
    const int begin = stage * rows_per_stage, end = min(kept, begin + rows_per_stage);
    if constexpr (sizeof(StripT) < 4) {  // too short for an asynchronous copy
      for (int row = begin; row < end; row += kBatch) {
        Batch strips;
        read(data, row, true, strips);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) slots[(row + i) * kColumnsThreads] = strips[i];
      }
    } else {
      const T* source = data + offset + begin * step;
      slots += begin * kColumnsThreads;
#pragma unroll 4
      for (int row = begin; row < end; ++row, source += step, slots += kColumnsThreads)
        __pipeline_memcpy_async(slots, source, sizeof(StripT));
    }
  }
  // Calls body(first row) for every batch, as they arrive.
  template <class Body>
  __device__ void for_arriving(Body&& body) const {
    int row = 0;
#pragma unroll 1
    for (int stage = 0; stage <= kStages; ++stage) {
      if (stage < kStages) __pipeline_wait_prior(kStages - 1 - stage);
      const int end = stage < kStages ? min(kept, (stage + 1) * rows_per_stage) : rows;
      for (; row < end; row += kBatch) body(row);
    }
  }
  __device__ void read(const T* data, int row, bool is_last, Batch& strips) const {
    const T* const source = data + offset + row * step;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (row + i < rows) strips[i] = load_strip<StripT>(source + i * step, is_last);
    }
  }

  // Rows behind the last are `missing`.
  __device__ void load(const StripT* slots, const T* data, int row, bool is_last, float missing,
                       Batch& strips) const {
    if (row < tiling.policy.kept_strips) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) strips[i] = slots[(row + i) * kColumnsThreads];
    } else {
      read(data, row, is_last, strips);
    }
    if (row + kBatch <= rows) return;
    float values[kElements];
#pragma unroll
    for (int j = 0; j < kElements; ++j) values[j] = missing;
#pragma unroll
    for (int i = 1; i < kBatch; ++i) {
      if (row + i >= rows) strips[i] = StripT::round(values);
    }
  }

  // Stores value(i, j) of the batch.
  template <class Out, class Value>
  __device__ void store(void* data, int row, Value&& value) const {
    Out* const destination = static_cast<Out*>(data) + offset + row * step;
    const auto store_row = [&](int i) {
      float values[kElements];
#pragma unroll
      for (int j = 0; j < kElements; ++j) values[j] = value(i, j);
      store_strip(destination + i * step, Strip<Out, kElements>::round(values));
    };
    if (row + kBatch <= rows) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) store_row(i);
    } else {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (row + i < rows) store_row(i);
      }
    }
  }

  // Replaces this thread's sums by finish(sum of all threads, column, whether there is one), called
  // once per column and block. A plain sum is one relative to a maximum of 0.
  template <class Finish>
  __device__ void merge(MaxAndSum (&sums)[kElements], Exponent exponent, char* shared,
                        Finish&& finish) const {
    const auto finish_column = [&](MaxAndSum total, int lane, int j) {
      const int64_t strip = first_strip + lane;
      return finish(total, strip * kElements + j, strip < tiling.strips);
    };
    const int blocks = tiling.policy.blocks, thread = threadIdx.x;
    if (tiling.policy.has_owners()) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) sums[j] = finish_column(sums[j], lane, j);
      return;
    }
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      float max = sums[j].max;
      for (int distance = lanes; distance < 32; distance *= 2)
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, distance));
      sums[j] = {max, sums[j].sum * exponent(sums[j].max, max)};
      for (int distance = lanes; distance < 32; distance *= 2)
        sums[j].sum += __shfl_xor_sync(0xffffffffu, sums[j].sum, distance);
    }
    const int columns = lanes * kElements;
    const auto total_of = [&](const MaxAndSum* parts, int count, int column) {
      MaxAndSum total{kLowest, 0.f};
#pragma unroll 8
      for (int i = 0; i < count; ++i) total.max = fmaxf(total.max, parts[i * columns + column].max);
#pragma unroll 8
      for (int i = 0; i < count; ++i) {
        const MaxAndSum part = parts[i * columns + column];
        total.sum += part.sum * exponent(part.max, total.max);
      }
      return total;
    };
    const int threads_per_part = max(lanes, 32), parts = tiling.policy.parts();
    auto* const part_sums = reinterpret_cast<MaxAndSum*>(shared);
    auto* const block_sums = part_sums + parts * columns;
    if (thread % threads_per_part < lanes) {
#pragma unroll
      for (int j = 0; j < kElements; ++j)
        part_sums[(thread / threads_per_part * kElements + j) * lanes + lane] = sums[j];
    }
    __syncthreads();
    if (blocks > 1) wait_for_cluster();  // until all have started
    for (int column = thread; column < columns; column += kColumnsThreads) {
      const MaxAndSum total = total_of(part_sums, parts, column);
      if (blocks == 1) {
        part_sums[column] = finish_column(total, column & (lanes - 1), column / lanes);
      } else {
        for (int block = 0; block < blocks; ++block)
          store_to_cluster(&block_sums[rank * columns + column], block,
                           reinterpret_cast<const uint64_t&>(total));
      }
    }
    if (blocks > 1) {
      arrive_at_cluster();
      wait_for_cluster();
      for (int column = thread; column < columns; column += kColumnsThreads) {
        const MaxAndSum total = total_of(block_sums, blocks, column);
        part_sums[column] = finish_column(total, column & (lanes - 1), column / lanes);
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kElements; ++j) sums[j] = part_sums[j * lanes + lane];
  }

  // Shared memory: what is kept of each input, then the sums of parts and blocks.
  static __host__ __device__ int kept_bytes(const ColumnsPolicy& policy, int inputs) {
    return inputs * policy.kept_strips * kColumnsThreads * static_cast<int>(sizeof(StripT));
  }
  static int shared_bytes(const ColumnsPolicy& policy, int inputs) {
    return kept_bytes(policy, inputs) + policy.sum_bytes(kElements);
  }
};

}  // namespace megasoftmax
