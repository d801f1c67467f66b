#pragma once
// Which regime serves a launch, and how rows lie over its blocks. Plain host code.

#include <algorithm>

#include "layout.h"

namespace megasoftmax {

struct Plan {
  Rows kind;
  Rows asked;       // may be of two kinds, one of which is `kind`
  int64_t chunks;   // the most that a row can need
  int chunk_bytes;  // that shared memory keeps of each
  int regime;
  int multiprocessors;  // for launches whose blocks run together
  Schedule schedule;
  int shared_bytes;
  int64_t workspace_bytes;
};

// Columns that the widest row sees, without idle limits.
inline int64_t visible_columns(const Shape& shape, const Window& window) {
  if (window.left < 0) return shape.columns;
  const int64_t from_diagonal = window.right < 0 ? shape.queries : window.right + 1;
  return std::min(shape.columns, window.left + from_diagonal);
}

// Of a block.
inline int threads_of(const RowRegime& regime, const Schedule& schedule) {
  return regime.storage == Storage::kDense && regime.threads_per_row == kMostDenseThreads
             ? 32 * divide_up(schedule.max_units, schedule.blocks_per_row)
             : regime.shape().threads();
}

// What a launch without dropout asks of its rows, but for the bias gradient. `tiny_chunks`: the
// most of a row that is tiny although it may be dense.
inline Rows rows_of(const Shape& shape, bool is_limited, int64_t visible_chunks, bool is_masked,
                    bool has_bias, bool has_sink, bool is_contiguous, int pack_elements,
                    int64_t tiny_chunks) {
  const int64_t chunks = max_visible_chunks(shape.columns, shape.columns, pack_elements);
  if (chunks >= kLongRow && visible_chunks <= std::min(kNarrowRow, chunks / 2)) return kNarrow;
  const bool is_even = shape.columns % pack_elements == 0;
  if (has_bias || (is_masked && !is_even)) return kCostly;
  if (is_masked) return kMasked;
  if (is_limited) return kLimited;
  const int64_t tiny_columns = is_even ? kTinyColumns - 1 : kTinyUnevenColumns;
  const bool may_be_dense = is_contiguous && !has_sink && shape.queries == shape.rows();
  const bool is_longer =
      may_be_dense && is_even && chunks > tiny_chunks && chunks % kSectorChunks == 0;
  if (is_contiguous && shape.columns > 0 && shape.columns <= tiny_columns && !is_longer)
    return kTiny;
  if (may_be_dense) return is_even ? kDense : kDenseUneven;
  return is_even ? kPlain : kUneven;
}

// Blocks for that many queries of a head. Pairs need all of each 16.
inline int64_t blocks_of_queries(const KernelShape& shape, Rows kind, int64_t queries) {
  constexpr int64_t kRows = kDropoutRows * kDropoutRowDistance;
  const bool in_pairs = kind == kDropped && shape.may_hold_pairs();
  return divide_up<int64_t>(in_pairs ? round_up(queries, kRows) : queries, shape.rows_per_block);
}

// The most chunks that a row can need.
inline int64_t chunks_of_rows(const Shape& shape, const Window& window, const Dropout& dropout,
                              int pack_elements) {
  const int64_t visible = visible_columns(shape, window);
  // Chunks begin at a line; with dropout at a block of columns, those of a pair with the earlier
  // row's.
  const int64_t before = dropout.is_given() ? kDropoutColumns - 1 + kDropoutRowDistance
                                            : int64_t{kLineChunks - 1} * pack_elements;
  return max_visible_chunks(shape.columns, std::min(visible + before, shape.columns),
                            pack_elements);
}

// How many rows the whole GPU takes at a time, and how many blocks one of them: all of them if
// shared memory keeps them, else about as many as it keeps. The blocks of each then write a row and
// sum the next one, and memory is read and written at the same time.
inline void spread_over_gpu(const RowRegime& regime, int64_t chunks, int64_t rows, int chunk_bytes,
                            const Device& device, Schedule& schedule) {
  const int64_t blocks =
      int64_t{device.multiprocessors} * blocks_in_turns(regime, chunks, chunk_bytes, device);
  const int64_t kept_chunks = blocks * schedule.kept_batches * kChunksPerBatch;
  int64_t owners = std::min(rows, blocks);
  if (rows * chunks > kept_chunks) {
    // A third more than that: where a row ends, others give memory something to do.
    const int64_t kept = kept_chunks * 4 / (chunks * 3), least = rows < kManyRows ? 1 : 2;
    owners = divide_up(rows, divide_up(rows, std::clamp<int64_t>(kept, least, owners)));
  }
  schedule.owners = static_cast<int>(owners);
  int most = divide_up(schedule.max_units, regime.rings());
  // A single row would leave multiprocessors idle: some warps of its blocks do so instead.
  while (most < schedule.max_units && owners * most * 2 <= device.multiprocessors) most *= 2;
  const int of_row = static_cast<int>(std::clamp<int64_t>(blocks / owners, 1, most));
  // Each ring of a block gets as many units.
  const int share = divide_up(schedule.max_units, of_row);
  schedule.blocks_per_row = share > regime.rings()
                                ? divide_up(schedule.max_units, round_up(share, regime.rings()))
                                : of_row;
}

// `forced`: the regime to take where it serves such rows, or -1. `chunk_bytes`: what shared memory
// keeps of a chunk. `whole_chunks`: what uneven rows have of them.
template <int kCount>
Plan plan_rows(const RowRegime (&table)[kCount], int64_t chunks, int64_t whole_chunks, int64_t rows,
               Rows kind, const Device& device, int chunk_bytes, int forced) {
  if (kind == kDenseUneven) {
    // In one block whatever the number of rows: their sums have an order of their own.
    const int index = regime_for(table, whole_chunks, 1, kind, chunk_bytes, device);
    if ((table[index].serves & kind) != 0 && table[index].blocks_per_row == 1)
      chunks = whole_chunks;
    else
      kind = static_cast<Rows>(kUneven | kDenseUneven);
  }
  Plan plan = {};
  plan.chunks = chunks;
  plan.chunk_bytes = chunk_bytes;
  plan.multiprocessors = device.multiprocessors;
  plan.regime = regime_for(table, chunks, rows, kind, chunk_bytes, device);
  if ((kind & (kBiasGradient | kDroppedBiasGradient)) == 0 && forced >= 0 && forced < kCount &&
      chunks <= table[forced].max_chunks && (table[forced].serves & kind) != 0 &&
      (kind != kDenseUneven || table[forced].blocks_per_row == 1))
    plan.regime = forced;
  const RowRegime& regime = table[plan.regime];
  plan.asked = kind;
  const bool takes_either = kind == (kUneven | kDenseUneven);
  plan.kind = !takes_either ? kind : regime.storage == Storage::kDense ? kDenseUneven : kUneven;
  const int kept_batches = kept_batches_with_next(regime, chunks, chunk_bytes, device);
  plan.shared_bytes = regime.storage == Storage::kDense
                          ? unit_count(chunks) * kResultBytes
                          : shared_bytes(regime, kept_batches, chunks, chunk_bytes);
  if (plan.shared_bytes == 0) return plan;
  Schedule& schedule = plan.schedule;
  schedule.unit_batches = unit_batches(chunks);
  schedule.max_units = unit_count(chunks);
  schedule.kept_batches = kept_batches;
  schedule.is_cluster = regime.blocks_per_row > 1;
  schedule.blocks_per_row = regime.blocks_per_row;
  if (regime.blocks_per_row == kWholeGpu) {
    spread_over_gpu(regime, chunks, rows, chunk_bytes, device, schedule);
    plan.workspace_bytes = (2 * int64_t{schedule.max_units} + 1) * schedule.owners * kResultBytes;
  }
  return plan;
}

inline Plan plan_forward(const ForwardParams& params, const Device& device, int forced) {
  const int pack_bytes = 16, pack_elements = pack_bytes / size_of(params.scores.type);
  const int64_t chunks = chunks_of_rows(params.shape, params.window, params.dropout, pack_elements);
  const bool has_bias = params.bias.data != nullptr;
  const Rows kind =
      params.dropout.is_given()
          ? kDropped
          : rows_of(params.shape, params.is_limited, chunks, params.mask.data != nullptr, has_bias,
                    params.sink.is_given, params.is_contiguous, pack_elements, kTinyChunks);
  return plan_rows(kForwardRegimes, chunks, params.shape.columns / pack_elements,
                   params.shape.rows(), kind, device, pack_bytes, forced);
}

inline Rows kind_of_bias_gradient(const Dropout& dropout) {
  return dropout.is_given() ? kDroppedBiasGradient : kBiasGradient;
}

inline Plan plan_backward(const BackwardParams& params, const Device& device, int forced) {
  const int pack_bytes = 16, pack_elements = pack_bytes / size_of(params.probabilities.type);
  if (params.bias_gradient != nullptr) {
    // Registers hold a bias row's sums, so every row of the owner must fit them from column 0 on.
    const int64_t chunks = divide_up<int64_t>(params.shape.columns, pack_elements);
    return plan_rows(kBackwardRegimes, chunks, chunks, params.bias_shape.rows() * params.splits,
                     kind_of_bias_gradient(params.dropout), device, 2 * pack_bytes, forced);
  }
  const int64_t chunks = chunks_of_rows(params.shape, params.window, params.dropout, pack_elements);
  const Rows kind =
      params.dropout.is_given()
          ? kDropped
          : rows_of(params.shape, params.is_limited, chunks, false, false, params.sink.is_given,
                    params.is_contiguous, pack_elements, kUnlimited);
  return plan_rows(kBackwardRegimes, chunks, params.shape.columns / pack_elements,
                   params.shape.rows(), kind, device, 2 * pack_bytes, forced);
}

}  // namespace megasoftmax
