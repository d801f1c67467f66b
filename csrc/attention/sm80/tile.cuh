#pragma once
// Tiles in shared memory, and fragments of them for matrix instructions. A row consists of 16-byte
// vectors, which are swizzled so that the same vector of eight neighbouring rows lies in eight
// different banks. A step of a product takes 32 bytes of a row: 16 elements of 16 bits, or 8 of 32
// bits, which lie in a lane's registers in the same way.

#include "../../common/ptx.cuh"
#include "../../common/vector.cuh"
#include "../fragments.cuh"

namespace megasoftmax {

template <class T, int kRows_, int kColumns_>
struct Tile {
  using Element = T;
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kElementBytes = sizeof(T), kInVector = kPackElements<T>;
  static constexpr int kVectors = kColumns / kInVector, kRowBytes = kColumns * kElementBytes;
  static_assert(sizeof(T) == 2 || kVectors >= 8);
  static constexpr int kBytes = kRows * kRowBytes;

  uint32_t address;  // a multiple of kRowBytes

  // The offset of a 16-byte vector, in bytes.
  __device__ static uint32_t offset(int row, int vector) {
    if constexpr (sizeof(T) == 4) {
      // Two neighbouring vectors of rows 0 to 3, 4 to 7, of the even rows and of the odd ones lie
      // in different banks, too: these are what a lane loads word by word.
      const int turn = (row & 2) << 1 | ((row ^ row >> 2) & 1) << 1 | (row >> 2 & 1);
      return row * kRowBytes + (vector ^ turn) * 16;
    }
    const int turn = kVectors >= 8 ? row & 7 : row >> 1 & 3;
    return row * kRowBytes + (vector ^ turn) * 16;
  }
  // The offset of an element.
  __device__ static uint32_t place(int row, int column) {
    return offset(row, column / kInVector) + column % kInVector * kElementBytes;
  }

  // Starts to copy rows, by the threads of a block, or by as many of them from thread 0 on. What
  // lies beyond `rows` and `columns` becomes 0.
  template <int kThreads>
  __device__ void start_copy(const T* source, int64_t row_stride, int rows, int columns,
                             int thread = thread_index_anew()) const {
    constexpr int kRowsAtATime = kThreads / kVectors;
    static_assert(kRows % kRowsAtATime == 0);
    const int vector = thread % kVectors, first = thread / kVectors;
    const T* row = source + first * row_stride + vector * kInVector;
    // One offset serves all rows if the swizzle repeats.
    const auto place_of = [&](int i) {
      return address + (kRowsAtATime % 8 == 0 ? offset(first, vector) + i * kRowsAtATime * kRowBytes
                                              : offset(first + i * kRowsAtATime, vector));
    };
    if (rows >= kRows && columns >= kColumns) {
#pragma unroll
      for (int i = 0; i < kRows / kRowsAtATime; ++i) {
        megasoftmax::start_copy(place_of(i), row);
        row += kRowsAtATime * row_stride;
      }
      return;
    }
    const int bytes = min(max(columns - vector * kInVector, 0), kInVector) * kElementBytes;
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtATime; ++i) {
      const bool is_inside = first + i * kRowsAtATime < rows && bytes > 0;
      start_copy_of(place_of(i), is_inside ? row : source, is_inside ? bytes : 0);
      row += kRowsAtATime * row_stride;
    }
  }
};

// Where a lane finds its share of 16 x 16 elements of a tile. Its first `row` and `column` are
// multiples of 16. With 32-bit elements the share is of 16 x 8.
template <class Tile>
struct Fragments {
  uint32_t address;

  // For one loop over rows and columns.
  __device__ Fragments anew() const { return {unknown(address)}; }
  template <bool kArePairs>
  __device__ Fragments transposed_anew() const {
    return anew();
  }
  __device__ void load(uint32_t (&fragments)[4], int row, int column) const {
    load_matrices(fragments, (address ^ column * Tile::kElementBytes) + row * Tile::kRowBytes);
  }
  __device__ void load_transposed(uint32_t (&fragments)[4], int row, int column) const {
    load_matrices_transposed(fragments,
                             (address ^ column * Tile::kElementBytes) + row * Tile::kRowBytes);
  }
};

