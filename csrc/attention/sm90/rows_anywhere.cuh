#pragma once
// Copies of rows of a bias that begin anywhere.

#include "ptx.cuh"
#include "rows_anywhere.h"

namespace megasoftmax {

// Copies kRows rows and kKeys keys at a time, from one key on. What its calls have in common is
// computed once, because one warp makes the copies of a block.
template <int kRows, int kKeys>
class CopyOfRowsAnywhere {
 public:
  __device__ __forceinline__ CopyOfRowsAnywhere(const AttentionParams& params, int batch, int head,
                                                int key)
      : batch_(batch), head_(head), key_(key) {
    const Strided& rows = params.bias;
    const RowsAnywhere anywhere(rows);
    const int64_t column = anywhere.column(offset(rows, batch, head, key));
    eight_ = anywhere.step(rows, 3);
    room_ = anywhere.room(rows, column, kRowBytes);
    column_ = static_cast<int>(column / RowsAnywhere::kInMapEntry);
  }
  // Starts a copy from `query` on, if there are rows. All lanes of a warp call it. A box reads
  // beside its rows. Where that may lie outside of the storage, the lanes copy the vectors of 16
  // bytes that have some of a row, up to its end.
  __device__ __forceinline__ void start(const AttentionParams& params, const CUtensorMap& map,
                                        uint32_t shared, Barrier there, int query) const {
    const int lane = thread_index_anew() % 32;
    const int end = divide_up(min(query + kRows, params.queries), 8);
    if (query < params.queries && end * eight_ <= room_) {
      if (lane != 0) return;
      publish_writes();  // by lanes, before
      there.arrive_and_expect(kRows * kRowBytes);
      start_copy_of_rows(shared, map, there, column_, query / 8);
      return;
    }
    // Four lanes have a row of each eight, which have one shift.
    const Strided& rows = params.bias;
    const int key = unknown(key_);  // what follows is rare, and computed where it is needed
    const int64_t begin = offset(rows, batch_, head_, key);
    const int row = lane / 4, count = min(kRows, params.queries - query);
    const uintptr_t first = reinterpret_cast<uintptr_t>(rows.data) +
                            2 * (begin + int64_t{query + row} * rows.query_stride);
    const int before = static_cast<int>(first % 16);
    const int bytes = before + 2 * min(kKeys, params.keys - key);
    const char* from = reinterpret_cast<const char*>(first - before);
    uint32_t to = shared + row * kRowBytes + 2 * RowsAnywhere(rows).shift(begin, row) - before;
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

 private:
  static constexpr int kRowBytes = RowsAnywhere::row_bytes(kKeys);

  __device__ static int64_t offset(const Strided& rows, int batch, int head, int key) {
    return batch * rows.batch_stride + head * rows.head_stride + key;
  }

  int batch_, head_, key_;
  int column_;            // of the map, where boxes begin
  int64_t eight_, room_;  // bytes from eight rows to the next; see RowsAnywhere::room
};

}  // namespace megasoftmax
