#pragma once
// Copies of rows of a bias that begin anywhere.

#include "ptx.cuh"
#include "rows_anywhere.h"

namespace megasoftmax {

// Starts to copy rows of a bias that begin anywhere, from `query` and `key` on, if there are some.
// All lanes of a warp call it. A box reads beside its rows. Where that may lie outside of the
// storage, the lanes copy the vectors of 16 bytes that have some of a row, up to its end.
template <int kRows, int kKeys>
__device__ __forceinline__ void copy_rows_anywhere(const AttentionParams& params,
                                                   const CUtensorMap& map, uint32_t shared,
                                                   Barrier there, int batch, int head, int query,
                                                   int key) {
  constexpr int kRowBytes = RowsAnywhere::row_bytes(kKeys);
  const Strided& rows = params.bias;
  const RowsAnywhere anywhere(rows);
  const int64_t offset = batch * rows.batch_stride + head * rows.head_stride + key;
  const int64_t column = anywhere.column(offset);
  const int end = divide_up(min(query + kRows, params.queries), 8);
  const int lane = thread_index_anew() % 32;
  if (query < params.queries && anywhere.fits(rows, column, end, kRowBytes)) {
    if (lane != 0) return;
    publish_writes();  // by lanes, before
    there.arrive_and_expect(kRows * kRowBytes);
    start_copy_of_rows(shared, map, there, static_cast<int>(column / RowsAnywhere::kInMapEntry),
                       query / 8);
    return;
  }
  // Four lanes have a row of each eight, which have one shift.
  const int row = lane / 4, count = min(kRows, params.queries - query);
  const uintptr_t first = reinterpret_cast<uintptr_t>(rows.data) +
                          2 * (offset + int64_t{query + row} * rows.query_stride);
  const int before = static_cast<int>(first % 16);
  const int bytes = before + 2 * min(kKeys, params.keys - key);
  const char* from = reinterpret_cast<const char*>(first - before);
  uint32_t to = shared + row * kRowBytes + 2 * anywhere.shift(offset, row) - before;
#pragma unroll 1
  for (int i = row; i < count; i += 8) {
#pragma unroll
    for (int at = 0; at < kRowBytes; at += 64) {
      const int mine = at + lane % 4 * 16;
      if (mine < bytes) start_copy_of(to + mine, from + mine, min(bytes - mine, 16));
    }
    to += 8 * kRowBytes;
    from += 16 * rows.query_stride;
  }
  there.expect_copies();
  __syncwarp();  // all lanes expect theirs
  if (lane == 0) there.arrive();
}

}  // namespace megasoftmax
