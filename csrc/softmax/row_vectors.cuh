#pragma once
// A row as 16-byte vectors: which column a vector starts at, reading it and writing it.
//
// Vectors follow the 16-byte boundaries of the row that is written, so every store but the two at
// the ends is whole. Loads are whole too when the row that is read has the same phase, which rows
// of contiguous tensors have; otherwise they are made element by element from the L1 cache.

#include "regimes.h"
#include "scores.cuh"

namespace megasoftmax {

// Vector k covers columns [k * kElements - phase, (k + 1) * kElements - phase).
template <int kElements>
struct VectorGrid {
  static constexpr int kVectorElements = kElements;
  int phase;

  // The grid of a row that begins at `first_element` of the tensor.
  __device__ static VectorGrid aligned_to(int64_t first_element, int) {
    return {static_cast<int>(static_cast<uint32_t>(first_element) % kElements)};
  }
  __device__ int column(int vector) const { return vector * kElements - phase; }
  // Where the line of the first vector that meets the bounds begins, and where the last one ends.
  __device__ int begin(const Bounds& bounds) const {
    return column((bounds.begin + phase) / kElements & -kLineVectors);
  }
  __device__ int end(const Bounds& bounds) const {
    return bounds.end > bounds.begin ? column((bounds.end + phase + kElements - 1) / kElements)
                                     : begin(bounds);
  }
};

// The grid of rows that nothing is read with. If they are long and ragged, the first vector begins
// at a cache line, and the first few may end before column 0.
template <int kElements>
struct LineGrid : VectorGrid<kElements> {
  __device__ static LineGrid aligned_to(int64_t first_element, int columns) {
    const int segment = grid_elements(columns, kElements);  // a power of two
    return {{static_cast<int>(static_cast<uint32_t>(first_element) & (segment - 1))}};
  }
};

// Where the first vector of a row begins and the visible columns end, and which columns are visible
// for certain; of a pair of rows, of both together. Vectors that the lanes of a warp read at a
// time, or that the lanes of one row do, form a group: tests of whole groups cost a lane next to
// nothing.
struct Extent {
  int first_column, end;
  Bounds inside;
};

// Loads vectors of kElements values from a row with any stride. With kMayOverhang, vectors at the
// ends of the row are loaded whole too where the storage holds them, and read what lies beside the
// row.
template <class T, int kElements, bool kMayOverhang, int kUnroll = 1>
struct RowReader {
  const T* row;
  int64_t column_stride;
  Bounds bounds;
  int last_whole;  // where the last whole vector may begin
  Bounds inside;   // in which all vectors are whole

  // A row of a contiguous tensor begins at `first_element`.
  __device__ RowReader(const Strided& tensor, bool is_contiguous, int64_t first_element,
                       const RowIndex& index, VectorGrid<kElements> grid, const Bounds& bounds,
                       int columns)
      : row(static_cast<const T*>(tensor.data) +
            (is_contiguous ? first_element : index.offset_in(tensor))),
        column_stride(tensor.column_stride),
        bounds(bounds) {
    constexpr int kBytes = sizeof(T) * kElements;
    const bool is_whole =
        is_contiguous ||
        (tensor.column_stride == 1 && is_aligned(row + grid.column(0), kBytes < 16 ? kBytes : 16));
    const int room = columns - (kMayOverhang && has_whole_vectors(tensor, row) ? 1 : kElements);
    last_whole = is_whole ? min(bounds.end - 1, room) : -kElements;
    inside = {bounds.begin, min(bounds.end, last_whole + kElements)};
  }

  // Is all of a vector in the storage? It holds a column of the row, or lies behind it.
  __device__ bool is_whole(int column) const {
    return column <= last_whole && (kMayOverhang || column >= 0);
  }
  // Does vector i of several, which begins at `column`, not end before the row begins?
  template <int kStride>
  __device__ static bool is_of_row(int i, int column) {
    return i * kStride >= (kLineVectors - 1) * kElements || column > -kElements;
  }
  __device__ bool needs_partial() const {
    return last_whole < bounds.end - 1 || (!kMayOverhang && bounds.begin < kElements);
  }

