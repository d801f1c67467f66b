#pragma once
// p = exp(z - max z) / (sum exp(z - max z) + exp(sink - max z)),  z = scale * score + bias,
// excluded entries 0.
//
// A group of threads owns a row. One pass reads the visible chunks and keeps a maximum and a sum
// per thread, one reduction merges them, one pass writes. Every visible score is read once and
// every probability written once (bf16: 4 bytes per element, 3 when causal); rows too long for
// shared memory are read twice.

#include "chunks.cuh"
#include "row_block.cuh"
#include "row_warp.cuh"
#include "sink.cuh"

namespace megasoftmax {

template <int kThreadsPerRow, int kRowsPerBlock>
struct RowOwnerOf {
  using type = WarpRow<kThreadsPerRow, kRowsPerBlock>;
};
template <int kThreadsPerRow>
  requires(kThreadsPerRow > 32)
struct RowOwnerOf<kThreadsPerRow, 1> {
  using type = BlockRow<kThreadsPerRow>;
};
template <int kThreadsPerRow, int kRowsPerBlock>
using RowOwner = typename RowOwnerOf<kThreadsPerRow, kRowsPerBlock>::type;

// Blocks lie over the tensor as (queries of a tile, heads, tiles of all batches), from `first` on:
// a mask or bias that heads share stays in the caches from one head to the next when tiles are
// short.
__device__ inline RowIndex row_of_thread(const RowIndex& first, const Tiling& tiling,
                                         int rows_per_block, int row_in_block) {
  int64_t batch = blockIdx.z, tile = 0;
  if (tiling.tiles.divisor > 1) tiling.tiles.split(blockIdx.z, batch, tile);
  return {first.batch + static_cast<int>(batch), first.head + static_cast<int>(blockIdx.y),
          first.query +
              (static_cast<int>(tile) * tiling.blocks_per_tile + static_cast<int>(blockIdx.x)) *
                  rows_per_block +
              row_in_block};
}

// Makes logits of raw scores: complete ones with a bias; without, divided by |scale|, which the
// exponent makes good.
template <class T, class Mask, class Bias>
struct Logits {
  static constexpr int kElements = kPackElements<T>;

  const ForwardParams& params;
  const RowIndex& index;
  const Bounds& bounds;
  ChunkGrid<kElements> grid;
  Mask mask;

  __device__ Logits(const ForwardParams& params, const RowIndex& index, const Bounds& bounds,
                    ChunkGrid<kElements> grid)
      : params(params), index(index), bounds(bounds), grid(grid), mask(params.mask, index) {}

  // exp(z - max z) of what `of` gives.
  __device__ Exponent exponent() const {
    return {Bias::kPresent ? kLog2E : fabsf(params.scale) * kLog2E};
  }

  template <int kChunks>
  __device__ static void unpack(const Pack<T> (&raw)[kChunks], float (&z)[kChunks][kElements]) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) z[i][j] = raw[i][j];
    }
  }

  // Of chunks at column, column + kStride, ...; unspecified for chunks behind the bounds.
  template <int kStride, int kChunks>
  __device__ void of(int column, Pack<T> (&raw)[kChunks], float (&z)[kChunks][kElements]) const {
    [[maybe_unused]] MaskBytes<kElements> excluded[kChunks];
    if constexpr (Mask::kPresent) mask.template load<kElements, kStride>(column, bounds, excluded);
    [[maybe_unused]] Pack<typename Bias::Element, kElements> added[kChunks];
    if constexpr (Bias::kPresent) {
      const RowReader<typename Bias::Element, kElements, false> bias(
          params.bias, index, grid, bounds, static_cast<int>(params.shape.columns), true);
      bias.template load<kStride>(column, added);
    }
    if (!Bias::kPresent && params.scale < 0) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) raw[i].flip_signs();
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int at = column + i * kStride;
      if (at >= bounds.end) continue;
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        z[i][j] = Bias::kPresent ? fmaf(raw[i][j], params.scale, added[i][j]) : raw[i][j];
        if constexpr (Mask::kPresent) z[i][j] = excluded[i].is_set(j) ? -INFINITY : z[i][j];
      }
      if (bounds.contains(at, kElements)) continue;
#pragma unroll
      for (int j = 0; j < kElements; ++j) z[i][j] = bounds.contains(at + j) ? z[i][j] : -INFINITY;
    }
  }
};

