#pragma once
// Dense rows: of a contiguous tensor, with nothing but a scale (Rows::kDense, Rows::kDenseUneven),
// by the formulas of forward.cuh and backward.cuh.
//
// A row has a warp for each of its units, which stays in registers. These warps are a block, or the
// blocks of a cluster. A row of one unit has a warp or a part of one, or, where rows are few, four
// warps. Forward, rows of up to 8 chunks lie across 8 lanes. Units and their sums are those of
// row_units.cuh, but for uneven rows in one block. The time of few rows is that of the code before
// their loads and behind them, so there is little, and parameters lie together.
//
// Uneven rows have whole chunks from their first multiple of 16 bytes on. In one block, what is
// left at both ends is fewer elements than two chunks have: single ones of as many lanes of the
// first warp. In a cluster, chunks that the ends cut are those of row_units.cuh too, and so are all
// bits.

#include <algorithm>

#include "../common/launch.cuh"
#include "backward.cuh"
#include "logits.cuh"
#include "plan.h"
#include "row_units.cuh"

namespace megasoftmax {

struct DenseRows {
  const void* input;          // scores, or the gradient of the probabilities
  const void* probabilities;  // backward
  void* result;               // probabilities, or the gradient of the scores
  float* log_sum_exp;         // [rows], or null
  const float* log_sum_exp_gradient;
  int rows, columns, units, blocks_per_row;
  float scale;
  float of_empty;  // forward: a probability of a row of which nothing is visible
  DType result_type;
};

// For which the compiler leaves registers.
constexpr int dense_blocks_per_sm(const RowRegime& regime) {
  return std::max(blocks_with_registers(regime.blocks_per_sm, regime.shape().threads()), 1);
}

// Of a lane: where its chunks lie, and how the results of warps come to the others of the row.
template <class T, KernelShape kShape, bool kIsEven>
struct DensePart {
  static constexpr int kElements = kPackElements<T>, kChunks = kShape.chunks_per_thread;
  static constexpr int kLanes = kShape.threads_per_row < 32 ? kShape.threads_per_row : 32;
  static constexpr int kStride = kLanes * kElements;
  // Warps of a row: as many as it has units, or those that share out the chunks of its only unit.
  static constexpr bool kHasUnits = kShape.threads_per_row == kMostDenseThreads;
  static constexpr bool kIsCluster = kShape.may_share_rows;
  static constexpr int kParts = kHasUnits ? 1 : kShape.threads_per_row / kLanes;
  static constexpr int kUnit = kParts * kChunks * kStride;
  static_assert(kUnitBatches == 1 && kParts * kChunks * 32 == kChunksPerBatch);
  static constexpr bool kHasSingles = !kIsEven && !kIsCluster, kHasCuts = !kIsEven && kIsCluster;
  const DenseRows& rows;
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const int group = static_cast<int>(threadIdx.x / kLanes);  // of lanes, in the block
  int64_t row, first_element;
  int unit, column;  // of the first chunk
  int single = -1;   // the column of the single element, where there is one
  bool is_first;     // lane of the row

  __device__ explicit DensePart(const DenseRows& rows) : rows(rows) {
    row = kIsCluster ? cluster_of_block() : static_cast<int>(blockIdx.x);
    unit = kHasUnits ? group : 0;
    if (kIsCluster) unit += rank_in_cluster() * static_cast<int>(blockDim.x / 32);
    if (kShape.rows_per_block > 1) {
      row = row * kShape.rows_per_block + group;
      if (row >= rows.rows) unit = 1;
    }
    first_element = row * rows.columns;
    const bool is_first_warp = unit == 0 && (kParts == 1 || group == 0);
    is_first = is_first_warp && lane == 0;
    column = unit * kUnit + (kParts > 1 ? group * kStride : 0) + lane * kElements;
    if constexpr (!kIsEven) {
      // Chunks begin where a line does. In one block, what lies before the row makes room for as
      // many chunks behind the last unit.
      const int phase =
          static_cast<int>(static_cast<uint32_t>(first_element) % (kLineChunks * kElements));
      column = kHasCuts || unit < rows.units ? column - phase : rows.columns;
      if (kHasCuts) return;
      const int head = -phase & (kElements - 1), tail = (phase + rows.columns) & (kElements - 1);
      if (is_first_warp && lane < head) single = lane;
      if (is_first_warp && lane >= kElements && lane < kElements + tail)
        single = rows.columns - tail + lane - kElements;
    }
  }

