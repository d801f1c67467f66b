#pragma once
// Rows of 16-bit entries that begin anywhere, as boxes of tensor copies. Plain C++, no CUDA, no
// torch.
//
// Tensor copies find rows at multiples of 16 bytes. Eight rows further is such a multiple, whatever
// the pitch. So rows 8 a + j have a dimension for a and one for each bit of j: 1, 2 and 4 rows
// further, rounded to the nearest multiple of 16 bytes. What rounding leaves of a row is its shift:
// the place of its first entry in a row of the box, which is wider than the keys by kMoreColumns.

#include <cstdint>

#include "../params.h"

namespace megasoftmax {

struct RowsAnywhere {
  // Entries of a row of a box beside its keys: at most 7 by the first address and 9 by rounding.
  static constexpr int kMoreColumns = 16;
  static constexpr int kVector = 8;  // entries in 16 bytes
  // Entries of the map are of 8 bytes, so that their numbers have 31 bits up to 16 GB.
  static constexpr int kInMapEntry = 4;

  // Bytes of a row of a box with these keys.
  static constexpr int row_bytes(int keys) { return 2 * (keys + kMoreColumns); }

  int left[3];  // of 1, 2, 4 rows by rounding, in entries, -3 to 4
  int first;    // of the tensor in the map

  __host__ __device__ explicit RowsAnywhere(const Strided& rows)
      : first(static_cast<int>(reinterpret_cast<uintptr_t>(rows.data) % 16 / 2)) {
    for (int i = 0; i < 3; ++i) {
      const int rest = static_cast<int>(rows.query_stride << i) & (kVector - 1);
      left[i] = rest > kVector / 2 ? rest - kVector : rest;
    }
  }
  // Where the map begins.
  __host__ __device__ static uintptr_t begin(const Strided& rows) {
    return reinterpret_cast<uintptr_t>(rows.data) / 16 * 16;
  }
  __host__ __device__ int least_left() const {
    int sum = 0;
    for (int i = 0; i < 3; ++i) sum += left[i] < 0 ? left[i] : 0;
    return sum;
  }
  // What rounding leaves of row j of eight.
  __host__ __device__ int left_of(int j) const {
    int sum = 0;
    for (int i = 0; i < 3; ++i) sum += (j >> i & 1) * left[i];
    return sum;
  }
  // The column of the map where a box begins whose rows, of a head, begin with the entry so far
  // behind the first one of the tensor. Negative, if rounding puts some before the map.
  __host__ __device__ int64_t column(int64_t offset) const {
    return (first + least_left() + offset) & -int64_t{kVector};
  }
  // Bytes from a row of the map's dimension for bit i of row numbers to the next, and from eight
  // rows to the next.
  __host__ __device__ int64_t step(const Strided& rows, int i) const {
    return 2 * ((rows.query_stride << i) - (i < 3 ? left[i] : 0));
  }
  // In bytes: a box that begins with this column reads nothing behind the storage up to row 8 * end
  // if end * step(rows, 3) is at most this. 0 for a box that would begin before the map.
  __host__ __device__ int64_t room(const Strided& rows, int64_t column, int row_bytes) const {
    if (column < 0) return 0;
    return static_cast<int64_t>(rows.last_whole_row - begin(rows)) - 2 * column + step(rows, 3) -
           step(rows, 0) - step(rows, 1) - step(rows, 2) - row_bytes;
  }
  // The shift of row j of eight in this box.
  __host__ __device__ int shift(int64_t offset, int j) const {
    return static_cast<int>(first + offset - column(offset)) + left_of(j);
  }
};

}  // namespace megasoftmax
