#pragma once
// What every family of kernels is given: tensors with strides, windows, sinks. Compiles without
// nvcc.

#include <cmath>
#include <cstdint>

#include "dtype.h"

namespace megasoftmax {

// A tensor with any strides (in elements, 0 where it is broadcast); absent when data is null.
struct Strided {
  const void* data = nullptr;
  DType type = DType::kFloat32;  // masks are bytes and have none
  int64_t batch_stride = 0, head_stride = 0, query_stride = 0, column_stride = 0;
  // Kernels of rows read aligned vectors of 16 bytes, which may reach beside a row, but not outside
  // of the storage. This is the last address of a row whose vectors all lie in the storage; rows at
  // higher addresses have their last vector read element by element. The default: there are none.
  // Of a bias of attention: the end of the storage.
  uintptr_t last_whole_row = UINTPTR_MAX;

  // The first element of a row; of a result T is not const.
  template <class T>
  __host__ __device__ T* row(int64_t batch, int64_t head, int64_t query) const {
    return static_cast<T*>(const_cast<void*>(data)) + batch * batch_stride + head * head_stride +
           query * query_stride;
  }
};

// The strides of a contiguous tensor [..., heads, rows, columns].
inline Strided contiguous(int64_t heads, int64_t rows, int64_t columns) {
  Strided tensor;
  tensor.query_stride = columns;
  tensor.head_stride = rows * columns;
  tensor.batch_stride = heads * tensor.head_stride;
  tensor.column_stride = 1;
  return tensor;
}

// An integer for each row, of any strides; absent when data is null.
struct RowNumbers {
  const int* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, query_stride = 0;

  __host__ __device__ int at(int64_t batch, int64_t head, int64_t query) const {
    return data[batch * batch_stride + head * head_stride + query * query_stride];
  }
};

// Columns [first, end) that a row sees, as far as they are given. They may lie outside of the row.
struct VisibleRanges {
  RowNumbers first, end;

  __host__ __device__ bool are_given() const {
    return first.data != nullptr || end.data != nullptr;
  }
};

// Query i sees columns [i + offset - left, i + offset + right], offset = columns - queries; -1
// lifts the limit of a side. Causal is right = 0.
struct Window {
  int64_t left = -1, right = -1;

  __host__ __device__ bool is_limited() const { return left >= 0 || right >= 0; }
};

// A logit that joins the denominator: one per head, one for all (stride 0), or a number. -infinity
// joins nothing.
struct SinkLogit {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  int64_t stride = 0;
  float value = -INFINITY;
  bool is_given = false;  // may be -infinity all the same

  __host__ __device__ bool is_present() const { return data != nullptr || value != -INFINITY; }
  __host__ __device__ float of_head(int64_t head) const;  // in sink.cuh
};

// With it softcap * tanh(scale * score / softcap) takes the place of scale * score.
struct Softcap {
  float cap = 0;    // 0: none
  float inner = 0;  // scale / softcap

  Softcap() = default;
  Softcap(double cap, double scale)
      : cap(static_cast<float>(cap)), inner(cap > 0 ? static_cast<float>(scale / cap) : 0.f) {}
  __host__ __device__ bool is_given() const { return cap > 0; }
};

// How scores become logits, besides the bias, and what joins their softmax.
struct LogitOptions {
  float scale = 1;
  Softcap softcap;
  SinkLogit sink;

  // What scores are multiplied by, before a bias: the scale, or the softcap if they are its tanh.
  __host__ __device__ float factor() const { return softcap.is_given() ? softcap.cap : scale; }
  // The magnitude of the factor within tanh.
  float inner() const { return std::fabs(softcap.inner); }
  // Whether logits are scores times the scale, but for a bias.
  __host__ __device__ bool are_linear() const { return !softcap.is_given(); }
  bool have_no_sink() const { return !sink.is_given; }
  bool have_only_scale() const { return have_no_sink() && are_linear(); }
  bool differ_by_head() const { return sink.data != nullptr && sink.stride != 0; }
};

// The values of the 15 random bits of an entry.
inline constexpr uint32_t kDropoutSteps = 32768;
// Eight calls of Philox decide kDropoutColumns columns of kDropoutRows rows, which lie
// kDropoutRowDistance apart, see dropout.cuh.
inline constexpr int kDropoutRows = 2, kDropoutRowDistance = 8, kDropoutColumns = 32;

// Dropout of probabilities: an entry is dropped where its random bits are below the threshold.
struct Dropout {
  const int64_t* seed = nullptr;  // on the device; null: nothing is dropped
  uint32_t threshold = 0;         // from 0 to kDropoutSteps
  float factor = 1;               // of what is kept: one over its probability; 0 where none is

  Dropout() = default;
  __host__ __device__ bool is_given() const { return seed != nullptr; }
  Dropout(const int64_t* seed, double probability)
      : seed(seed), threshold(static_cast<uint32_t>(std::lrint(probability * kDropoutSteps))) {
    factor = threshold < kDropoutSteps
                 ? static_cast<float>(double{kDropoutSteps} / (kDropoutSteps - threshold))
                 : 0.f;
  }
};

}  // namespace megasoftmax
