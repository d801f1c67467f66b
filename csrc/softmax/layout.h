#pragma once
// Prepares a launch: which limits matter, which dimensions its strides allow to merge. Plain host
// code.

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

// Queries that blocks take of a head before they take those of the next head. If all heads of a
// batch read one mask or bias that is too large to stay in the L2 cache beside the scores, a tile
// of kTileBytes of it stays there from one head to the next. Many queries at a time are better for
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

// Merges batches into heads and heads into queries where every tensor allows it and no option
// distinguishes them. So the grid does not depend on how the caller folded the rows.
template <class Params>
void merge_dimensions(Params& params, std::initializer_list<Strided*> tensors) {
  if (params.visible.are_given()) return;
  Shape& shape = params.shape;
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
    if (!params.window.is_limited() && !params.differ_by_head() && !params.dropout.is_given()) {
      merge(&Strided::head_stride, &Strided::query_stride, shape.heads, shape.queries);
    }
  };
  merge_heads();
  if (!params.differ_by_head())
    merge(&Strided::batch_stride, &Strided::head_stride, shape.batches, shape.heads);
  merge_heads();
}

// Sets what follows from the other members, before dimensions are merged.
template <class Params>
void prepare_limits(Params& params) {
  params.can_exclude = params.mask.data != nullptr || params.bias.data != nullptr ||
                       params.window.is_limited() || params.visible.are_given() ||
                       !params.have_only_scale();
  drop_idle_limits(params.window, params.shape);
  params.is_limited = params.window.is_limited() || params.visible.are_given();
}

// Both functions set the members of `params` that are said to be prepared.
inline void prepare(ForwardParams& params) {
  if (params.bias.data == nullptr) params.bias.type = params.scores.type;
  params.rows = params.shape.rows();
  params.is_contiguous = is_contiguous(params.scores, params.shape);
  prepare_limits(params);
  merge_dimensions(params, {&params.scores, &params.mask, &params.bias});
}

inline void prepare(BackwardParams& params) {
  if (params.bias.data == nullptr) params.bias.type = params.probabilities.type;
  params.is_contiguous = is_contiguous(params.gradient, params.shape) &&
                         is_contiguous(params.probabilities, params.shape);
  prepare_limits(params);
  if (!params.has_bias_gradient) {
    merge_dimensions(params, {&params.gradient, &params.probabilities, &params.mask, &params.bias});
    params.bias_shape = params.shape;
    return;
  }
  const Shape &shape = params.shape, &bias = params.bias_shape;
  const int64_t owners = bias.rows();
  if (owners == 0) return;
  const Shape shared{shape.batches / bias.batches, shape.heads / bias.heads,
                     shape.queries / bias.queries, 0};
  params.shared_by_queries = Divider(shared.queries);
  params.shared_by_heads = Divider(shared.heads);
  params.rows_per_owner = shared.rows();
  // Equal parts, none of them empty.
  const int64_t most = std::max<int64_t>(shared.rows(), 1);
  const int64_t wanted = std::clamp<int64_t>(divide_up(kEnoughOwners, owners), 1, most);
  const int64_t rows_per_split = std::max<int64_t>(divide_up(shared.rows(), wanted), 1);
  params.splits =
      shape.columns == 0 ? 1 : std::max<int64_t>(divide_up(shared.rows(), rows_per_split), 1);
  params.rows_per_split = divide_up(shared.rows(), params.splits);
}

}  // namespace megasoftmax