  // Of chunk i, from `column` on.
  __device__ int distance(int i) const {
    return i * kStride + (kHasSingles && i == 0 && column < 0 ? rows.units * kUnit : 0);
  }
  __device__ bool has(int i) const {
    const int at = column + distance(i);
    return at <= rows.columns - kElements && (!kHasCuts || at >= 0);
  }
  // Does an end of the row cut the chunk? At most one of a lane.
  __device__ bool is_cut(int i) const {
    const int at = column + distance(i);
    return kHasCuts && at < rows.columns && at > -kElements && !has(i);
  }
  // What lies beside the row is 0 in a chunk that its end cuts, and `missing` in others.
  __device__ void load(const void* data, Pack<T> missing, Pack<T> (&packs)[kChunks]) const {
    const T* const source = keep_in_register(static_cast<const T*>(data) + first_element + column);
    int cut = -1;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      packs[i] = missing;
      if (has(i)) packs[i] = load_pack<T, kElements>(source + distance(i));
      if (is_cut(i)) cut = i;
    }
    if (kHasCuts && cut >= 0) {
      const int at = column + cut * kStride;
      const auto partial =
          load_partial<T, kElements>(source + cut * kStride, 1, -at, rows.columns - at);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (i == cut) packs[i] = partial;
      }
    }
  }
  // Makes logits of scores.
  __device__ void prepare(Pack<T> (&scores)[kChunks]) const {
    if (!kHasCuts && rows.scale >= 0) return;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int at = column + distance(i);
      if (rows.scale < 0 && (has(i) || is_cut(i))) scores[i].flip_signs();
      if (is_cut(i)) scores[i].template fill_outside<Pack<T>::kLowestWord>(-at, rows.columns - at);
    }
  }
  __device__ float load_single(const void* data, float missing) const {
    return single < 0 ? missing : to_float(static_cast<const T*>(data)[first_element + single]);
  }
  // value(i, j): of element j of chunk i. single_value(): of the single one.
  template <class Value, class SingleValue>
  __device__ void store(Value&& value, SingleValue&& single_value) const {
    with_result_dtype<T>(rows.result_type, [&](auto tag) {
      using Out = decltype(tag);
      Out* const target = keep_in_register(static_cast<Out*>(rows.result) + first_element + column);
      Pack<Out, kElements> partial = {};
      int cut = -1;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (!has(i) && !is_cut(i)) continue;
        float values[kElements];
#pragma unroll
        for (int j = 0; j < kElements; ++j) values[j] = value(i, j);
        const auto pack = Pack<Out, kElements>::round(values);
        if (has(i)) {
          store_streaming(target + distance(i), pack);
        } else {
          partial = pack;
          cut = i;
        }
      }
      if (kHasCuts && cut >= 0) {
        const int at = column + cut * kStride;
        store_partial(target + cut * kStride, partial, -at, rows.columns - at);
      }
      if (kHasSingles && single >= 0)
        static_cast<Out*>(rows.result)[first_element + single] = from_float<Out>(single_value());
    });
  }

  // Of all lanes of the unit.
  __device__ float max_of_unit(float mine) const {
    mine = warp_max<kLanes>(mine);
    if constexpr (kParts > 1) {
      __shared__ float of_parts[kParts];
      if (lane == 0) of_parts[group] = mine;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kParts; ++i) mine = fmaxf(mine, of_parts[i]);
    }
    return mine;
  }
  // of_chunks: sums of this lane's chunks.
  __device__ float sum_of_unit(const float (&of_chunks)[kChunks], float of_single) const {
    float sum = 0.f;
    if constexpr (kParts > 1) {
      __shared__ float of_parts[kParts + 1][32];
      of_parts[group][lane] = of_chunks[0];
      if (kHasSingles && group == 0) of_parts[kParts][lane] = of_single;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kParts; ++i) sum += of_parts[i][lane];
      if (kHasSingles) of_single = of_parts[kParts][lane];
    } else {
#pragma unroll
      for (const float of_chunk : of_chunks) sum += of_chunk;
    }
    return warp_sum<kLanes>(sum + of_single);
  }

  // The other blocks may send once this one has begun. After the loads: they need not wait for it.
  __device__ void begin_exchange() const {
    if constexpr (kIsCluster) {
      if (threadIdx.x == 0) {
        init_byte_barrier(barrier());
        expect_bytes(barrier(), rows.units * kResultBytes);
      }
      arrive_at_cluster_relaxed();
    }
  }
  // The results of all units.
  __device__ const MaxAndSum* exchange(MaxAndSum result) const {
    extern __shared__ __align__(16) char shared_memory[];
    auto* const results = reinterpret_cast<MaxAndSum*>(shared_memory);
    if constexpr (kIsCluster) {
      wait_for_cluster();
      if (unit < rows.units && lane < rows.blocks_per_row)
        send_to_cluster(&results[unit], barrier(), lane, reinterpret_cast<const uint64_t&>(result));
      wait_for_bytes(barrier(), 0);
    } else {
      if (lane == 0) results[unit] = result;
      __syncthreads();
    }
    return results;
  }

 private:
  __device__ static uint64_t* barrier() {
    __shared__ uint64_t of_block;
    return &of_block;
  }
};

