#pragma once
// Who owns a row, and which row.

#include <type_traits>

#include "dropping.cuh"
#include "row_block.cuh"
#include "row_persistent.cuh"
#include "row_segments.cuh"
#include "row_warp.cuh"

namespace megasoftmax {

template <KernelShape kShape>
using LongRowOwner =
    std::conditional_t<kShape.storage == Storage::kReread && kShape.is_persistent,
                       PersistentRow<kShape.threads_per_row>,
                       SegmentRow<kShape.threads_per_row, kShape.storage == Storage::kReread,
                                  kShape.is_persistent, kShape.may_share_rows>>;
template <KernelShape kShape>
using RowOwner = std::conditional_t<
    kShape.storage != Storage::kRegisters, LongRowOwner<kShape>,
    std::conditional_t<(kShape.threads_per_row > 32), BlockRow<kShape.threads_per_row>,
                       WarpRow<kShape.threads_per_row>>>;

// Blocks lie over the tensor as (queries of a tile, heads, tiles of all batches), from
// schedule.first on: a mask or bias that heads share stays in the caches from one head to the next
// when tiles are short. Where rows grow, the longest begin, and a launch ends with short ones.
template <KernelShape kShape>
__device__ inline RowIndex row_of_block(const Schedule& schedule) {
  int batch = static_cast<int>(blockIdx.z), tile = 0;
  if (schedule.tiles.divisor > 1) schedule.tiles.split(batch, batch, tile);
  int block = static_cast<int>(blockIdx.x);
  if (kShape.may_share_rows) block /= schedule.blocks_per_row;
  if (schedule.last_first) block = schedule.blocks_per_tile - 1 - block;
  return {schedule.first.batch + batch, schedule.first.head + static_cast<int>(blockIdx.y),
          schedule.first.query + (tile * schedule.blocks_per_tile + block) * kShape.rows_per_block};
}

// Which query a thread takes, from the first one of its block. Threads without one shadow another
// and write nothing, or are not needed: false. kIsPair: half a warp has a row each, 8 apart.
template <KernelShape kShape, bool kIsPair>
__device__ inline bool find_query(int row_in_block, int queries, int& query, bool& is_row) {
  query += row_in_block;
  if (kIsPair) query = query_in_pairs(query);
  is_row = query < queries;
  if (is_row) return true;
  query = kIsPair ? lower_of_pair(query) : queries - 1;
  return kShape.rows_per_block > 1 && query < queries;
}

template <bool kIsPair, class Grid>
__device__ inline Extent extent_of(Grid grid, const Bounds& bounds) {
  if constexpr (kIsPair) {
    const bool is_empty = bounds.end <= bounds.begin;
    const int begin = smallest_of_lanes(is_empty ? INT_MAX : bounds.begin);
    const int end = largest_of_lanes(bounds.end);
    grid.phase = static_cast<int>(uniform(static_cast<uint32_t>(grid.phase)));
    return {grid.begin({begin < end ? begin : 0, end}),
            end,
            {largest_of_lanes(bounds.begin), smallest_of_lanes(bounds.end)}};
  } else {
    return {grid.begin(bounds), bounds.end, bounds};
  }
}

// The row with number `row` of all, for blocks that take several rows.
template <class Schedule, class Integer>
__device__ inline RowIndex row_at(const Schedule& schedule, Integer row) {
  Integer plane, batch, head, query;
  schedule.queries.split(row, plane, query);
  schedule.heads.split(plane, batch, head);
  return {static_cast<int>(batch), static_cast<int>(head), static_cast<int>(query)};
}

// One row: where it lies, and what of it is visible.
template <int kElements, class Grid>
struct RowPlace {
  RowIndex index;
  int64_t row, first_element;
  Bounds visible;
  Grid grid;
  int first_column;  // of its first visible vector

  // `is_fixed`: vectors begin at column 0, wherever the row lies.
  __device__ RowPlace(const Shape& shape, const RowIndex& index, const Bounds& visible,
                      bool is_fixed = false)
      : index(index),
        row(index.row(shape)),
        first_element(row * static_cast<int>(shape.columns)),
        visible(visible),
        grid(Grid::aligned_to(is_fixed ? 0 : first_element, static_cast<int>(shape.columns))),
        first_column(grid.begin(visible)) {}
};

}  // namespace megasoftmax
