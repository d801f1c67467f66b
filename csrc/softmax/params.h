#pragma once
// What a softmax launch needs, as plain structs. Every tensor is seen as [batches, heads, queries,
// columns].

#include "../common/integers.h"
#include "../common/tensors.h"
#include "limits.h"

namespace megasoftmax {

struct Shape {
  int64_t batches = 0, heads = 0, queries = 0;
  int64_t columns = 0;

  __host__ __device__ int64_t rows() const { return batches * heads * queries; }
};

// A row's place in the tensor.
struct RowIndex {
  int batch = 0, head = 0, query = 0;

  __host__ __device__ int64_t row(const Shape& shape) const {
    return int64_t{batch * static_cast<int>(shape.heads) + head} * static_cast<int>(shape.queries) +
           query;
  }
  __host__ __device__ int64_t offset_in(const Strided& tensor) const {
    return batch * tensor.batch_stride + head * tensor.head_stride + query * tensor.query_stride;
  }
};

// Which rows a block takes (row_owner.cuh), and how long rows lie over blocks (row_segments.cuh).
struct Schedule {
  // Blocks that take one row each: queries of a tile, then heads, then the tiles of all batches.
  RowIndex first;  // of the launch
  int blocks_per_tile = 0;
  bool last_first = false;  // the last blocks of a tile begin
  Divider tiles;            // of a batch

  // Rows of segments
  int blocks_per_row = 1;
  Divider divide_segments;  // among the blocks of a row
  bool is_cluster = false;  // several blocks of a row form a cluster
  int max_segments = 0;     // of a row; for top-k, of a block
  int warp_tiles_per_segment = 1;
  int kept_warp_tiles = 0;  // that a block keeps in shared memory
  // The workspace. Rows that lie over the whole GPU have [2, owners, max_segments] results there
  // and a counter for each owner, 8 bytes each.
  void* workspace = nullptr;

  // Persistent blocks
  int owners = 0;  // rows that are computed at a time
  int rows = 0;
  Divider queries, heads;
};

inline bool has_moderate_cap(const LogitOptions& options) {
  return !options.are_linear() && options.factor() >= kLeastCapAlone &&
         options.factor() <= kLargestCapAlone && options.inner() >= kLeastInner &&
         options.inner() <= kLargestInner;
}

struct ForwardParams : LogitOptions {
  Shape shape;
  Strided scores, mask, bias;
  Window window;
  VisibleRanges visible;
  Dropout dropout;
  // A moderate cap and neither bias, mask nor dropout: see capped.cuh.
  bool are_capped_alone() const {
    return has_moderate_cap(*this) && bias.data == nullptr && mask.data == nullptr &&
           !dropout.is_given();
  }
  // Instances of a bias serve other rows that are not linear, and then the bias may be absent.
  bool takes_bias_instance() const {
    return bias.data != nullptr || (!are_linear() && !are_capped_alone());
  }

  void* probabilities = nullptr;  // contiguous, 16-byte aligned
  DType probabilities_type = DType::kFloat32;
  float* log_sum_exp = nullptr;  // [rows], or null

  // Set by `prepare`, which also gives an absent bias the type of the scores.
  int64_t rows = 0;
  bool is_limited = false;     // by window or ranges
  bool can_exclude = false;    // a row without visible entries is 0, not NaN
  bool is_contiguous = false;  // row r begins at element r * columns, at 16 bytes for r = 0
};

struct BackwardParams : LogitOptions {
  Shape shape;
  // Both have one type. If it has_scores(), `probabilities` are scores, and the probabilities are
  // computed again with mask, bias and log-sum-exp, which are not read otherwise. With a gradient
  // of the bias, that of scores is not complete if logits are not linear: another launch computes
  // it.
  Strided gradient, probabilities;
  Strided mask, bias;
  const float* log_sum_exp_gradient = nullptr;  // [rows], or null
  const float* log_sum_exp = nullptr;           // [rows], read for sink_gradient and with scores
  Window window;
  VisibleRanges visible;
  Dropout dropout;
  bool has_scores() const { return dropout.is_given() || !are_linear(); }
  bool are_capped_alone() const {
    return has_moderate_cap(*this) && bias.data == nullptr && mask.data == nullptr &&
           !dropout.is_given() && !has_bias_gradient;
  }
  bool takes_bias_instance() const {
    return bias.data != nullptr || (!are_linear() && !are_capped_alone());
  }

  void* scores_gradient = nullptr;  // contiguous, 16-byte aligned
  DType scores_gradient_type = DType::kFloat32;
  float* sink_gradient = nullptr;  // [rows], which the caller adds up, see denominator.cuh; or null

  // The gradient of a bias [splits, bias batches, bias heads, bias queries, columns], contiguous.
  // One owner adds up the rows that share a bias row. If there are too few owners, `splits` of them
  // share these rows, and the caller adds their parts.
  bool has_bias_gradient = false;
  Shape bias_shape;               // each dimension 1 or that of `shape`
  int64_t splits = 1;             // set by `prepare`
  void* bias_gradient = nullptr;  // the launcher's caller allocates it as the plan says
  DType bias_gradient_type = DType::kFloat32;

  // Set by `prepare`; is_contiguous says it of both inputs.
  bool is_limited = false, can_exclude = false, is_contiguous = false;
  // The rows of an owner, which takes them one after the other.
  Divider shared_by_queries, shared_by_heads;
  int64_t rows_per_owner = 1, rows_per_split = 1;
};

}  // namespace megasoftmax
