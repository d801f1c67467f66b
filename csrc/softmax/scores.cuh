#pragma once
// From raw scores to logits: which columns a row sees, then mask and bias, element by element.
//
// To add a mask: a struct with the members of BoolMask, an alternative in dispatch.cuh, a branch in
// reference/softmax.py, a test row.

#include "../common/math.cuh"
#include "../common/vector.cuh"
#include "params.h"

namespace megasoftmax {

// Columns [begin, end) that window, causality and range leave to a row. What lies outside may be
// read, as part of the vectors at the borders, where the storage holds them, but is never used.
struct Bounds {
  int begin, end;

  // `kMayHaveRange`: only then the range is looked for.
  template <bool kMayHaveRange, class Params>
  __device__ static Bounds of(const Params& params, const RowIndex& index) {
    const int columns = static_cast<int>(params.shape.columns);
    if (!params.is_limited) return {0, columns};
    const auto [left, right] = params.window;
    const int diagonal = index.query + columns - static_cast<int>(params.shape.queries);
    int begin = left < 0 ? 0 : max(diagonal - static_cast<int>(left), 0);
    int end = right < 0 ? columns : min(diagonal + static_cast<int>(right) + 1, columns);
    if constexpr (kMayHaveRange) {
      const auto& [first_of, end_of] = params.visible;
      if (first_of.data != nullptr)
        begin = max(begin, first_of.at(index.batch, index.head, index.query));
      if (end_of.data != nullptr) end = min(end, end_of.at(index.batch, index.head, index.query));
    }
    return end > begin ? Bounds{begin, end} : Bounds{0, 0};
  }
  __host__ __device__ bool contains(int column) const { return column >= begin && column < end; }
  // All of [first, first + count)? One comparison: what lies before the beginning wraps to a large
  // number.
  __host__ __device__ bool contains(int first, int count) const {
    const int room = end - begin - count;
    return room >= 0 && static_cast<unsigned>(first - begin) <= static_cast<unsigned>(room);
  }
};

// Does the storage of a tensor hold all of the 16-byte vectors that hold a row?
__device__ inline bool has_whole_vectors(const Strided& tensor, const void* row) {
  return reinterpret_cast<uintptr_t>(row) <= tensor.last_whole_row;
}

// Bytes that are not 0 where a column is excluded, four to a word.
template <int kElements>
struct alignas(kElements) MaskBytes {
  static constexpr int kWords = kElements / 4;
  uint32_t words[kWords];

  __device__ bool is_set(int j) const { return (words[j / 4] >> j % 4 * 8 & 0xff) != 0; }
  // -inf to the lanes that are set.
  template <class T>
  __device__ void lower(Pack<T, kElements>& pack) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t signs = signs_of_bytes(words[i]);
      if constexpr (sizeof(T) == 4) {
        pack.lower(4 * i, spread_signs<0x0000>(signs));
        pack.lower(4 * i + 1, spread_signs<0x1111>(signs));
        pack.lower(4 * i + 2, spread_signs<0x2222>(signs));
        pack.lower(4 * i + 3, spread_signs<0x3333>(signs));
      } else {
        pack.lower(2 * i, spread_signs<0x1100>(signs));
        pack.lower(2 * i + 1, spread_signs<0x3322>(signs));
      }
    }
  }
  // Drops the first `count` bytes, fewer than kElements, and appends as many of those that follow.
  __device__ void shift_out(int count, const MaskBytes& next) {
    if constexpr (kWords == 1) {
      words[0] = __funnelshift_r(words[0], next.words[0], count * 8);
    } else {
      static_assert(kWords == 2);
      const bool drops_word = count >= 4;
      const uint32_t first = drops_word ? words[1] : words[0],
                     second = drops_word ? next.words[0] : words[1],
                     third = drops_word ? next.words[1] : next.words[0];
      words[0] = __funnelshift_r(first, second, count * 8);  // modulo a word
      words[1] = __funnelshift_r(second, third, count * 8);
    }
  }
  __device__ void shift_in(uint32_t byte) {
#pragma unroll
    for (int i = 0; i + 1 < kWords; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], 8);
    words[kWords - 1] = words[kWords - 1] >> 8 | byte << 24;
  }
};

struct NoMask {
  static constexpr bool kPresent = false, kMayHaveRange = false, kDrops = false;
  static constexpr int blocks_per_sm(int of_regime) { return of_regime; }
  __device__ NoMask(const Strided&, const RowIndex&) {}
  __device__ bool excluded(int) const { return false; }
};