  // Lanes outside the bounds are 0.
  __device__ Pack<T, kElements> partial(int column) const {
    return load_partial<T, kElements, kUnroll>(row + column * column_stride, column_stride,
                                               bounds.begin - column, bounds.end - column);
  }

  // Several vectors at a time, all in flight together: at column, column + kStride, ... Those
  // behind the bounds and lanes outside them are unspecified.
  template <int kStride, int kVectors>
  __device__ void load(int column, Pack<T, kElements> (&packs)[kVectors]) const {
    const T* const source = keep_in_register(row + column);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = column + i * kStride;
      if (is_of_row<kStride>(i, at) && is_whole(at))
        packs[i] = load_pack<T, kElements>(source + i * kStride);
    }
    if (!needs_partial()) return;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = column + i * kStride;
      if (at < bounds.end && !is_whole(at)) packs[i] = partial(at);
    }
  }

  // Copies several vectors to shared memory that only this thread reads, after wait_for_copies.
  template <int kStride, int kVectors>
  __device__ void start_copies(bool is_inside, int column, Pack<T, kElements>* shared,
                               int shared_stride) const {
    const T* const source = row + column;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = column + i * kStride;
      if (is_inside || (is_of_row<kStride>(i, at) && is_whole(at)))
        start_copy(shared + i * shared_stride, source + i * kStride);
    }
    if (is_inside || !needs_partial()) return;
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) {
      const int at = column + i * kStride;
      if (at > -kElements && at < bounds.end && !is_whole(at))
        shared[i * shared_stride] = partial(at);
    }
  }
};

// Writes vectors of kElements values to a contiguous row.
template <class T, int kElements>
struct RowWriter {
  T* row;
  Bounds columns;
  bool whole_vectors;

  __device__ RowWriter(void* data, int64_t first_element, int columns, bool whole_vectors = true)
      : row(static_cast<T*>(data) + first_element),
        columns{0, columns},
        whole_vectors(whole_vectors) {}

  __device__ static Pack<T, kElements> round(const float (&values)[kElements]) {
    return Pack<T, kElements>::round(values);
  }
  __device__ static void store_whole(T* at, const Pack<T, kElements>& pack) {
    store_pack<true>(at, pack);
  }
  __device__ static void store_whole(T* at, const float (&values)[kElements]) {
    store_whole(at, round(values));
  }
  __device__ void store(int column, const float (&values)[kElements]) const {
    store(column, round(values));
  }
  __device__ void store(int column, const Pack<T, kElements>& pack) const {
    if (whole_vectors && columns.contains(column, kElements)) {
      store_pack<true>(row + column, pack);
    } else {
      store_partial(row + column, pack, -column, columns.end - column);
    }
  }
  // Stores a vector, `is_whole` if all of it certainly lies inside the row.
  __device__ void store(bool is_whole, int column, const Pack<T, kElements>& pack) const {
    if (is_whole) {
      store_whole(row + column, pack);
    } else if (column < columns.end) {
      store(column, pack);
    }
  }
  // Zeros to those of the vectors at column, column + kStride, ... that begin at `begin` or later.
  template <int kStride, int kVectors>
  __device__ void fill_behind(int column, int begin) const {
    constexpr float kZeros[kElements] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = column + i * kStride;
      if (at >= begin && at < columns.end) store(at, kZeros);
    }
  }
};

// Zeros for every column of a contiguous row outside [begin, end), which are borders of vectors:
// fill(from, to) writes them.
template <class Fill>
__device__ inline void fill_outside(void* data, DType type, int64_t row, int columns, int begin,
                                    int end, Fill&& fill) {
  if (begin <= 0 && end >= columns) return;
  const int bytes = size_of(type);
  char* const start = static_cast<char*>(data) + row * columns * bytes;
  if (begin > 0) fill(start, start + int64_t{begin} * bytes);
  if (end < columns) fill(start + int64_t{max(end, 0)} * bytes, start + int64_t{columns} * bytes);
}
__device__ inline void fill_outside(void* data, DType type, int64_t row, int columns, int begin,
                                    int end, int thread, int threads) {
  fill_outside(data, type, row, columns, begin, end,
               [&](char* from, char* to) { fill_zero(from, to, thread, threads); });
}

}  // namespace megasoftmax
