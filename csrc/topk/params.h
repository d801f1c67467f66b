#pragma once
// What a launch of softmax_topk needs, as plain structs.

#include "../softmax/params.h"
#include "limits.h"

namespace megasoftmax {

// Which part of a row a block has.
struct TopkSchedule {
  int blocks_per_row = 1;
  bool is_cluster = false;     // several blocks of a row form a cluster
  int max_segments = 0;        // of a block
  int segments_per_group = 1;  // of each thread
  // Forward, rows that lie over the whole GPU: what their blocks hand on to the first one.
  void* workspace = nullptr;
  Divider queries, heads;
};

// A number for each row, or for all with stride 0; absent when data is null. Dimensions of logits
// may be merged, so that rows are counted.
template <class Number>
struct OfRows {
  const Number* data = nullptr;
  int64_t stride = 0;

  __host__ __device__ Number at(int64_t row) const { return data[row * stride]; }
};

// Which of the k entries keep their probability: a number of all rows, or of each.
struct TopkLimits {
  bool are_given = false;      // or something is drawn
  int top_k = 0;               // the first so many, where it is from 1 to k
  float top_p = 1, min_p = 0;  // parts of the sum, and of the largest probability
  OfRows<int> row_top_k;
  OfRows<float> row_top_p, row_min_p;
};

// The logits are the scores of ForwardParams, which have a scale, a softcap, a mask and a bias
// alone. There are [rows, k] probabilities.
struct TopkParams : ForwardParams {
  bool sigmoid = false;        // scores are sigmoid(z) in place of probabilities
  OfRows<float> row_scale;     // in place of the scale, with neither bias nor softcap
  int k = 0;                   // at most kMaxK
  bool renormalize = false;    // they sum to 1
  int64_t* indices = nullptr;  // [rows, k]
  // [3, rows]: max z, over |scale| where there is neither bias nor softcap; log(sum exp(z - max
  // z)); the log-sum-exp
  float* statistics = nullptr;
};

struct TopkForwardParams : TopkParams {
  bool candidates = false;  // z in place of probabilities
  TopkLimits limits;
  // Routers alone: [columns] float32 at 16 bytes, added where entries are chosen, or null.
  const void* selection_bias = nullptr;
  const int64_t* seed = nullptr;  // of what is drawn
  int64_t* drawn = nullptr;       // [rows], a column of each; or null

  bool are_of_router() const { return sigmoid || selection_bias != nullptr; }
  // Whether all rows have one scale, and keep their k probabilities.
  bool have_plain_rows() const { return row_scale.data == nullptr && !limits.are_given; }
};

// Reads what the forward wrote. Indices outside the row are ignored.
struct TopkBackwardParams : TopkParams {
  const void* gradient = nullptr;               // of the probabilities, as they are
  const float* log_sum_exp_gradient = nullptr;  // [rows], or null
  bool of_bias = false;                         // the gradient of z in place of that of the logits
  void* logits_gradient = nullptr;              // contiguous, 16-byte aligned
  DType logits_gradient_type = DType::kFloat32;
};

}  // namespace megasoftmax
