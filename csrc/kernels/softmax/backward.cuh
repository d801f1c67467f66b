#pragma once
// dz = p * (g - D),  D = sum(g * p) - h,  d scores = scale * dz,  d bias = sum of dz over what was
// broadcast, d sink = -p_sink * D per row;  g and h are the gradients of probabilities and
// log-sum-exp. Where p is exactly 0 nothing is read into D and dz is exactly 0, whatever g holds
// there.
//
// A group of threads owns the rows that share a row of the bias gradient (a single row when there
// is none) and takes them in turn. Both inputs are read once, the gradient is written once (bf16: 6
// bytes per element, 4 when causal).

#include "forward.cuh"

namespace megasoftmax {

// Sums dz over an owner's rows: in registers where a row fits them, else in the owner's part of the
// output, which stays in the L2 cache.
template <int kRegimeIndex, int kElements>
struct BiasGradient {
  static constexpr bool kPresent = true;
  static constexpr RowRegime kRegime = kBackwardRegimes[kRegimeIndex];
  static constexpr bool kInRegisters = kRegime.storage == Storage::kRegisters;
  static constexpr int kChunks = kInRegisters ? kRegime.chunks_per_thread : 1;

  static constexpr int blocks_per_sm() {
    return (kRegime.blocks_per_sm + 1) / 2;
  }  // for the sums' registers

  float sums[kChunks][kElements] = {};
  const BackwardParams& params;
  int64_t owner;

  __device__ BiasGradient(const BackwardParams& params, int64_t owner)
      : params(params), owner(owner) {}

  __device__ int columns() const { return static_cast<int>(params.shape.columns); }

  template <int kThreads>
  __device__ void begin(int thread) {
    if constexpr (!kInRegisters) {
      fill_outside<kThreads>(params.bias_gradient, DType::kFloat32, owner, columns(), 0, 0, thread);
    }
  }
  __device__ void add(int i, int column, const float (&dz)[kElements]) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) sums[i][j] += dz[j];
    } else {
      float* row = static_cast<float*>(params.bias_gradient) + owner * columns();
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        if (column + j < columns()) row[column + j] += dz[j];
      }
    }
  }
  template <int kThreads>
  __device__ void finish(int thread) {
    if constexpr (kInRegisters) {
      with_dtype(params.bias_gradient_type, [&](auto tag) {
        const RowWriter<decltype(tag), kElements> writer(params.bias_gradient, owner * columns(),
                                                         columns(), columns() % kElements == 0);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          const int column = (i * kThreads + thread) * kElements;
          if (column < columns()) writer.store(column, sums[i]);
        }
      });
    }
  }
};

template <int kRegimeIndex, int kElements>
struct NoBiasGradient {
  static constexpr bool kPresent = false;
  static constexpr int blocks_per_sm() { return kBackwardRegimes[kRegimeIndex].blocks_per_sm; }
  __device__ NoBiasGradient(const BackwardParams&, int64_t) {}
  template <int kThreads>
  __device__ void begin(int) {}
  __device__ void add(int, int, const float (&)[kElements]) {}
  template <int kThreads>
  __device__ void finish(int) {}
};

// Probability 0 takes a lane out of all that follows.
template <class T>
__device__ inline void clear_outside(Pack<T>& probabilities, int column, const Bounds& bounds) {
  if (bounds.contains(column, kPackElements<T>)) return;
#pragma unroll
  for (int j = 0; j < kPackElements<T>; ++j) {
    if (!bounds.contains(column + j)) probabilities.clear(j);
  }
}