// Fragments of the left and right halves of rows 0 to 15, in the order upper left, lower left,
// upper right, lower right: the matrix `a` of a product and its result, or, transposed, two
// matrices `b` side by side.
template <class Tile>
struct FragmentsDown : Fragments<Tile> {
  __device__ FragmentsDown(const Tile& tile, int first_row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    this->address = tile.address + Tile::offset(first_row + lane % 16, lane / 16);
  }
};

// Fragments in the order upper left, upper right, lower left, lower right: two matrices `b`, whose
// columns are the rows of the tile, or transposed a matrix `a`, whose rows are its columns.
template <class Tile>
struct FragmentsAcross : Fragments<Tile> {
  __device__ FragmentsAcross(const Tile& tile, int first_row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    this->address = tile.address + Tile::offset(first_row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
};

// Transposed fragments of 32-bit elements, of 8 rows and 16 columns, word by word. A matrix
// instruction sums over the rows. A lane has two of them: i and i + 4, or, if kArePairs, 2 * i and
// 2 * i + 1, in the order of as_matrix_a.
template <class Tile, bool kIsDown, bool kArePairs>
struct TransposedWords {
  static constexpr int kSecond = kArePairs ? 1 : 4;       // rows further
  static constexpr uint32_t kTurn = kArePairs ? 32 : 48;  // its vector lies elsewhere in its row

  uint32_t address;

  __device__ explicit TransposedWords(uint32_t rows) {
    const int lane = thread_index_anew() % 32, row = lane % 4 * (kArePairs ? 2 : 1);
    address = unknown(rows + Tile::place(row, lane / 4));
  }
  __device__ void load_transposed(uint32_t (&fragments)[4], int row, int column) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int second = kIsDown ? i % 2 : i / 2, right = kIsDown ? i / 2 : i % 2;
      fragments[i] = load_word((address ^ (column + 8 * right) * 4 ^ second * kTurn) +
                               (row + second * kSecond) * Tile::kRowBytes);
    }
  }
};

// Fragments of 32-bit elements, from a row of a tile on that is a multiple of 8.
template <class Tile, bool kIsDown>
struct WideFragments {
  uint32_t rows;

  __device__ WideFragments(const Tile& tile, int first_row)
      : rows(tile.address + first_row * Tile::kRowBytes) {}
  __device__ Fragments<Tile> anew() const {
    const int lane = thread_index_anew() % 32;
    const int row = kIsDown ? lane % 16 : lane % 8 + lane / 16 * 8;
    return {unknown(rows + Tile::offset(row, kIsDown ? lane / 16 : lane / 8 % 2))};
  }
  template <bool kArePairs>
  __device__ TransposedWords<Tile, kIsDown, kArePairs> transposed_anew() const {
    return TransposedWords<Tile, kIsDown, kArePairs>(rows);
  }
};

template <class Tile>
  requires(sizeof(typename Tile::Element) == 4)
struct FragmentsDown<Tile> : WideFragments<Tile, true> {
  using WideFragments<Tile, true>::WideFragments;
};

template <class Tile>
  requires(sizeof(typename Tile::Element) == 4)
struct FragmentsAcross<Tile> : WideFragments<Tile, false> {
  using WideFragments<Tile, false>::WideFragments;
};

// Writes 16 rows of results, two neighbours rounded by round(first, second, half) at a time, to a
// tile, from its row `first_row` and column `first_column` on, a multiple of 8.
template <class Tile, int kN, class Round>
__device__ inline void store_to_tile(char* tile, int first_row, const float (&results)[kN][4],
                                     int first_column, Round&& round) {
  const FirstElement mine;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + mine.row + row_offset(0, 2 * half);
      const int first_vector = (first_column + n * 8) / Tile::kInVector;
      const int in_vector = mine.column % Tile::kInVector * Tile::kElementBytes;
      *reinterpret_cast<Pair<typename Tile::Element>*>(
          tile + Tile::offset(row, first_vector + mine.column / Tile::kInVector) + in_vector) =
          round(results[n][2 * half], results[n][2 * half + 1], half);
    }
  }
}

