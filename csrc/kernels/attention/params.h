#pragma once
// What a launch of attention needs, as plain structs.

#include <cstdint>

#include "../common/integers.h"
#include "../common/tensors.h"

namespace megasoftmax {

// Of queries, keys and values the rows are the third dimension; rows begin at multiples of 16
// bytes, and their columns are dense and a multiple of 8.
struct AttentionParams {
  int64_t batches = 0, heads = 0, key_heads = 0;
  int queries = 0, keys = 0, head_dim = 0, value_dim = 0;
  Strided query, key, value;  // of one type
  Divider heads_per_key_head;

  // Bool, true = excluded, and a bias, of any strides. Consecutive batches and heads may share an
  // entry of the bias.
  Strided mask, bias;
  bool is_relative = false;  // the bias: an entry depends on key - query alone
  Divider batches_per_bias, heads_per_bias;

  SinkLogit sink;
  int window_left = -1, window_right = -1;  // as in Window
  float scale = 1;

  // [3, batches, heads, queries]: the largest logit over scale, the log of the denominator
  // relative to it, their sum.
  float* statistics = nullptr;

  // Set by the launcher: scale = power_of_two * rest. With a bias, kernels multiply one operand of
  // the scores by the first, which is exact, and the bias by 1 / rest. Without one it is 1.
  float power_of_two = 1, rest = 1;

  // Set by the launcher: how many tiles a head has, and batches, of the grid's blocks.
  Divider tiles, batches_of_tile;

  __host__ __device__ int64_t rows() const { return batches * heads * queries; }
};

struct AttentionForwardParams : AttentionParams {
  Strided output;
};

// What a backward needs of a row of scores.
struct alignas(16) RowOfBackward {
  float max;       // of scores in units of the kernels; 0 without a bias
  float log2_sum;  // weights are 2^(c * (score - max) - log2_sum)
  float delta;     // the gradient of a score is its weight times what its weight's is beyond this
  float unused;
};

// What a launch makes of the gradient of a bias, dS.
enum class BiasGradient {
  kNone,
  kDense,      // [batches, heads, queries, keys], in the type of the bias
  kKeys,       // its sums over queries: [batches, heads, keys], float32
  kQueries,    // its sums over keys: [batches, heads, queries], float32
  kShared,     // as dense, [bias batches, bias heads, queries, keys], of what shares an entry
  kDiagonals,  // its sums along diagonals, tile by tile of keys, see sm80/backward.cuh
};

struct AttentionBackwardParams : AttentionParams {
  Strided output, output_gradient;
  const float* lse_gradient = nullptr;  // [batches, heads, queries], or null
  float* sink_gradient = nullptr;       // the same, of each row; or null

  RowOfBackward* rows_of_backward = nullptr;  // [batches, heads, queries], workspace

  // [batches, heads, queries, head_dim], float32, workspace.
  float* query_gradient_sum = nullptr;
  Strided query_gradient, key_gradient, value_gradient;

  BiasGradient bias_gradient_kind = BiasGradient::kNone;
  void* bias_gradient = nullptr;  // contiguous
  int64_t bias_gradient_bytes = 0;
  float* table_gradient = nullptr;  // of diagonals: as the bias, but float32 and contiguous
};

}  // namespace megasoftmax
