#pragma once
// A row as 16-byte chunks: which column a chunk starts at, reading it and writing it.
//
// Chunks follow the 16-byte boundaries of the row that is written, so every store but the two at
// the ends is whole. Loads are whole too when the row that is read has the same phase, which rows
// of contiguous tensors have; otherwise they are made element by element from the L1 cache.

#include "limits.h"
#include "scores.cuh"

namespace megasoftmax {

// Chunk k covers columns [k * kElements - phase, (k + 1) * kElements - phase).
template <int kElements>
struct ChunkGrid {
  static constexpr int kChunkElements = kElements;
  int phase;

  // Of a row of so many columns that begins at `first_element` of the tensor.
  __device__ static ChunkGrid aligned_to(int64_t first_element, int) {
    return {static_cast<int>(static_cast<uint32_t>(first_element) % kElements)};
  }
  __device__ int column(int chunk) const { return chunk * kElements - phase; }
  // Where the line of the first chunk that meets the bounds begins, and where the last one ends.
  __device__ int begin(const Bounds& bounds) const {
    return column((bounds.begin + phase) / kElements & -kLineChunks);
  }
  __device__ int end(const Bounds& bounds) const {
    return bounds.end > bounds.begin ? column((bounds.end + phase + kElements - 1) / kElements)
                                     : begin(bounds);
  }
};

// The same of rows that nothing is read with. Where they are long and uneven, the first chunk
// begins at a line, and the first few may end before column 0.
template <int kElements>
struct LineGrid : ChunkGrid<kElements> {
  __device__ static LineGrid aligned_to(int64_t first_element, int columns) {
    const int unit = grid_elements(columns, kElements);  // a power of two
    return {{static_cast<int>(static_cast<uint32_t>(first_element) & (unit - 1))}};
  }
};

// Where the first chunk of a row begins and the visible columns end, and which columns are visible
// for certain; of a pair of rows, of both together. Chunks that the lanes of a warp read at a time,
// or that the lanes of one row do, form a group: tests of whole groups cost a lane next to nothing.
struct Extent {
  int first_column, end;
  Bounds inside;
};

// Loads chunks of kElements values from a row with any stride. With kMayOverhang, chunks at the
// ends of the row are loaded whole too where the storage holds them, and read what lies beside the
// row.
template <class T, int kElements, bool kMayOverhang, int kUnroll = 1>
struct RowReader {
  const T* row;
  int64_t column_stride;
  Bounds bounds;
  int last_whole;  // where the last whole chunk may begin
  Bounds inside;   // in which all chunks are whole

  // Of a contiguous tensor the row begins at `first_element`.
  __device__ RowReader(const Strided& tensor, bool is_contiguous, int64_t first_element,
                       const RowIndex& index, ChunkGrid<kElements> grid, const Bounds& bounds,
                       int columns)
      : row(static_cast<const T*>(tensor.data) +
            (is_contiguous ? first_element : index.offset_in(tensor))),
        column_stride(tensor.column_stride),
        bounds(bounds) {
    constexpr int kBytes = sizeof(T) * kElements;
    const bool is_whole =
        is_contiguous ||
        (tensor.column_stride == 1 && is_aligned(row + grid.column(0), kBytes < 16 ? kBytes : 16));
    const int room = columns - (kMayOverhang && has_whole_chunks(tensor, row) ? 1 : kElements);
    last_whole = is_whole ? min(bounds.end - 1, room) : -kElements;
    inside = {bounds.begin, min(bounds.end, last_whole + kElements)};
  }

  // Of a chunk that holds a column of the row, or behind it.
  __device__ bool is_whole(int column) const {
    return column <= last_whole && (kMayOverhang || column >= 0);
  }
  // Does chunk i of several, which begins at `column`, not end before the row begins?
  template <int kStride>
  __device__ static bool is_of_row(int i, int column) {
    return i * kStride >= (kLineChunks - 1) * kElements || column > -kElements;
  }
  __device__ bool needs_partial() const {
    return last_whole < bounds.end - 1 || (!kMayOverhang && bounds.begin < kElements);
  }

  // Lanes outside the bounds are 0.
  __device__ Pack<T, kElements> partial(int column) const {
    return load_partial<T, kElements, kUnroll>(row + column * column_stride, column_stride,
                                               bounds.begin - column, bounds.end - column);
  }

  // Several chunks at a time, all in flight together: at column, column + kStride, ... Those behind
  // the bounds and lanes outside them are unspecified.
  template <int kStride, int kChunks>
  __device__ void load(int column, Pack<T, kElements> (&packs)[kChunks]) const {
    const T* const source = keep_in_register(row + column);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int at = column + i * kStride;
      if (is_of_row<kStride>(i, at) && is_whole(at))
        packs[i] = load_pack<T, kElements>(source + i * kStride);
    }
    if (!needs_partial()) return;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int at = column + i * kStride;
      if (at < bounds.end && !is_whole(at)) packs[i] = partial(at);
    }
  }

  // The same, to shared memory that only this thread reads after wait_for_copies.
  template <int kStride, int kChunks>
  __device__ void start_copies(bool is_inside, int column, Pack<T, kElements>* shared,
                               int shared_stride) const {
    const T* const source = row + column;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int at = column + i * kStride;
      if (is_inside || (is_of_row<kStride>(i, at) && is_whole(at)))
        start_copy(shared + i * shared_stride, source + i * kStride);
    }
    if (is_inside || !needs_partial()) return;
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i) {
      const int at = column + i * kStride;
      if (at > -kElements && at < bounds.end && !is_whole(at))
        shared[i * shared_stride] = partial(at);
    }
  }
};

// Writes chunks of kElements values to a contiguous row.
template <class T, int kElements>
struct RowWriter {
  T* row;
  Bounds columns;
  bool whole_chunks;

  __device__ RowWriter(void* data, int64_t first_element, int columns, bool whole_chunks = true)
      : row(static_cast<T*>(data) + first_element),
        columns{0, columns},
        whole_chunks(whole_chunks) {}

  __device__ static Pack<T, kElements> round(const float (&values)[kElements]) {
    return Pack<T, kElements>::round(values);
  }
  __device__ static void store_whole(T* at, const Pack<T, kElements>& pack) {
    store_streaming(at, pack);
  }
  __device__ static void store_whole(T* at, const float (&values)[kElements]) {
    store_whole(at, round(values));
  }
  __device__ void store(int column, const float (&values)[kElements]) const {
    store(column, round(values));
  }
  __device__ void store(int column, const Pack<T, kElements>& pack) const {
    if (whole_chunks && columns.contains(column, kElements)) {
      store_streaming(row + column, pack);
    } else {
      store_partial(row + column, pack, -column, columns.end - column);
    }
  }
  // Stores a chunk, `is_whole` if all of it certainly lies inside the row.
  __device__ void store(bool is_whole, int column, const Pack<T, kElements>& pack) const {
    if (is_whole) {
      store_whole(row + column, pack);
    } else if (column < columns.end) {
      store(column, pack);
    }
  }
  // Zeros to those of the chunks at column, column + kStride, ... that begin at `begin` or later.
  template <int kStride, int kChunks>
  __device__ void fill_behind(int column, int begin) const {
    constexpr float kZeros[kElements] = {};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int at = column + i * kStride;
      if (at >= begin && at < columns.end) store(at, kZeros);
    }
  }
};

// Zeros for every column of a contiguous row outside [begin, end), which are borders of chunks:
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
