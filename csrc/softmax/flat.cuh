#pragma once
// Softmax of tiny rows, forward and backward, by the formulas of forward.cuh and backward.cuh
// without mask, bias and window.
//
// A block takes a tile of consecutive rows, which is contiguous, through shared memory in vectors
// of 16 bytes, so that odd lengths cost device memory nothing: 4 bytes per element of a 2-byte type
// forward, 6 backward. In shared memory 1, 2, 4 ... or 32 lanes own a row, at most 16 elements
// each.

#include <algorithm>
#include <utility>

#include "../common/launch.cuh"
#include "../common/reduce.cuh"
#include "../common/vector.cuh"
#include "denominator.cuh"
#include "limits.h"
#include "params.h"

namespace megasoftmax {

inline constexpr int kFlatThreads = 256;
inline constexpr int kFlatMinLaneElements = 8, kFlatMaxLaneElements = 16;
// Shared memory of a block. With half of it 33 columns take 8% longer: starting a block costs as
// much as much of its work. The most rows of a tile keep enough blocks where rows are tiniest.
inline constexpr int kFlatTileBytes = 32768, kFlatMaxRows = 2048;
// If rows are few, tiles are smaller, so that there are about this many.
inline constexpr int kFlatTiles = 256;

struct FlatTiles {
  int64_t rows;
  int rows_per_tile, row_bytes, output_row_bytes;
  // In shared memory. The second input follows the first. The output takes the place of the first
  // if its elements have the same size. Options of rows come last.
  int input_bytes, output_offset, options_offset;
  Divider queries, heads;  // for the head of a row
};

// The tile of a block.
struct FlatTile {
  const FlatTiles& tiles;
  int64_t first_row;
  int rows;

  __device__ explicit FlatTile(const FlatTiles& tiles)
      : tiles(tiles),
        first_row(static_cast<int64_t>(blockIdx.x) * tiles.rows_per_tile),
        rows(static_cast<int>(
            min(static_cast<int64_t>(tiles.rows_per_tile), tiles.rows - first_row))) {}

  // Calls body(offset, word) for each 16 bytes, and for each 2 left behind them.
  template <class Body>
  __device__ void for_words(int row_bytes, Body&& body) const {
    const int bytes = rows * row_bytes, whole = bytes & ~15, thread = threadIdx.x;
#pragma unroll 2  // more takes registers from the rows
    for (int i = thread * 16; i < whole; i += kFlatThreads * 16) body(i, uint4{});
    if (whole + thread * 2 < bytes) body(whole + thread * 2, uint16_t{});
  }
  __device__ void start_load(char* shared, const void* data) const {
    const char* const from = static_cast<const char*>(data) + first_row * tiles.row_bytes;
    for_words(tiles.row_bytes, [&](int i, auto word) {
      if constexpr (sizeof(word) == 16) {
        start_copy(shared + i, from + i);
      } else {
        *reinterpret_cast<uint16_t*>(shared + i) = *reinterpret_cast<const uint16_t*>(from + i);
      }
    });
  }
  __device__ void store(void* data, const char* shared) const {
    char* const to = static_cast<char*>(data) + first_row * tiles.output_row_bytes;
    for_words(tiles.output_row_bytes, [&](int i, auto word) {
      using Word = decltype(word);
      __stcs(reinterpret_cast<Word*>(to + i), *reinterpret_cast<const Word*>(shared + i));
    });
  }
  __device__ void load_options(const TileOptions& options) const {
    options.load(rows, kFlatThreads, [&](int row) {
      int64_t plane, query, batch, head;
      tiles.queries.split(first_row + row, plane, query);
      tiles.heads.split(plane, batch, head);
      return head;
    });
  }
};

// The lanes of a row take its pieces of kPiece elements in turn, kElements each. The rows that a
// warp has at a time lie apart, so that rows of an odd number of pieces fall into different banks.
// Rows behind the end of the tensor are computed too, on whatever shared memory holds.
template <int kLanesPerRow, int kPieceElements, int kElements>
struct FlatRow {
  static constexpr int kLanes = kLanesPerRow, kPiece = kPieceElements, kPieces = kElements / kPiece;
  static constexpr int kRowsAtATime = kFlatThreads / kLanes;
  // There is a kernel for each multiple of kStep elements per lane. So all but the last ones
  // certainly belong to the row and need no check, which costs a third of an element's arithmetic.
  static constexpr int kStep = kPiece < 2 ? 2 : kPiece;
  static constexpr int kCertain = kElements == kFlatMinLaneElements ? 0 : kElements - kStep;
  using Values = float[kPieces][kPiece];

  int columns, lane, first_row;

  __device__ explicit FlatRow(int columns) : columns(columns), lane(threadIdx.x % kLanes) {
    constexpr int kWarps = kFlatThreads / 32, kApart = kLanes < kWarps ? kLanes : kWarps;
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / kLanes;
    first_row = warp / kApart * (32 / kLanes * kApart) + warp % kApart + group * kApart;
  }