// What the compiler has made of packs it must make again: kept, it would take twice the registers.
// `never` is false, which the compiler does not know.
template <class T, int kElements, int kChunks>
__device__ inline void forget_elements(Pack<T, kElements> (&packs)[kChunks], bool never) {
  if (!never) return;
#pragma unroll
  for (auto& pack : packs) {
#pragma unroll
    for (uint32_t& word : pack.words) word = ~word;
  }
}

template <class T, int kKernel, bool kIsEven>
__global__ void __launch_bounds__(kForwardRegimes[kKernel].shape().threads(),
                                  (dense_blocks_per_sm(kForwardRegimes[kKernel])))
    dense_forward_kernel(const __grid_constant__ DenseRows rows) {
  using Part = DensePart<T, kForwardRegimes[kKernel].shape(), kIsEven>;
  const Part part(rows);
  Pack<T> raw[Part::kChunks];
  part.load(rows.input, Pack<T>::lowest(), raw);
  float single = Part::kHasSingles ? part.load_single(rows.input, -INFINITY) : -INFINITY;
  part.begin_exchange();
  const Exponent exponent{fabsf(rows.scale) * kLog2E};
  part.prepare(raw);
  if (rows.scale < 0 && part.single >= 0) single = -single;
  const float least = Part::kHasSingles ? fmaxf(single, kLowest) : kLowest;
  MaxAndSum mine{part.max_of_unit(fmaxf(largest_lane(raw), least)), 0.f};
  float e[Part::kChunks][Part::kElements], sums[Part::kChunks];
#pragma unroll
  for (int i = 0; i < Part::kChunks; ++i) {
#pragma unroll
    for (int j = 0; j < Part::kElements; ++j) e[i][j] = exponent(raw[i][j], mine.max);
    sums[i] = reduce_pairwise(e[i], [](float a, float b) { return a + b; });
  }
  const float of_single = Part::kHasSingles ? exponent(single, mine.max) : 0.f;
  mine.sum = part.sum_of_unit(sums, of_single);
  if (Part::kHasUnits) mine = merge_units<1>(part.exchange(mine), rows.units, exponent);
  const Denominator denominator(mine, exponent, SinkLogit{}, 0);
  if (rows.log_sum_exp != nullptr && part.is_first)
    rows.log_sum_exp[part.row] = denominator.log_sum_exp();
  const float factor = denominator.is_regular() ? denominator.factor
                       : denominator.is_empty() ? rows.of_empty
                                                : NAN;
  if constexpr (Part::kHasUnits) {
    // As rows that wait in shared memory.
    forget_elements(raw, rows.units < 0);
    const float log2_factor = log2f(factor);
    const auto probability = [&](float z) {
      return exp2_approximate(fmaf(z - mine.max, exponent.c, log2_factor));
    };
    part.store([&](int i, int j) { return probability(raw[i][j]); },
               [&] { return probability(single); });
  } else {
    part.store([&](int i, int j) { return e[i][j] * factor; }, [&] { return of_single * factor; });
  }
}

