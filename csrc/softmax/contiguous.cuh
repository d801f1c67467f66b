#pragma once
// Rows of a contiguous tensor with nothing but a scale or a softcap (Rows::kContiguous,
// Rows::kContiguousRagged), by the formulas of forward.cuh and backward.cuh.
//
// A row has a warp for each of its segments, which stays in registers. These warps are a block, or
// the blocks of a cluster. A row of one segment has a warp, a part of a warp, or four warps if rows
// are few. Forward, a row of up to 8 vectors has 8 lanes. Segments and their sums are those of
// row_segments.cuh, except for ragged rows in one block. If rows are few, most of the time goes to
// the code before and behind their loads. So there is little of it, and parameters lie together.
//
// A ragged row has whole vectors from its first multiple of 16 bytes on. In one block, the rest at
// both ends is fewer elements than two vectors have, and lanes of the first warp take one element
// each. In a cluster, the ends cut vectors as in row_segments.cuh, so all bits are the same.

#include <algorithm>

#include "../common/launch.cuh"
#include "backward.cuh"
#include "logits.cuh"
#include "plan.h"
#include "row_segments.cuh"

namespace megasoftmax {

struct ContiguousRows {
  const void* input;          // scores, or the gradient of the probabilities
  const void* probabilities;  // backward
  void* result;               // probabilities, or the gradient of the scores
  float* log_sum_exp;         // [rows], or null
  const float* log_sum_exp_gradient;
  int rows, columns, segments, blocks_per_row;
  float scale;
  float of_empty;  // forward: a probability of a row of which nothing is visible
  DType result_type;
  // With a softcap. Backward, `probabilities` are scores.
  Softcap softcap;
  const float* read_log_sum_exp;
};

// For which the compiler leaves registers.
constexpr int contiguous_blocks_per_sm(const KernelShape& shape) {
  return std::max(blocks_with_registers(shape.blocks_per_sm, shape.threads()), 1);
}

// A lane's part of a row: where its vectors lie, and how the warps of the row exchange results.
template <class T, KernelShape kShape, bool kIsWhole>
struct ContiguousPart {
  static constexpr int kElements = kPackElements<T>, kVectors = kShape.vectors_per_thread;
  static constexpr int kLanes = kShape.threads_per_row < 32 ? kShape.threads_per_row : 32;
  static constexpr int kStride = kLanes * kElements;
  // Warps of a row: as many as it has segments, or those that share out the vectors of its only
  // segment.
  static constexpr bool kHasSegments = kShape.threads_per_row == kMostContiguousThreads;
  static constexpr bool kIsCluster = kShape.may_share_rows;
  static constexpr int kParts = kHasSegments ? 1 : kShape.threads_per_row / kLanes;
  static constexpr int kSegment = kParts * kVectors * kStride;
  static_assert(kWarpTilesPerSegment == 1 && kParts * kVectors * 32 == kWarpTileVectors);
  static constexpr bool kHasSingles = !kIsWhole && !kIsCluster, kHasCuts = !kIsWhole && kIsCluster;
  const ContiguousRows& rows;
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const int group = static_cast<int>(threadIdx.x / kLanes);  // of lanes, in the block
  int64_t row, first_element;
  int segment, column;  // of the first vector
  int single = -1;      // the column of the single element, where there is one
  bool is_first;        // lane of the row

  __device__ explicit ContiguousPart(const ContiguousRows& rows) : rows(rows) {
    row = kIsCluster ? cluster_of_block() : static_cast<int>(blockIdx.x);
    segment = kHasSegments ? group : 0;
    if (kIsCluster) segment += rank_in_cluster() * static_cast<int>(blockDim.x / 32);
    if (kShape.rows_per_block > 1) {
      row = row * kShape.rows_per_block + group;
      if (row >= rows.rows) segment = 1;
    }
    first_element = row * rows.columns;
    const bool is_first_warp = segment == 0 && (kParts == 1 || group == 0);
    is_first = is_first_warp && lane == 0;
    column = segment * kSegment + (kParts > 1 ? group * kStride : 0) + lane * kElements;
    if constexpr (!kIsWhole) {
      // Vectors begin where a line does. In one block, what lies before the row makes room for as
      // many vectors behind the last segment.
      const int phase =
          static_cast<int>(static_cast<uint32_t>(first_element) % (kLineVectors * kElements));
      column = kHasCuts || segment < rows.segments ? column - phase : rows.columns;
      if (kHasCuts) return;
      const int head = -phase & (kElements - 1), tail = (phase + rows.columns) & (kElements - 1);
      if (is_first_warp && lane < head) single = lane;
      if (is_first_warp && lane >= kElements && lane < kElements + tail)
        single = rows.columns - tail + lane - kElements;
    }
  }