  template <class Body>
  __device__ void for_pieces(Body&& body) const {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int element = (k * kLanes + lane) * kPiece;
      if (k * kPiece < kCertain || element < columns) body(k, element);
    }
  }
  template <class Body>
  __device__ static void for_values(Body&& body) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) body(i / kPiece, i % kPiece);
  }

  template <class T>
  __device__ void read(const T* row, float missing, Values& values) const {
    for_values([&](int k, int j) { values[k][j] = missing; });
    for_pieces([&](int k, int element) {
      if constexpr (kPiece == 1) {
        values[k][0] = to_float(row[element]);
      } else {
        const auto pack = *reinterpret_cast<const Pack<T, kPiece>*>(row + element);
#pragma unroll
        for (int j = 0; j < kPiece; ++j) values[k][j] = pack[j];
      }
    });
  }
  template <class T>
  __device__ void write(T* row, const Values& values) const {
    for_pieces([&](int k, int element) {
      if constexpr (kPiece == 1) {
        row[element] = static_cast<T>(values[k][0]);
      } else {
        *reinterpret_cast<Pack<T, kPiece>*>(row + element) = Pack<T, kPiece>::round(values[k]);
      }
    });
  }
};

template <class T, class Row>
__global__ void __launch_bounds__(kFlatThreads, (blocks_with_registers(5, kFlatThreads)))
    flat_forward_kernel(const __grid_constant__ ForwardParams params,
                        const __grid_constant__ FlatTiles tiles) {
  extern __shared__ __align__(16) char shared[];
  const FlatTile tile(tiles);
  const Row owner(static_cast<int>(params.shape.columns));
  const TileOptions options(params, shared + tiles.options_offset);
  tile.start_load(shared, params.scores.data);
  if (options.need_loading()) tile.load_options(options);
  wait_for_copies();
  __syncthreads();

  const Exponent exponent{fabsf(params.scale) * kLog2E};
  for (int row = owner.first_row; row < tiles.rows_per_tile; row += Row::kRowsAtATime) {
    typename Row::Values z;
    owner.read(reinterpret_cast<const T*>(shared) + row * owner.columns,
               params.scale < 0 ? INFINITY : -INFINITY, z);
    if (params.scale < 0) owner.for_values([&](int k, int j) { z[k][j] = -z[k][j]; });
    float max = kLowest, sum = 0.f;
    owner.for_values([&](int k, int j) { max = fmaxf(max, z[k][j]); });
    max = warp_max<Row::kLanes>(max);
    owner.for_values([&](int k, int j) { sum += z[k][j] = exponent(z[k][j], max); });
    sum = warp_sum<Row::kLanes>(sum);

    const Denominator denominator({max, sum}, exponent, options.of_row(row));
    if (params.log_sum_exp != nullptr && owner.lane == 0 && row < tile.rows)
      params.log_sum_exp[tile.first_row + row] = denominator.log_sum_exp();
    // The factor of an empty row is infinite, and 0 times that is NaN.
    const float factor = denominator.is_empty() && params.can_exclude ? 0.f : denominator.factor;
    owner.for_values([&](int k, int j) { z[k][j] *= factor; });
    with_result_dtype<T>(params.probabilities_type, [&](auto tag) {
      auto* const output = reinterpret_cast<decltype(tag)*>(shared + tiles.output_offset);
      owner.write(output + row * owner.columns, z);
    });
  }
  __syncthreads();
  tile.store(params.probabilities, shared + tiles.output_offset);
}

template <class T, class Row>
__global__ void __launch_bounds__(kFlatThreads, (blocks_with_registers(4, kFlatThreads)))
    flat_backward_kernel(const __grid_constant__ BackwardParams params,
                         const __grid_constant__ FlatTiles tiles) {
  extern __shared__ __align__(16) char shared[];
  const FlatTile tile(tiles);
  const Row owner(static_cast<int>(params.shape.columns));
  const TileOptions options(params, shared + tiles.options_offset);
  tile.start_load(shared, params.gradient.data);
  tile.start_load(shared + tiles.input_bytes, params.probabilities.data);
  if (options.need_loading()) tile.load_options(options);
  wait_for_copies();
  __syncthreads();

  for (int row = owner.first_row; row < tiles.rows_per_tile; row += Row::kRowsAtATime) {
    const T* const gradient = reinterpret_cast<const T*>(shared) + row * owner.columns;
    typename Row::Values g, p;
    owner.read(gradient, 0.f, g);
    owner.read(gradient + tiles.input_bytes / sizeof(T), 0.f, p);
    float d = 0.f;
    owner.for_values([&](int k, int j) { d += p[k][j] != 0.f ? p[k][j] * g[k][j] : 0.f; });
    d = warp_sum<Row::kLanes>(d);

    const int64_t global_row = tile.first_row + row;
    if (params.log_sum_exp_gradient != nullptr && row < tile.rows)
      d -= params.log_sum_exp_gradient[global_row];
    if (params.sink_gradient != nullptr && owner.lane == 0 && row < tile.rows)
      write_sink_gradient(params, global_row, d, options.logit_of(row));
    owner.for_values([&](int k, int j) {
      g[k][j] = p[k][j] != 0.f ? p[k][j] * (g[k][j] - d) * params.scale : 0.f;
    });
    with_result_dtype<T>(params.scores_gradient_type, [&](auto tag) {
      auto* const output = reinterpret_cast<decltype(tag)*>(shared + tiles.output_offset);
      owner.write(output + row * owner.columns, g);
    });
  }
  __syncthreads();
  tile.store(params.scores_gradient, shared + tiles.output_offset);
}