// Forward, rows of at most 8 chunks lie across as many lanes: each has a chunk of each of several
// rows, so that a warp reads and writes whole rows, which follow each other, at a time.
constexpr bool lies_across(const KernelShape& shape) {
  return shape.threads_per_row * shape.chunks_per_thread <= 8;
}

template <class T, int kKernel>
__global__ void __launch_bounds__(kForwardRegimes[kKernel].shape().threads(),
                                  (dense_blocks_per_sm(kForwardRegimes[kKernel])))
    dense_forward_kernel_across(const __grid_constant__ DenseRows rows) {
  constexpr KernelShape kShape = kForwardRegimes[kKernel].shape();
  constexpr int kElements = kPackElements<T>, kRows = kShape.chunks_per_thread;  // of a lane
  constexpr int kLanes = kShape.threads_per_row * kRows, kAtATime = kShape.threads() / kLanes;
  static_assert(kAtATime * kRows == kShape.rows_per_block);
  const int lane = static_cast<int>(threadIdx.x % kLanes), column = lane * kElements;
  const int first_row =
      static_cast<int>(blockIdx.x) * kShape.rows_per_block + static_cast<int>(threadIdx.x / kLanes);
  const int64_t first_element = int64_t{first_row} * rows.columns + column;
  const int stride = kAtATime * rows.columns;
  const auto has = [&](int i) {
    return column < rows.columns && first_row + i * kAtATime < rows.rows;
  };
  const T* const source = keep_in_register(static_cast<const T*>(rows.input) + first_element);
  Pack<T> raw[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    raw[i] = Pack<T>::lowest();
    if (has(i)) raw[i] = load_pack<T, kElements>(source + i * stride);
  }
  if (rows.scale < 0) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (has(i)) raw[i].flip_signs();
    }
  }
  const Exponent exponent{fabsf(rows.scale) * kLog2E};
  MaxAndSum totals[kRows];
  float e[kRows][kElements];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Pack<T> chunk[1] = {raw[i]};
    totals[i].max = warp_max<kLanes>(fmaxf(largest_lane(chunk), kLowest));
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) e[i][j] = exponent(raw[i][j], totals[i].max);
    totals[i].sum = reduce_pairwise(e[i], [](float a, float b) { return a + b; });
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) totals[i].sum = warp_sum<kLanes>(totals[i].sum);
  with_result_dtype<T>(rows.result_type, [&](auto tag) {
    using Out = decltype(tag);
    Out* const target = keep_in_register(static_cast<Out*>(rows.result) + first_element);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Denominator denominator(totals[i], exponent, SinkLogit{}, 0);
      const int row = first_row + i * kAtATime;
      if (rows.log_sum_exp != nullptr && lane == 0 && row < rows.rows)
        rows.log_sum_exp[row] = denominator.log_sum_exp();
      if (!has(i)) continue;
      const float factor = denominator.is_regular() ? denominator.factor
                           : denominator.is_empty() ? rows.of_empty
                                                    : NAN;
#pragma unroll
      for (int j = 0; j < kElements; ++j) e[i][j] *= factor;
      store_streaming(target + i * stride, Pack<Out, kElements>::round(e[i]));
    }
  });
}