// Writes this warp's 16 rows of results, times a factor, to `rows` rows and `columns` columns of a
// tensor, a multiple of 8. Whole rows pass through the warp's part of a tile, from its row
// `warp_row` and column `first_column` on.
template <class T, class Tile, int kN>
__device__ inline void store_rows(char* tile, int warp_row, const float (&results)[kN][4],
                                  const float (&factors)[2], T* tensor, int64_t row_stride,
                                  int rows, int columns, int first_column = 0) {
  constexpr int kInVector = Tile::kInVector, kVectors = kN * 8 / kInVector;
  store_to_tile<Tile>(tile, warp_row, results, first_column,
                      [&](float first, float second, int half) {
                        return round_pair<T>(first * factors[half], second * factors[half]);
                      });
  __syncwarp();
#pragma unroll
  for (int i = thread_index_anew() % 32; i < 16 * kVectors; i += 32) {
    const int row = warp_row + i / kVectors, vector = first_column / kInVector + i % kVectors;
    if (row < rows && vector * kInVector < columns)
      *reinterpret_cast<uint4*>(tensor + row * row_stride + vector * kInVector) =
          *reinterpret_cast<const uint4*>(tile + Tile::offset(row, vector));
  }
}

// Columns 16 * n and on of results += a b, in one step of the sum.
//
// TF32 multiplies rounded elements. The precision of float32 takes three products: an element is
// its TF32 part and a rest, and the product of both rests is too small to count. An addition joins
// the three to the results, because it rounds to nearest, while sums of matrix instructions are
// truncated.
template <class T, int kM, int kN>
__device__ __forceinline__ void multiply_pair(Accumulators<kM, kN>& results, int n,
                                              const uint32_t (&a)[kM][4],
                                              const uint32_t (&pair)[4]) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      multiply_add<T>(results[m][2 * n], a[m], pair[0], pair[1]);
      multiply_add<T>(results[m][2 * n + 1], a[m], pair[2], pair[3]);
    }
  } else {
    constexpr bool kTakesThree = std::is_same_v<T, float>;
    float a_part[kM][4], a_rest[kM][4], b_part[4], b_rest[4], sums[kM][2][4] = {};
    const auto split = [](uint32_t word, float& part, float& rest) {
      part = to_tf32(__uint_as_float(word));
      rest = __uint_as_float(word) - part;
    };
    const auto add = [&](const float (&of_a)[kM][4], const float (&of_b)[4]) {
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i)
        multiply_add_tf32(kTakesThree ? sums[i / 2][i % 2] : results[i / 2][2 * n + i % 2],
                          of_a[i / 2], of_b[i % 2 * 2], of_b[i % 2 * 2 + 1]);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split(pair[i], b_part[i], b_rest[i]);
#pragma unroll
      for (int m = 0; m < kM; ++m) split(a[m][i], a_part[m][i], a_rest[m][i]);
    }
    if constexpr (kTakesThree) {
      add(a_rest, b_part);
      add(a_part, b_rest);
    }
    add(a_part, b_part);
    if constexpr (kTakesThree) {
#pragma unroll
      for (int i = 0; i < 8 * kM; ++i)
        results[i / 8][2 * n + i / 4 % 2][i % 4] += sums[i / 8][i / 4 % 2][i % 4];
    }
  }
}

// results += a b, in steps of kStep<T> of the sum. `load_b(pair, n, step)` gives columns 16 * n and
// on of b. Operands of the next instructions are loaded before the current ones run.
template <class T, int kSteps, int kM, int kN, class A, class LoadB>
__device__ __forceinline__ void multiply_ahead(Accumulators<kM, kN>& results, const A& a,
                                               LoadB&& load_b) {
  constexpr int kPairs = kN / 2;
  uint32_t rows[2][kM][4], pairs[2][4];
  const auto load_rows = [&](int step) {
#pragma unroll
    for (int m = 0; m < kM; ++m) a.load(rows[step % 2][m], m * 16, step * kStep<T>);
  };
  load_rows(0);
  load_b(pairs[0], 0, 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int now = (step * kPairs + n) % 2;
      if (n + 1 < kPairs) {
        load_b(pairs[1 - now], n + 1, step);
      } else if (step + 1 < kSteps) {
        load_rows(step + 1);
        load_b(pairs[1 - now], 0, step + 1);
      }
      multiply_pair<T>(results, n, rows[step % 2], pairs[now]);
    }
  }
}