// A grid holds every tile that memory holds: 2^31 tiles are terabytes.
template <class T, class Row, class Params>
cudaError_t launch_flat(void (*kernel)(Params, FlatTiles), int inputs, DType output_type,
                        cudaStream_t stream, const Params& params) {
  FlatTiles tiles;
  tiles.rows = params.shape.rows();
  if (tiles.rows == 0) return cudaSuccess;
  const int columns = static_cast<int>(params.shape.columns);
  tiles.row_bytes = columns * static_cast<int>(sizeof(T));
  tiles.output_row_bytes = columns * size_of(output_type);
  const bool in_place = tiles.output_row_bytes == tiles.row_bytes;
  const int bytes_at_a_time =
      Row::kRowsAtATime * (inputs * tiles.row_bytes + (in_place ? 0 : tiles.output_row_bytes));
  const int most = std::min(kFlatTileBytes / bytes_at_a_time, kFlatMaxRows / Row::kRowsAtATime);
  const int64_t times = std::min<int64_t>(most, tiles.rows / (kFlatTiles * Row::kRowsAtATime));
  tiles.rows_per_tile = Row::kRowsAtATime * static_cast<int>(std::max<int64_t>(times, 1));
  tiles.input_bytes = tiles.rows_per_tile * tiles.row_bytes;
  tiles.output_offset = in_place ? 0 : inputs * tiles.input_bytes;
  tiles.options_offset =
      inputs * tiles.input_bytes + (in_place ? 0 : tiles.rows_per_tile * tiles.output_row_bytes);
  tiles.queries = Divider(params.shape.queries);
  tiles.heads = Divider(params.shape.heads);
  const int shared_bytes = tiles.options_offset + TileOptions::bytes(params, tiles.rows_per_tile);
  const auto grid = static_cast<unsigned>(divide_up<int64_t>(tiles.rows, tiles.rows_per_tile));
  return launch(kernel, dim3(grid), dim3(kFlatThreads), shared_bytes, Together::kNot, 1, stream,
                params, tiles);
}

// The rows that there are kernels for, by capacity: one lane first, then twice as many, and so on.
template <int kPiece>
struct FlatRows {
  static constexpr int kStep = FlatRow<1, kPiece, kFlatMinLaneElements>::kStep;
  static constexpr int kSteps = (kFlatMaxLaneElements - kFlatMinLaneElements) / kStep;
  // Of 0, 1, 2 ... times, as far as limits.h goes.
  static constexpr int kDoublings = kPiece == 1 ? 6 : 4;
  static_assert((kPiece == 1 ? kTinyRaggedColumns : kTinyColumns) == kFlatMaxLaneElements
                                                                         << (kDoublings - 1));
  using Indices = std::make_integer_sequence<int, 1 + kDoublings * kSteps>;

  static constexpr int doubled(int index) { return index == 0 ? 0 : (index - 1) / kSteps; }
  template <int kIndex>
  using Row = FlatRow<(1 << doubled(kIndex)), kPiece,
                      kFlatMinLaneElements + (kIndex - doubled(kIndex) * kSteps) * kStep>;
};

// Calls body.operator()<Row>() for the first that holds a row, with whole packs as pieces where
// they divide it.
template <class T, class Body>
cudaError_t with_flat_row(int64_t columns, Body&& body) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto first_of = [&]<int kPiece, int... kIndices>(std::integer_sequence<int, kIndices...>) {
    const auto try_row = [&]<class Row>() {
      if (columns > Row::kLanes * Row::kPieces * kPiece) return false;
      error = body.template operator()<Row>();
      return true;
    };
    (try_row.template operator()<typename FlatRows<kPiece>::template Row<kIndices>>() || ...);
  };
  if (constexpr int kPack = kPackElements<T>; columns % kPack == 0) {
    first_of.template operator()<kPack>(typename FlatRows<kPack>::Indices{});
  } else {
    first_of.template operator()<1>(typename FlatRows<1>::Indices{});
  }
  return error;
}

template <class T>
cudaError_t launch_flat_forward(const ForwardParams& params, cudaStream_t stream) {
  return with_flat_row<T>(params.shape.columns, [&]<class Row>() {
    return launch_flat<T, Row>(flat_forward_kernel<T, Row>, 1, params.probabilities_type, stream,
                               params);
  });
}

template <class T>
cudaError_t launch_flat_backward(const BackwardParams& params, cudaStream_t stream) {
  return with_flat_row<T>(params.shape.columns, [&]<class Row>() {
    return launch_flat<T, Row>(flat_backward_kernel<T, Row>, 2, params.scores_gradient_type, stream,
                               params);
  });
}

}  // namespace megasoftmax