template <class T, class Mask, class Bias, int kRegimeIndex>
__global__ void __launch_bounds__(
    kForwardRegimes[kRegimeIndex].threads(),
    (Bias::blocks_per_sm(Mask::blocks_per_sm(kForwardRegimes[kRegimeIndex].blocks_per_sm))))
    softmax_forward_kernel(const __grid_constant__ ForwardParams params,
                           const __grid_constant__ Tiling tiling, RowIndex first) {
  constexpr RowRegime kRegime = kForwardRegimes[kRegimeIndex];
  constexpr Storage kStorage = kRegime.storage;
  constexpr int kElements = kPackElements<T>, kChunks = kRegime.chunks_per_thread;
  constexpr int kThreads = kRegime.threads_per_row;
  constexpr int kStride = kThreads * kElements, kBatch = kChunks * kStride;  // in columns
  extern __shared__ __align__(16) char shared_memory[];

  RowOwner<kRegime.threads_per_row, kRegime.rows_per_block> owner;
  const int thread = owner.thread();
  const int columns = static_cast<int>(params.shape.columns);

  RowIndex index = row_of_thread(first, tiling, kRegime.rows_per_block, owner.row_in_block());
  const bool is_inside = index.query < static_cast<int>(params.shape.queries);
  if (kRegime.rows_per_block == 1 && !is_inside) return;
  const bool is_row = kRegime.rows_per_block == 1 || is_inside;
  if (!is_row)
    index.query = static_cast<int>(params.shape.queries) -
                  1;  // spare threads shadow a row, and write nothing
  const int64_t row = index.row(params.shape);

  const Bounds bounds = Bounds::of(params.window, params.shape, index.query);
  const auto grid = ChunkGrid<kElements>::aligned_to(row * columns);
  const int first_column = grid.begin(bounds) + thread * kElements;  // of this thread's first chunk
  const RowReader<T, kElements, true> scores(params.scores, index, grid, bounds, columns,
                                             row + kElements >= params.rows);
  const Logits<T, Mask, Bias> logits(params, index, bounds, grid);
  const Exponent exponent = logits.exponent();

  // Scores in shared memory take the mask in, as -inf, so that it is read once.
  constexpr bool kFoldsMask = kStorage == Storage::kShared && Mask::kPresent && !Bias::kPresent;
  [[maybe_unused]] auto* const kept = reinterpret_cast<Pack<T>*>(shared_memory) + thread;
  const auto load = [&](int column, int batch, Pack<T>(&raw)[kChunks]) {
    if constexpr (kStorage == Storage::kShared) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (column + i * kStride < bounds.end) raw[i] = kept[(batch + i) * kThreads];
      }
    } else {
      scores.template load<kStride>(column, raw);
    }
  };
  if constexpr (kStorage == Storage::kShared) {
    scores.template start_copies<kStride>(first_column, kept, kThreads);
  }

  float z[kChunks][kElements];
  MaxAndSum mine{kLowest, 0.f};
  for (int column = first_column, batch = 0;; column += kBatch, batch += kChunks) {
    Pack<T> raw[kChunks];
    if constexpr (kStorage != Storage::kShared) load(column, batch, raw);
    if (batch == 0) {  // while the loads are in flight
      if (is_row) {
        fill_outside<kThreads>(params.probabilities, params.probabilities_type, row, columns,
                               grid.begin(bounds), grid.end(bounds), thread);
      }
      if constexpr (kStorage == Storage::kShared) wait_for_copies();
    }
    if constexpr (kStorage == Storage::kShared) load(column, batch, raw);
    logits.template of<kStride>(column, raw, z);
    float max = mine.max;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (column + i * kStride >= bounds.end) continue;
      if constexpr (kFoldsMask) kept[(batch + i) * kThreads] = Pack<T>::round(z[i]);
      max = fmaxf(max, reduce_pairwise(z[i], [](float a, float b) { return fmaxf(a, b); }));
    }
    if constexpr (kStorage != Storage::kRegisters) mine.sum *= exponent(mine.max, max);
    mine.max = max;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (column + i * kStride >= bounds.end) continue;
#pragma unroll
      for (int j = 0; j < kElements; ++j) z[i][j] = exponent(z[i][j], max);
      mine.sum += reduce_pairwise(z[i], [](float a, float b) { return a + b; });
    }
    if (kStorage == Storage::kRegisters || column + kBatch >= bounds.end) break;
  }

  const MaxAndSum total = owner.merge(mine, exponent);
  const Denominator denominator(total, exponent, params.sink, index.head);
  if (params.log_sum_exp != nullptr && thread == 0 && is_row)
    params.log_sum_exp[row] = denominator.log_sum_exp();
  // A NaN or +inf makes the visible row NaN; nothing left makes it 0 where entries can be excluded,
  // NaN elsewhere.
  const bool is_special = !denominator.is_regular();
  // Exponentials in registers are relative to this thread's own maximum.
  const float factor =
      denominator.factor * (kStorage == Storage::kRegisters ? exponent(mine.max, total.max) : 1.f);

  const auto write = [&](auto output_tag) {
    const RowWriter<decltype(output_tag), kElements> writer(params.probabilities, row * columns,
                                                            columns);
    for (int column = first_column, batch = 0;; column += kBatch, batch += kChunks) {
      if constexpr (kStorage != Storage::kRegisters) {
        Pack<T> raw[kChunks];
        load(column, batch, raw);
        if constexpr (kFoldsMask) {
          Logits<T, NoMask, NoBias>::unpack(raw, z);
        } else {
          logits.template of<kStride>(column, raw, z);
        }
      }
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int at = column + i * kStride;
        if (at >= bounds.end) continue;
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          if constexpr (kStorage != Storage::kRegisters) z[i][j] = exponent(z[i][j], total.max);
          z[i][j] *= factor;
        }
        if (is_special) {
          const float special = denominator.is_empty() && params.can_exclude ? 0.f : NAN;
#pragma unroll
          for (int j = 0; j < kElements; ++j) {
            z[i][j] = bounds.contains(at + j) && !logits.mask.excluded(at + j) ? special : 0.f;
          }
        }
        writer.store(at, z[i]);
      }
      if (kStorage == Storage::kRegisters || column + kBatch >= bounds.end) break;
    }
  };
  if (is_row) with_dtype(params.probabilities_type, write);
}

}  // namespace megasoftmax