template <class T, template <int, int> class BiasGradientOf, int kRegimeIndex>
__global__ void __launch_bounds__(kBackwardRegimes[kRegimeIndex].threads(),
                                  (BiasGradientOf<kRegimeIndex, kPackElements<T>>::blocks_per_sm()))
    softmax_backward_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ Tiling tiling, RowIndex first) {
  constexpr RowRegime kRegime = kBackwardRegimes[kRegimeIndex];
  constexpr Storage kStorage = kRegime.storage;
  constexpr int kElements = kPackElements<T>, kChunks = kRegime.chunks_per_thread;
  constexpr int kThreads = kRegime.threads_per_row;
  constexpr int kStride = kThreads * kElements, kBatch = kChunks * kStride;  // in columns
  using Biases = BiasGradientOf<kRegimeIndex, kElements>;
  extern __shared__ __align__(16) char shared_memory[];

  RowOwner<kRegime.threads_per_row, kRegime.rows_per_block> owner;
  const int thread = owner.thread();
  const int columns = static_cast<int>(params.shape.columns);
  // In shared memory gradients and probabilities alternate.
  [[maybe_unused]] auto* const kept = reinterpret_cast<Pack<T>*>(shared_memory) + thread;

  // Parts of one bias row's sum lie a whole bias apart, as if it had `splits` times as many
  // batches.
  RowIndex base = row_of_thread(first, tiling, kRegime.rows_per_block, owner.row_in_block());
  const bool is_inside = base.query < static_cast<int>(params.bias_shape.queries);
  if (kRegime.rows_per_block == 1 && !is_inside) return;
  const bool is_owner = kRegime.rows_per_block == 1 || is_inside;
  if (!is_owner)
    base.query = static_cast<int>(params.bias_shape.queries) - 1;  // spare threads shadow an owner
  Biases biases(params, base.row(params.bias_shape));
  int split = 0;
  if constexpr (Biases::kPresent) {
    split = base.batch / static_cast<int>(params.bias_shape.batches);
    base.batch -= split * static_cast<int>(params.bias_shape.batches);
  }
  if (is_owner) biases.template begin<kThreads>(thread);

  const int64_t turns = Biases::kPresent ? params.rows_per_split : 1;
  for (int64_t turn = 0; turn < turns; ++turn) {
    RowIndex index = base;
    bool is_row = is_owner;
    if constexpr (Biases::kPresent) {
      int64_t shared = split * params.rows_per_split + turn;
      is_row = is_owner && shared < params.rows_per_owner;
      shared = is_row ? shared : 0;  // all owners in a warp take equally many turns
      int64_t plane, batch, head, query;
      params.shared_by_queries.split(shared, plane, query);
      params.shared_by_heads.split(plane, batch, head);
      index = {base.batch + static_cast<int>(batch), base.head + static_cast<int>(head),
               base.query + static_cast<int>(query)};
    }
    const int64_t row = index.row(params.shape);
    const Bounds bounds = Bounds::of(params.window, params.shape, index.query);
    // With a bias gradient every row of the owner must put a column into the same chunk.
    const auto grid = ChunkGrid<kElements>::aligned_to(Biases::kPresent ? 0 : row * columns);
    constexpr int kUnroll =
        Biases::kPresent ? kElements : 1;  // whose odd rows are partial throughout
    const bool is_last = row + kElements >= params.rows;
    const RowReader<T, kElements, true, kUnroll> gradients(params.gradient, index, grid, bounds,
                                                           columns, is_last);
    const RowReader<T, kElements, true, kUnroll> probabilities(params.probabilities, index, grid,
                                                               bounds, columns, is_last);
    // In registers a chunk's sums belong to one thread, so there the batch starts at column 0, not
    // at the window.
    const int first_column =
        (Biases::kPresent && kStorage == Storage::kRegisters ? 0 : grid.begin(bounds)) +
        thread * kElements;
    Pack<T> g[kChunks], p[kChunks];
    const auto load = [&](int column, int batch) {
      if constexpr (kStorage == Storage::kShared) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          if (column + i * kStride >= bounds.end) continue;
          g[i] = kept[2 * (batch + i) * kThreads];
          p[i] = kept[(2 * (batch + i) + 1) * kThreads];
        }
      } else {
        gradients.template load<kStride>(column, g);
        probabilities.template load<kStride>(column, p);
      }
    };
    if constexpr (kStorage == Storage::kShared) {
      gradients.template start_copies<kStride>(first_column, kept, 2 * kThreads);
      probabilities.template start_copies<kStride>(first_column, kept + kThreads, 2 * kThreads);
    }

    float dot = 0.f;
    for (int column = first_column, batch = 0;; column += kBatch, batch += kChunks) {
      if constexpr (kStorage != Storage::kShared) load(column, batch);
      if (batch == 0) {  // while the loads are in flight
        if (is_row) {
          fill_outside<kThreads>(params.scores_gradient, params.scores_gradient_type, row, columns,
                                 grid.begin(bounds), grid.end(bounds), thread);
        }
        if constexpr (kStorage == Storage::kShared) wait_for_copies();
      }
      if constexpr (kStorage == Storage::kShared) load(column, batch);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (column + i * kStride >= bounds.end) continue;
        clear_outside(p[i], column + i * kStride, bounds);
        float products[kElements];
#pragma unroll
        for (int j = 0; j < kElements; ++j) products[j] = p[i][j] != 0.f ? p[i][j] * g[i][j] : 0.f;
        dot += reduce_pairwise(products, [](float a, float b) { return a + b; });
      }
      if (kStorage == Storage::kRegisters || column + kBatch >= bounds.end) break;
    }

    float d = owner.sum(dot);
    if (params.log_sum_exp_gradient != nullptr) d -= params.log_sum_exp_gradient[row];
    if (params.sink_gradient != nullptr && thread == 0 && is_row) {
      const float sink = sink_logit(params.sink, index.head);
      const float share = exp2_approximate((sink - params.log_sum_exp[row]) * kLog2E);
      params.sink_gradient[row] = sink == -INFINITY ? 0.f : -share * d;
    }

    const auto write = [&](auto output_tag) {
      const RowWriter<decltype(output_tag), kElements> writer(
          params.scores_gradient, row * columns, columns,
          !Biases::kPresent || columns % kElements == 0);
      for (int column = first_column, batch = 0;; column += kBatch, batch += kChunks) {
        if constexpr (kStorage != Storage::kRegisters) load(column, batch);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          const int chunk_column = column + i * kStride;
          if (chunk_column >= bounds.end) continue;
          if constexpr (kStorage != Storage::kRegisters) clear_outside(p[i], chunk_column, bounds);
          float dz[kElements], dx[kElements];
#pragma unroll
          for (int j = 0; j < kElements; ++j) {
            const float probability = p[i][j];
            dz[j] = probability != 0.f ? probability * (g[i][j] - d) : 0.f;
            dx[j] = dz[j] * params.scale;
          }
          writer.store(chunk_column, dx);
          biases.add(i, chunk_column, dz);
        }
        if (kStorage == Storage::kRegisters || column + kBatch >= bounds.end) break;
      }
    };
    if (is_row) with_dtype(params.scores_gradient_type, write);
  }
  if (is_owner) biases.template finish<kThreads>(thread);
}

}  // namespace megasoftmax
