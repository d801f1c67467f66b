#pragma once
// What the strides of a launch allow. Plain host code.

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "limits.h"
#include "params.h"

namespace megasoftmax {

inline bool fits_indices(const Shape& shape, const Window& window) {
  return shape.batches * shape.heads <= kMaxIndex && shape.queries <= kMaxIndex &&
         shape.columns * (window.is_limited() ? 2 : 1) + shape.queries * window.is_limited() <=
             kMaxIndex;
}

// Lifts limits that no row meets.
inline void drop_idle_limits(Window& window, const Shape& shape) {
  if (window.left >= shape.columns - 1) window.left = -1;
  if (window.right >= shape.queries - 1) window.right = -1;
}

// Queries of a head that are followed by those of the next one. Where every head of a batch reads
// the same mask or bias, and one too large to stay in the L2 cache beside the scores, a tile of
// kTileBytes of it stays there from one head to the next. Many queries at a time are better for
// the scores: single ones cost 7% at 2048 columns on an H200.
inline int64_t queries_per_tile(const ForwardParams& params) {
  constexpr int64_t kCachedElements = int64_t{8} << 20, kTileBytes = int64_t{2} << 20;
  const Shape& shape = params.shape;
  const auto bytes_of_row = [&](const Strided& tensor, int element_bytes) {
    const bool is_shared = tensor.data != nullptr && shape.heads > 1 && tensor.head_stride == 0 &&
                           tensor.query_stride != 0 &&
                           shape.queries * shape.columns > kCachedElements;
    return is_shared ? shape.columns * element_bytes : 0;
  };
  const int64_t bytes =
      bytes_of_row(params.mask, 1) + bytes_of_row(params.bias, size_of(params.bias.type));
  return bytes == 0 ? shape.queries : std::max<int64_t>(kTileBytes / bytes, 1);
}

// Can dimensions of `outer_count` and `inner_count` entries be stepped through as one?
inline bool is_one_dimension(int64_t outer_stride, int64_t inner_stride, int64_t outer_count,
                             int64_t inner_count) {
  return outer_count == 1 || inner_count == 1 || outer_stride == inner_stride * inner_count;
}

// Does row r begin at element r * columns, at a multiple of 16 bytes for r = 0?
inline bool is_contiguous(const Strided& tensor, const Shape& shape) {
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 &&
         (tensor.column_stride == 1 || shape.columns == 1) &&
         (tensor.query_stride == shape.columns || shape.queries == 1) &&
         (tensor.head_stride == shape.columns * shape.queries || shape.heads == 1) &&
         (tensor.batch_stride == shape.columns * shape.queries * shape.heads || shape.batches == 1);
}

// Merges batches into heads and heads into queries where every tensor allows it and no window,
// ranges, sink or dropout tell them apart: then the grid does not depend on how the caller folded
// the rows.
inline void merge_dimensions(Shape& shape, const Window& window, const VisibleRanges& visible,
                             const SinkLogit& sink, const Dropout& dropout,
                             std::initializer_list<Strided*> tensors) {
  if (visible.are_given()) return;
  const bool is_per_head = sink.data != nullptr && sink.stride != 0;
  const auto merge = [&](int64_t Strided::* outer, int64_t Strided::* inner, int64_t& outer_count,
                         int64_t& inner_count) {
    if (outer_count * inner_count > kMaxIndex) return;
    for (const Strided* tensor : tensors) {
      if (tensor->data != nullptr &&
          !is_one_dimension(tensor->*outer, tensor->*inner, outer_count, inner_count))
        return;
    }
    for (Strided* tensor : tensors) {
      if (inner_count == 1) tensor->*inner = tensor->*outer;
      tensor->*outer = 0;
    }
    inner_count *= outer_count;
    outer_count = 1;
  };
  const auto merge_heads = [&] {
    if (!window.is_limited() && !is_per_head && !dropout.is_given()) {
      merge(&Strided::head_stride, &Strided::query_stride, shape.heads, shape.queries);
    }
  };
  merge_heads();
  if (!is_per_head)
    merge(&Strided::batch_stride, &Strided::head_stride, shape.batches, shape.heads);
  merge_heads();
}

}  // namespace megasoftmax
