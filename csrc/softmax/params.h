#pragma once
// What a softmax launch needs, as plain structs. Every tensor is seen as [batches, heads, queries,
// columns].

#include "../common/integers.h"
#include "../common/tensors.h"

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

// Which rows a block takes, see row_owner.cuh, and how long rows lie over blocks, see
// row_units.cuh.
struct Schedule {
  RowIndex first;
  int blocks_per_tile = 0;
  bool last_first = false;  // the last blocks of a tile begin
  Divider tiles;            // of a batch

  int blocks_per_row = 1;
  Divider units;            // among the blocks of a row
  bool is_cluster = false;  // the blocks of a row, if there are several
  int max_units = 0;        // of a row; of top-k, of a block
  int unit_batches = 1;
  int kept_batches = 0;  // of a block: those that wait in shared memory
  // Of rows over the whole GPU: [2, owners, max_units] and a number for each owner, 8 bytes each.
  void* results = nullptr;

  // Of blocks that take one row after the other: how many owners there are, 0 where each takes one.
  int owners = 0, rows = 0;
  Divider queries, heads;
};

struct ForwardParams {
  Shape shape;
  Strided scores, mask, bias;
  SinkLogit sink;
  Window window;
  VisibleRanges visible;
  Dropout dropout;
  float scale = 1;

  void* probabilities = nullptr;  // contiguous, 16-byte aligned
  DType probabilities_type = DType::kFloat32;
  float* log_sum_exp = nullptr;  // [rows], or null

  void* workspace = nullptr;  // see softmax_forward_workspace

  // Set by the launcher: how many rows there are, whether window or ranges limit them, whether one
  // without visible entries is 0, and whether row r of the scores begins at element r * columns, at
  // a multiple of 16 bytes for r = 0.
  int64_t rows = 0;
  bool is_limited = false, can_exclude = false, is_contiguous = false;
};

struct BackwardParams {
  Shape shape;
  // Of one type. With dropout, the scores stand in place of the probabilities, which are made of
  // them again with mask, bias and log-sum-exp; these are not read otherwise.
  Strided gradient, probabilities;
  Strided mask, bias;
  const float* log_sum_exp_gradient = nullptr;  // [rows], or null
  const float* log_sum_exp = nullptr;  // [rows], read for the sink's gradient and with dropout
  SinkLogit sink;
  Window window;
  VisibleRanges visible;
  Dropout dropout;
  float scale = 1;

  void* scores_gradient = nullptr;  // contiguous, 16-byte aligned
  DType scores_gradient_type = DType::kFloat32;
  float* sink_gradient = nullptr;  // [rows], to be summed over the rows that share a sink; or null

  // [splits, bias batches, bias heads, bias queries, columns], contiguous, or null. Every row that
  // shares a bias row belongs to one owner, cut into `splits` parts so that there are enough
  // owners; the parts are to be summed.
  void* bias_gradient = nullptr;
  DType bias_gradient_type = DType::kFloat32;  // float32 when splits > 1 or the plan says so
  Shape bias_shape;                            // each dimension 1 or that of `shape`
  int64_t splits = 1;

  void* workspace = nullptr;  // see softmax_backward_workspace

  // Set by the launcher: whether window or ranges limit rows, whether a row without visible entries
  // is 0, whether both inputs are contiguous, and which rows an owner takes in turn.
  bool is_limited = false, can_exclude = false, is_contiguous = false;
  Divider shared_by_queries, shared_by_heads;
  int64_t rows_per_owner = 1, rows_per_split = 1;
};

}  // namespace megasoftmax
