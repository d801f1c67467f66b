#pragma once
// Copies of rows of a bias that begin anywhere.

#include "ptx.cuh"
#include "rows_anywhere.h"

namespace megasoftmax {

// Starts to copy rows of a bias that begin anywhere, from `query` and `key` on, if there are some.
// A box reads beside its rows. Where that may lie outside of the storage, each row is copied by
// itself: the vectors of 16 bytes that have some of it.
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
  if (query < params.queries && anywhere.fits(rows, column, end, kRowBytes)) {
    there.arrive_and_expect(kRows * kRowBytes);
    start_copy_of_rows(shared, map, there, static_cast<int>(column / RowsAnywhere::kInMapEntry),
                       query / 8);
    return;
  }
  const int count = min(kRows, params.queries - query), keys = min(kKeys, params.keys - key);
  const uintptr_t first = reinterpret_cast<uintptr_t>(rows.data) + 2 * offset;
  const auto for_each_row = [&](auto&& body) {
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
      const uintptr_t from = first + 2 * int64_t{query + row} * rows.query_stride;
      const int before = static_cast<int>(from % 16);
      body(row, from - before, before, round_up(before + 2 * keys, 16));
    }
  };
  int bytes = 0;
  for_each_row([&](int, uintptr_t, int, int of_row) { bytes += of_row; });
  there.arrive_and_expect(bytes);
  for_each_row([&](int row, uintptr_t from, int before, int of_row) {
    const int place = 2 * anywhere.shift(offset, row % 8) - before;
    start_copy_of_bytes(shared + row * kRowBytes + place, reinterpret_cast<const void*>(from),
                        of_row, there);
  });
}

}  // namespace megasoftmax
