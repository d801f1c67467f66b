#pragma once
// How a launch on contiguous tensors would run. Asked by megasoftmax/explain.py, which has the same
// members in the same order, of the library or of these files compiled without CUDA.

#include <cstdint>

namespace megasoftmax {

struct Call {
  int64_t rows, columns;
  int64_t queries;      // of each head; a divisor of the rows
  int64_t left, right;  // of the window, -1: no limit
  int64_t element_bytes;
  int64_t is_masked, is_backward;
  int64_t has_bias_gradient;                           // of a bias that no rows share
  int64_t multiprocessors, shared_bytes, max_cluster;  // of the device
};

struct Explanation {
  int64_t kind;             // one of Rows
  int64_t visible_columns;  // of the widest row
  int64_t chunks;           // the most that a row can need
  int64_t regime;           // row of the table in limits.h
  int64_t blocks_per_row;
  int64_t units, unit_batches;  // of the widest row; 0 for rows without units
  int64_t threads;              // of a block; 0 for tiles, whose launcher sizes blocks and grid
  int64_t blocks;  // of the grid; 0 for tiles, and where as many as run at a time take turns
  int64_t shared_bytes, workspace_bytes;
};

}  // namespace megasoftmax

extern "C" {
// `obstacles`: bits for each row of the table before the regime, see limits.h.
void megasoftmax_explain(const megasoftmax::Call* call, megasoftmax::Explanation* explanation,
                         int64_t* obstacles);
}