template <class T, int kKernel, bool kIsEven>
__global__ void __launch_bounds__(kBackwardRegimes[kKernel].shape().threads(),
                                  (dense_blocks_per_sm(kBackwardRegimes[kKernel])))
    dense_backward_kernel(const __grid_constant__ DenseRows rows) {
  using Part = DensePart<T, kBackwardRegimes[kKernel].shape(), kIsEven>;
  const Part part(rows);
  Pack<T> g[Part::kChunks], p[Part::kChunks];
  part.load(rows.input, Pack<T>{}, g);
  part.load(rows.probabilities, Pack<T>{}, p);
  float single_g = 0.f, single_p = 0.f;
  if constexpr (Part::kHasSingles) {
    single_g = part.load_single(rows.input, 0.f);
    single_p = part.load_single(rows.probabilities, 0.f);
    if (single_p == 0.f) single_g = 0.f;
  }
  part.begin_exchange();
  float sums[Part::kChunks];
#pragma unroll
  for (int i = 0; i < Part::kChunks; ++i) sums[i] = dot(g[i], p[i]);
  float d = part.sum_of_unit(sums, __fmul_rn(single_p, single_g));
  if (Part::kHasUnits) d = sum_units<1>(part.exchange({0.f, d}), rows.units);
  if (rows.log_sum_exp_gradient != nullptr && part.row < rows.rows)
    d -= rows.log_sum_exp_gradient[part.row];
  forget_elements(g, rows.units < 0);
  forget_elements(p, rows.units < 0);
  const auto store = [&](auto is_finite) {
    const auto gradient = [&](float g, float p) {
      return logit_gradient(g, p, 1.f, d, is_finite) * rows.scale;
    };
    part.store([&](int i, int j) { return gradient(g[i][j], p[i][j]); },
               [&] { return gradient(single_g, single_p); });
  };
  if (isfinite(d)) {
    store(std::true_type{});
  } else {
    store(std::false_type{});
  }
}

// kernel_of.operator()<is even>(): the kernel. kMayBeUneven: whether the regime serves such rows.
template <bool kMayBeUneven, class Kernel, class Params>
cudaError_t launch_dense(Kernel&& kernel_of, const RowRegime& regime, DenseRows rows,
                         const Params& params, const Plan& plan, cudaStream_t stream) {
  void (*kernel)(DenseRows) = kernel_of.template operator()<true>();
  if constexpr (kMayBeUneven) {
    if (plan.kind == kDenseUneven) kernel = kernel_of.template operator()<false>();
  }
  const int blocks = plan.schedule.blocks_per_row;
  rows.rows = static_cast<int>(params.shape.queries);
  rows.columns = static_cast<int>(params.shape.columns);
  rows.scale = params.scale;
  rows.units = plan.schedule.max_units;
  rows.blocks_per_row = blocks;
  const int64_t owners = divide_up<int64_t>(params.shape.queries, regime.rows_per_block);
  return launch(kernel, dim3(static_cast<unsigned>(owners * blocks)),
                dim3(threads_of(regime, plan.schedule)), plan.shared_bytes,
                blocks > 1 ? Together::kInClusters : Together::kNot, blocks, stream, rows);
}

template <class T, int kIndex>
cudaError_t launch_dense_forward(const ForwardParams& params, const Plan& plan,
                                 cudaStream_t stream) {
  constexpr RowRegime kRegime = kForwardRegimes[kIndex];
  DenseRows rows = {};
  rows.input = params.scores.data;
  rows.result = params.probabilities;
  rows.result_type = params.probabilities_type;
  rows.log_sum_exp = params.log_sum_exp;
  rows.of_empty = params.can_exclude ? 0.f : NAN;
  const auto kernel = []<bool kIsEven>() {
    constexpr int kKernel = kernel_of(kForwardRegimes, kIndex);
    if constexpr (lies_across(kForwardRegimes[kKernel].shape())) {
      return dense_forward_kernel_across<T, kKernel>;
    } else {
      return dense_forward_kernel<T, kKernel, kIsEven>;
    }
  };
  return launch_dense<(kRegime.serves & kDenseUneven) != 0>(kernel, kRegime, rows, params, plan,
                                                            stream);
}

template <class T, int kIndex>
cudaError_t launch_dense_backward(const BackwardParams& params, const Plan& plan,
                                  cudaStream_t stream) {
  constexpr RowRegime kRegime = kBackwardRegimes[kIndex];
  DenseRows rows = {};
  rows.input = params.gradient.data;
  rows.probabilities = params.probabilities.data;
  rows.result = params.scores_gradient;
  rows.result_type = params.scores_gradient_type;
  rows.log_sum_exp_gradient = params.log_sum_exp_gradient;
  const auto kernel = []<bool kIsEven>() {
    return dense_backward_kernel<T, kernel_of(kBackwardRegimes, kIndex), kIsEven>;
  };
  return launch_dense<(kRegime.serves & kDenseUneven) != 0>(kernel, kRegime, rows, params, plan,
                                                            stream);
}

}  // namespace megasoftmax