// Rows that have a range and no mask: bounds that were read need registers.
struct RangeAlone : NoMask {
  static constexpr bool kMayHaveRange = true;
  static constexpr int blocks_per_sm(int of_regime) {
    return of_regime - (of_regime < 5 ? 1 : of_regime / 5);
  }
  using NoMask::NoMask;
};

struct BoolMask {
  static constexpr bool kPresent = true, kMayHaveRange = true, kDrops = false;
  // Its bytes need registers.
  static constexpr int blocks_per_sm(int of_regime) { return RangeAlone::blocks_per_sm(of_regime); }
  const uint8_t* row;
  int64_t column_stride;
  bool has_words;  // all of the row may be read by aligned words, as long as a vector is wide

  __device__ BoolMask(const Strided& mask, const RowIndex& index)
      : row(static_cast<const uint8_t*>(mask.data) + index.offset_in(mask)),
        column_stride(mask.column_stride),
        has_words(column_stride == 1 && has_whole_vectors(mask, row)) {}

  __device__ bool excluded(int column) const { return row[column * column_stride] != 0; }

  // For vectors at column, column + kStride, ...: unspecified outside the bounds. Words are read
  // whole, with what lies beside the row in the aligned eight bytes at its ends; where the storage
  // lacks some of them, these vectors are read byte by byte.
  template <int kElements, int kStride, bool kInside, int kVectors>
  __device__ void load(int column, const Bounds& bounds,
                       MaskBytes<kElements> (&bytes)[kVectors]) const {
    const bool is_before_end =
        column + (kVectors - 1) * kStride + 2 * kElements <= bounds.end;  // and so are its words
    if (!has_words && (column_stride != 1 || !is_before_end)) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = column + i * kStride;
        if (at >= bounds.end) continue;
#pragma unroll 1
        for (int j = 0; j < kElements; ++j)
          bytes[i].shift_in(bounds.contains(at + j) && excluded(at + j) ? 1 : 0);
      }
    } else if (is_aligned(row + column, kElements)) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = column + i * kStride;
        if (kInside || at < bounds.end)
          bytes[i] = *reinterpret_cast<const MaskBytes<kElements>*>(row + at);
      }
    } else {  // the two aligned words that have the bytes, then shift them into place
      const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(row + column) % kElements);
      const int before = column - shift;
      const auto load = [&](int at, MaskBytes<kElements>& word) {
        if (kInside || (at < bounds.end && at + kElements > bounds.begin))
          word = *reinterpret_cast<const MaskBytes<kElements>*>(row + at);
      };
      MaskBytes<kElements> next[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        load(before + i * kStride, bytes[i]);
        load(before + i * kStride + kElements, next[i]);
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) bytes[i].shift_out(shift, next[i]);
    }
  }
};

// A mask that may be absent.
struct PossibleMask : BoolMask {
  using BoolMask::BoolMask;

  __device__ bool excluded(int column) const {
    return row != nullptr && BoolMask::excluded(column);
  }
  template <int kElements, int kStride, bool kInside, int kVectors>
  __device__ void load(int column, const Bounds& bounds,
                       MaskBytes<kElements> (&bytes)[kVectors]) const {
    if (row != nullptr) {
      BoolMask::load<kElements, kStride, kInside>(column, bounds, bytes);
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) bytes[i] = {};
    }
  }
};

// Rows of which dropout makes other entries 0 besides.
template <class Mask>
struct Dropped : Mask {
  static constexpr bool kDrops = true;
  // Finding them needs registers.
  static constexpr int blocks_per_sm(int of_regime) {
    const int of_mask = Mask::blocks_per_sm(of_regime);
    return of_mask - of_mask / 6;
  }
  using Mask::Mask;
};

struct NoBias {
  static constexpr bool kPresent = false, kCaps = false;
  static constexpr int blocks_per_sm(int of_regime) { return of_regime; }
  using Element = float;
};

// No bias, but capped logits of rows that nothing else changes, see capped.cuh.
struct CapAlone : NoBias {
  static constexpr bool kCaps = true;
};

// A bias in its own type, of logits that may be capped; row_vectors.cuh reads it as it reads
// scores.
template <class T>
struct AddedBias {
  static constexpr bool kPresent = true, kCaps = false;
  // Its packs need registers of their own.
  static constexpr int blocks_per_sm(int of_regime) { return (of_regime + 1) / 2; }
  using Element = T;
};

}  // namespace megasoftmax