  // From `column` to vector i.
  __device__ int distance(int i) const {
    return i * kStride + (kHasSingles && i == 0 && column < 0 ? rows.segments * kSegment : 0);
  }
  __device__ bool has(int i) const {
    const int at = column + distance(i);
    return at <= rows.columns - kElements && (!kHasCuts || at >= 0);
  }
  // Does an end of the row cut the vector? At most one of a lane.
  __device__ bool is_cut(int i) const {
    const int at = column + distance(i);
    return kHasCuts && at < rows.columns && at > -kElements && !has(i);
  }
  // What lies beside the row is 0 in a vector that its end cuts, and `missing` in others.
  __device__ void load(const void* data, Pack<T> missing, Pack<T> (&packs)[kVectors]) const {
    const T* const source = keep_in_register(static_cast<const T*>(data) + first_element + column);
    int cut = -1;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      packs[i] = missing;
      if (has(i)) packs[i] = load_pack<T, kElements>(source + distance(i));
      if (is_cut(i)) cut = i;
    }
    if (kHasCuts && cut >= 0) {
      const int at = column + cut * kStride;
      const auto partial =
          load_partial<T, kElements>(source + cut * kStride, 1, -at, rows.columns - at);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (i == cut) packs[i] = partial;
      }
    }
  }
  // Makes logits of scores.
  __device__ void prepare(Pack<T> (&scores)[kVectors]) const {
    if (!kHasCuts && rows.scale >= 0) return;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = column + distance(i);
      if (rows.scale < 0 && (has(i) || is_cut(i))) scores[i].flip_signs();
      if (is_cut(i)) scores[i].template fill_outside<Pack<T>::kLowestWord>(-at, rows.columns - at);
    }
  }
  // -inf in vectors that lie beside the row.
  __device__ void exclude_missing(Pack<T> (&scores)[kVectors]) const {
    bool has_all = true;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) has_all = has_all && has(i);
    if (has_all) return;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!has(i) && !is_cut(i)) scores[i] = Pack<T>::lowest();
    }
  }
  // Zeros to the lanes of vector i that lie beside the row.
  __device__ void clear_outside(int i, Pack<T>& pack) const {
    const int at = column + distance(i);
    if (is_cut(i)) {
      pack.template fill_outside<0>(-at, rows.columns - at);
    } else if (!has(i)) {
      pack = {};
    }
  }
  __device__ float load_single(const void* data, float missing) const {
    return single < 0 ? missing : to_float(static_cast<const T*>(data)[first_element + single]);
  }
  // value(i, j): of element j of vector i. single_value(): of the single one.
  template <class Value, class SingleValue>
  __device__ void store(Value&& value, SingleValue&& single_value) const {
    store_packs(
        [&](auto tag, int i) {
          float values[kElements];
#pragma unroll
          for (int j = 0; j < kElements; ++j) values[j] = value(i, j);
          return Pack<decltype(tag), kElements>::round(values);
        },
        single_value);
  }
  // pack_of(tag, i): vector i, of the type of the tag.
  template <class PackOf, class SingleValue>
  __device__ void store_packs(PackOf&& pack_of, SingleValue&& single_value) const {
    with_result_dtype<T>(rows.result_type, [&](auto tag) {
      using Out = decltype(tag);
      Out* const target = keep_in_register(static_cast<Out*>(rows.result) + first_element + column);
      Pack<Out, kElements> partial = {};
      int cut = -1;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (!has(i) && !is_cut(i)) continue;
        const Pack<Out, kElements> pack = pack_of(tag, i);
        if (has(i)) {
          store_pack<true>(target + distance(i), pack);
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

  // The maximum over all lanes of the segment.
  __device__ float max_of_segment(float mine) const {
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
  // of_vectors: sums of this lane's vectors.
  __device__ float sum_of_segment(const float (&of_vectors)[kVectors], float of_single) const {
    float sum = 0.f;
    if constexpr (kParts > 1) {
      __shared__ float of_parts[kParts + 1][32];
      of_parts[group][lane] = of_vectors[0];
      if (kHasSingles && group == 0) of_parts[kParts][lane] = of_single;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kParts; ++i) sum += of_parts[i][lane];
      if (kHasSingles) of_single = of_parts[kParts][lane];
    } else {
#pragma unroll
      for (const float of_vector : of_vectors) sum += of_vector;
    }
    return warp_sum<kLanes>(sum + of_single);
  }

  // The other blocks may send once this one has begun. After the loads: they need not wait for it.
  __device__ void begin_exchange() const {
    if constexpr (kIsCluster) {
      if (threadIdx.x == 0) {
        init_byte_barrier(barrier());
        expect_bytes(barrier(), rows.segments * kResultBytes);
      }
      arrive_at_cluster_relaxed();
    }
  }
  // The results of all segments.
  __device__ const MaxAndSum* exchange(MaxAndSum result) const {
    extern __shared__ __align__(16) char shared_memory[];
    auto* const results = reinterpret_cast<MaxAndSum*>(shared_memory);
    if constexpr (kIsCluster) {
      wait_for_cluster();
      if (segment < rows.segments && lane < rows.blocks_per_row)
        send_to_cluster(&results[segment], barrier(), lane,
                        reinterpret_cast<const uint64_t&>(result));
      wait_for_bytes(barrier(), 0);
    } else {
      if (lane == 0) results[segment] = result;
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

// Makes the compiler convert packs to floats again, because floats that it keeps take twice the
// registers. `never` is false, which the compiler does not know.
template <class T, int kElements, int kVectors>
__device__ inline void forget_elements(Pack<T, kElements> (&packs)[kVectors], bool never) {
  if (!never) return;
#pragma unroll
  for (auto& pack : packs) {
#pragma unroll
    for (uint32_t& word : pack.words) word = ~word;
  }
}

template <class T, class Bias, int kKernel, bool kIsWhole>
__global__ void __launch_bounds__(kForwardKernel<kKernel>.threads(),
                                  (contiguous_blocks_per_sm(kForwardKernel<kKernel>)))
    contiguous_forward_kernel(const __grid_constant__ ContiguousRows rows) {
  using Part = ContiguousPart<T, kForwardKernel<kKernel>, kIsWhole>;
  const Part part(rows);
  Pack<T> raw[Part::kVectors];
  part.load(rows.input, Bias::kCaps ? Pack<T>{} : Pack<T>::lowest(), raw);
  float single = Part::kHasSingles ? part.load_single(rows.input, -INFINITY) : -INFINITY;
  part.begin_exchange();
  const Exponent exponent{Bias::kCaps ? 1.f : fabsf(rows.scale) * kLog2E};
  float e[Part::kVectors][Part::kElements], sums[Part::kVectors];
  float of_single = 0.f;
  MaxAndSum mine{0.f, 0.f};
  if constexpr (Bias::kCaps) {
    const CappedLogits<T> capped(rows.softcap, true);
    const bool are_small = prepare_capped(capped, raw);
    part.exclude_missing(raw);
    part.prepare(raw);
    if (rows.scale < 0 && part.single >= 0) single = -single;
    if (part.single >= 0) of_single = exp2_approximate(capped.of_single(single));
    capped.exponentials(raw, are_small, 0.f, e);
  } else {
    part.prepare(raw);
    if (rows.scale < 0 && part.single >= 0) single = -single;
    const float least = Part::kHasSingles ? fmaxf(single, kLowest) : kLowest;
    mine.max = part.max_of_segment(fmaxf(largest_lane(raw), least));
  }
#pragma unroll
  for (int i = 0; i < Part::kVectors; ++i) {
    if constexpr (!Bias::kCaps) {
#pragma unroll
      for (int j = 0; j < Part::kElements; ++j) e[i][j] = exponent(raw[i][j], mine.max);
    }
    sums[i] = reduce_pairwise(e[i], [](float a, float b) { return a + b; });
  }
  if (!Bias::kCaps && Part::kHasSingles) of_single = exponent(single, mine.max);
  mine.sum = part.sum_of_segment(sums, of_single);
  if (Part::kHasSegments) mine = merge_segments<1>(part.exchange(mine), rows.segments, exponent);
  const Denominator denominator(mine, exponent);
  if (rows.log_sum_exp != nullptr && part.is_first)
    rows.log_sum_exp[part.row] = denominator.log_sum_exp();
  const float factor = denominator.is_regular() ? denominator.factor
                       : denominator.is_empty() ? rows.of_empty
                                                : NAN;
  if constexpr (Part::kHasSegments && !Bias::kCaps) {
    // Rows that wait in shared memory have the same bits.
    forget_elements(raw, rows.segments < 0);
    const float log2_factor = log2f(factor);
    const auto probability = [&](float z) {
      return exp2_approximate(fmaf(z - mine.max, exponent.c, log2_factor));
    };
    part.store([&](int i, int j) { return probability(raw[i][j]); },
               [&] { return probability(single); });
  } else if constexpr (Part::kHasSegments) {
    part.store_packs(
        [&](auto tag, int i) {
          using Result = Pack<decltype(tag), Part::kElements>;
          if constexpr (kKeepsExponentials<T, decltype(tag)>) {
            return probabilities_of(Result::round(e[i]), factor);
          } else {
            for (float& each : e[i]) each *= factor;
            return Result::round(e[i]);
          }
        },
        [&] { return of_single * factor; });
  } else {
    part.store([&](int i, int j) { return e[i][j] * factor; }, [&] { return of_single * factor; });
  }
}

// Forward, rows of at most 8 vectors lie across as many lanes: each has a vector of each of several
// rows, so that a warp reads and writes whole rows, which follow each other, at a time.
constexpr bool has_one_vector_per_lane(const KernelShape& shape) {
  return shape.threads_per_row * shape.vectors_per_thread <= 8;
}

template <class T, class Bias, int kKernel>
__global__ void __launch_bounds__(kForwardKernel<kKernel>.threads(),
                                  (contiguous_blocks_per_sm(kForwardKernel<kKernel>)))
    short_contiguous_forward_kernel(const __grid_constant__ ContiguousRows rows) {
  constexpr KernelShape kShape = kForwardKernel<kKernel>;
  constexpr int kElements = kPackElements<T>, kRows = kShape.vectors_per_thread;  // of a lane
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
    raw[i] = Bias::kCaps ? Pack<T>{} : Pack<T>::lowest();
    if (has(i)) raw[i] = load_pack<T, kElements>(source + i * stride);
  }
  if (rows.scale < 0) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (has(i)) raw[i].flip_signs();
    }
  }
  const Exponent exponent{Bias::kCaps ? 1.f : fabsf(rows.scale) * kLog2E};
  MaxAndSum totals[kRows] = {};
  float e[kRows][kElements];
  if constexpr (Bias::kCaps) {
    const CappedLogits<T> capped(rows.softcap, true);
    const bool are_small = prepare_capped(capped, raw);
    if (!has(kRows - 1)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (!has(i)) raw[i] = Pack<T>::lowest();
      }
    }
    capped.exponentials(raw, are_small, 0.f, e);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if constexpr (!Bias::kCaps) {
      const Pack<T> vector[1] = {raw[i]};
      totals[i].max = warp_max<kLanes>(fmaxf(largest_lane(vector), kLowest));
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if constexpr (!Bias::kCaps) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) e[i][j] = exponent(raw[i][j], totals[i].max);
    }
    totals[i].sum = reduce_pairwise(e[i], [](float a, float b) { return a + b; });
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) totals[i].sum = warp_sum<kLanes>(totals[i].sum);
  with_result_dtype<T>(rows.result_type, [&](auto tag) {
    using Out = decltype(tag);
    Out* const target = keep_in_register(static_cast<Out*>(rows.result) + first_element);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Denominator denominator(totals[i], exponent);
      const int row = first_row + i * kAtATime;
      if (rows.log_sum_exp != nullptr && lane == 0 && row < rows.rows)
        rows.log_sum_exp[row] = denominator.log_sum_exp();
      if (!has(i)) continue;
      const float factor = denominator.is_regular() ? denominator.factor
                           : denominator.is_empty() ? rows.of_empty
                                                    : NAN;
#pragma unroll
      for (int j = 0; j < kElements; ++j) e[i][j] *= factor;
      store_pack<true>(target + i * stride, Pack<Out, kElements>::round(e[i]));
    }
  });
}