// results += rows of `a` times rows of `b` transposed.
template <class T, int kColumns, int kM, int kN, class A, class B>
__device__ __forceinline__ void multiply_rows(Accumulators<kM, kN>& results, const A& rows_of_a,
                                              const B& rows_of_b) {
  const auto a = rows_of_a.anew();
  const auto b = rows_of_b.anew();
  multiply_ahead<T, kColumns / kStep<T>>(results, a, [&](uint32_t (&pair)[4], int n, int step) {
    b.load(pair, n * 16, step * kStep<T>);
  });
}

// results += a b, both tiles, `b` from column `first_column` on.
template <class T, int kInner, int kM, int kN, class A, class B>
__device__ __forceinline__ void multiply_tiles(Accumulators<kM, kN>& results, const A& rows_of_a,
                                               const B& rows_of_b, int first_column) {
  const auto a = rows_of_a.anew();
  const auto b = rows_of_b.template transposed_anew<false>();
  multiply_ahead<T, kInner / kStep<T>>(results, a, [&](uint32_t (&pair)[4], int n, int step) {
    b.load_transposed(pair, step * kStep<T>, first_column + n * 16);
  });
}

// results += weights times the rows of a tile. change(a, m, step) may change rounded weights: 16 *
// m rows and kStep<T> * step columns on.
template <class T, int kM, int kN, int kColumns, class Down, class Change>
__device__ __forceinline__ void multiply_weights(Accumulators<kM, kColumns>& results,
                                                 const Accumulators<kM, kN>& weights,
                                                 const Down& all_rows, Change&& change) {
  constexpr int kSteps = kN * 8 / kStep<T>, kPairs = kColumns / 2;
  const auto rows = all_rows.template transposed_anew<true>();
  uint32_t a[kM][4], pairs[2][4];
  rows.load_transposed(pairs[0], 0, 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      as_matrix_a<T>(a[m], weights[m], step);
      change(a[m], m, step);
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int now = (step * kPairs + n) % 2;
      if (n + 1 < kPairs) {
        rows.load_transposed(pairs[1 - now], step * kStep<T>, (n + 1) * 16);
      } else if (step + 1 < kSteps) {
        rows.load_transposed(pairs[1 - now], (step + 1) * kStep<T>, 0);
      }
      multiply_pair<T>(results, n, a, pairs[now]);
    }
  }
}

template <class T, int kM, int kN, int kColumns, class Down>
__device__ __forceinline__ void multiply_weights(Accumulators<kM, kColumns>& results,
                                                 const Accumulators<kM, kN>& weights,
                                                 const Down& all_rows) {
  multiply_weights<T>(results, weights, all_rows, [](uint32_t (&)[4], int, int) {});
}

// results += a^T b, few rows of both: `a` from column `first_row` on, `b` from column
// `first_column` on.
template <class T, int kRows, int kM, int kN, class Across, class Down>
__device__ __forceinline__ void multiply_transposed(Accumulators<kM, kN>& results,
                                                    const Across& columns_of_a,
                                                    const Down& rows_of_b, int first_row,
                                                    int first_column) {
  const auto a = columns_of_a.template transposed_anew<true>();
  const auto b = rows_of_b.template transposed_anew<true>();
#pragma unroll
  for (int step = 0; step < kRows / kStep<T>; ++step) {
    uint32_t columns[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) a.load_transposed(columns[m], step * kStep<T>, first_row + m * 16);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t pair[4];
      b.load_transposed(pair, step * kStep<T>, first_column + n * 16);
      multiply_pair<T>(results, n, columns, pair);
    }
  }
}

}  // namespace megasoftmax
