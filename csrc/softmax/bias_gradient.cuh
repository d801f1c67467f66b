#pragma once
// The gradient of a broadcast bias: the owner of a bias row takes the rows that share it one after
// the other, and sums their dz.

#include "row_vectors.cuh"

namespace megasoftmax {

// Sums dz over an owner's rows: in registers where a row fits them, else in the owner's part of the
// output, which stays in the L2 cache.
template <KernelShape kShape, int kElements>
struct BiasGradient {
  static constexpr bool kPresent = true;
  static constexpr bool kInRegisters = kShape.storage == Storage::kRegisters;
  static constexpr int kVectors = kInRegisters ? kShape.vectors_per_thread : 1;
  static constexpr int kThreads = kShape.threads_per_row;

  // Its sums need registers.
  static constexpr int blocks_per_sm() { return (kShape.blocks_per_sm + 1) / 2; }

  float sums[kVectors][kElements] = {};
  const BackwardParams& params;
  int64_t owner;

  __device__ BiasGradient(const BackwardParams& params, int64_t owner)
      : params(params), owner(owner) {}

  __device__ int columns() const { return static_cast<int>(params.shape.columns); }

  __device__ void begin(int thread) {
    if constexpr (!kInRegisters) {
      fill_outside(params.bias_gradient, DType::kFloat32, owner, columns(), 0, 0, thread, kThreads);
    }
  }
  __device__ void add(int i, int column, const float (&dz)[kElements]) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) sums[i][j] += dz[j];
    } else {
      float* row = static_cast<float*>(params.bias_gradient) + owner * columns();
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        if (column + j < columns()) row[column + j] += dz[j];
      }
    }
  }
  __device__ void finish(int thread) {
    if constexpr (kInRegisters) {
      with_dtype(params.bias_gradient_type, [&](auto tag) {
        const RowWriter<decltype(tag), kElements> writer(params.bias_gradient, owner * columns(),
                                                         columns(), columns() % kElements == 0);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const int column = (i * kThreads + thread) * kElements;
          if (column < columns()) writer.store(column, sums[i]);
        }
      });
    }
  }
};

template <KernelShape kShape, int kElements>
struct NoBiasGradient {
  static constexpr bool kPresent = false;
  static constexpr int blocks_per_sm() { return kShape.blocks_per_sm; }
  __device__ NoBiasGradient(const BackwardParams&, int64_t) {}
  __device__ void begin(int) {}
  __device__ void add(int, int, const float (&)[kElements]) {}
  __device__ void finish(int) {}
};

// The rows that share a row of the bias gradient, one after the other. A split counts as a batch.
// Without one, a single row.
template <bool kSumsBias>
struct RowsOfOwner {
  RowIndex base;
  int split = 0;

  __device__ RowsOfOwner(const BackwardParams& params, const RowIndex& owner) : base(owner) {
    if constexpr (kSumsBias) {
      split = base.batch / static_cast<int>(params.bias_shape.batches);
      base.batch -= split * static_cast<int>(params.bias_shape.batches);
    }
  }
  __device__ static int64_t iterations(const BackwardParams& params) {
    return kSumsBias ? params.rows_per_split : 1;
  }
  // Has the owner a row for this iteration? Splits need not be equally large.
  __device__ bool has(const BackwardParams& params, int64_t iteration) const {
    return kSumsBias ? iteration < params.rows_per_split &&
                           split * params.rows_per_split + iteration < params.rows_per_owner
                     : iteration == 0;
  }
  __device__ RowIndex at(const BackwardParams& params, int64_t iteration) const {
    if constexpr (!kSumsBias) return base;
    int64_t plane, batch, head, query;
    params.shared_by_queries.split(split * params.rows_per_split + iteration, plane, query);
    params.shared_by_heads.split(plane, batch, head);
    return {base.batch + static_cast<int>(batch), base.head + static_cast<int>(head),
            base.query + static_cast<int>(query)};
  }
};

}  // namespace megasoftmax