template <class T, class Bias, int kKernel, bool kIsWhole>
__global__ void __launch_bounds__(kBackwardKernel<kKernel>.threads(),
                                  (contiguous_blocks_per_sm(kBackwardKernel<kKernel>)))
    contiguous_backward_kernel(const __grid_constant__ ContiguousRows rows) {
  using Part = ContiguousPart<T, kBackwardKernel<kKernel>, kIsWhole>;
  const Part part(rows);
  Pack<T> g[Part::kVectors], p[Part::kVectors];
  part.load(rows.input, Pack<T>{}, g);
  part.load(rows.probabilities, Pack<T>{}, p);
  float single_g = 0.f, single_p = 0.f;
  if constexpr (Part::kHasSingles) {
    single_g = part.load_single(rows.input, 0.f);
    single_p = part.load_single(rows.probabilities, 0.f);
    if (!Bias::kCaps && single_p == 0.f) single_g = 0.f;
  }
  part.begin_exchange();
  float sums[Part::kVectors];
  [[maybe_unused]] float single_slope = 1.f;
  if constexpr (Bias::kCaps) {
    const int64_t row = min(part.row, int64_t{rows.rows} - 1);
    const CappedProbabilities<T> capped(rows.softcap, rows.read_log_sum_exp[row]);
    const bool are_small = capped.are_small(p);
#pragma unroll
    for (int i = 0; i < Part::kVectors; ++i) {
      Pack<T> sloped;
      p[i] = capped.of(p[i], are_small, sloped);
      part.clear_outside(i, p[i]);
      sums[i] = dot(g[i], p[i]);
      p[i] = sloped;
    }
    if (part.single >= 0) single_p = capped.of_single(single_p, single_slope);
    if (single_p == 0.f) single_g = 0.f;
  } else {
#pragma unroll
    for (int i = 0; i < Part::kVectors; ++i) sums[i] = dot(g[i], p[i]);
  }
  float d = part.sum_of_segment(sums, __fmul_rn(single_p, single_g));
  if (Bias::kCaps) single_p *= single_slope;
  if (Part::kHasSegments) d = sum_segments<1>(part.exchange({0.f, d}), rows.segments);
  if (rows.log_sum_exp_gradient != nullptr && part.row < rows.rows)
    d -= rows.log_sum_exp_gradient[part.row];
  forget_elements(g, rows.segments < 0);
  forget_elements(p, rows.segments < 0);
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

// kernel_of.operator()<is whole>(): the kernel of rows with or without whole vectors only.
// kMayBeRagged: whether regimes of this shape serve ragged rows.
template <bool kMayBeRagged, class Kernel, class Params>
cudaError_t launch_contiguous(Kernel&& kernel_of, const RowShape& shape, ContiguousRows rows,
                              const Params& params, const Plan& plan, cudaStream_t stream) {
  void (*kernel)(ContiguousRows) = kernel_of.template operator()<true>();
  if constexpr (kMayBeRagged) {
    if (plan.kind == kContiguousRagged) kernel = kernel_of.template operator()<false>();
  }
  const int blocks = plan.schedule.blocks_per_row;
  rows.rows = static_cast<int>(params.shape.queries);
  rows.columns = static_cast<int>(params.shape.columns);
  rows.softcap = params.softcap;
  rows.segments = plan.schedule.max_segments;
  rows.blocks_per_row = blocks;
  const int64_t owners = divide_up<int64_t>(params.shape.queries, shape.rows_per_block);
  return launch(kernel, dim3(static_cast<unsigned>(owners * blocks)), dim3(plan.threads),
                plan.shared_bytes, blocks > 1 ? Together::kInClusters : Together::kNot, blocks,
                stream, rows);
}

template <class T, class Bias, int kIndex>
cudaError_t launch_contiguous_forward(const ForwardParams& params, const Plan& plan,
                                      cudaStream_t stream) {
  ContiguousRows rows = {};
  rows.scale = params.scale;
  rows.input = params.scores.data;
  rows.result = params.probabilities;
  rows.result_type = params.probabilities_type;
  rows.log_sum_exp = params.log_sum_exp;
  rows.of_empty = params.can_exclude ? 0.f : NAN;
  const auto kernel = []<bool kIsWhole>() {
    constexpr int kKernel = kernel_of(kForwardShapes, kIndex);
    if constexpr (has_one_vector_per_lane(kForwardKernel<kKernel>)) {
      return short_contiguous_forward_kernel<T, Bias, kKernel>;
    } else {
      return contiguous_forward_kernel<T, Bias, kKernel, kIsWhole>;
    }
  };
  constexpr unsigned kServed = rows_of_shape(kForwardRegimes, kIndex);
  return launch_contiguous<(kServed & kContiguousRagged) != 0>(kernel, kForwardShapes[kIndex], rows,
                                                               params, plan, stream);
}

template <class T, class Bias, int kIndex>
cudaError_t launch_contiguous_backward(const BackwardParams& params, const Plan& plan,
                                       cudaStream_t stream) {
  ContiguousRows rows = {};
  rows.scale = Bias::kCaps ? params.scale / kRaisedSlope<T> : params.scale;
  rows.input = params.gradient.data;
  rows.probabilities = params.probabilities.data;
  rows.result = params.scores_gradient;
  rows.result_type = params.scores_gradient_type;
  rows.log_sum_exp_gradient = params.log_sum_exp_gradient;
  rows.read_log_sum_exp = params.log_sum_exp;
  const auto kernel = []<bool kIsWhole>() {
    return contiguous_backward_kernel<T, Bias, kernel_of(kBackwardShapes, kIndex), kIsWhole>;
  };
  constexpr unsigned kServed = rows_of_shape(kBackwardRegimes, kIndex);
  return launch_contiguous<(kServed & kContiguousRagged) != 0>(kernel, kBackwardShapes[kIndex],
                                                               rows, params, plan, stream);
}

}  // namespace megasoftmax
