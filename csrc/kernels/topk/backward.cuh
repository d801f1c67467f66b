#pragma once
// dz_j = p_j (h - sum(g P)) + sum over k with i_k = j of g_k p_j,  p = exp(z - log-sum-exp), with P
// the k probabilities, g their gradients, h that of the log-sum-exp; renormalised
// dz_j = p_j h + sum over k with i_k = j of P_k (g_k - sum(g P)).
//
// Nothing is summed over a row, so any number of threads can own a part of it: they write the first
// term, then, behind a barrier, both terms where an index is theirs. Each logit is read once and
// each gradient written once.

#include "row.cuh"

namespace megasoftmax {

// exp(z - max - log sum) of a row.
template <class T, class Mask, class Bias>
struct TopkProbability {
  const TopkBackwardParams& params;
  const Mask& mask;
  float max, offset;
  bool is_nan;

  __device__ TopkProbability(const TopkBackwardParams& params, const Mask& mask, int64_t row)
      : params(params), mask(mask), max(params.statistics[row]) {
    // Of a row without anything left nothing is visible, and every probability is 0.
    if (max == -INFINITY && params.can_exclude) max = 0.f;
    offset = params.statistics[params.rows + row] * -kLog2E;
    if (offset == INFINITY) offset = params.can_exclude ? 0.f : NAN;
    is_nan = max != max;
  }
  // `z`: as Logits has it.
  __device__ float operator()(float z, int column) const {
    float difference = z - max;
    if constexpr (!Bias::kPresent) difference = fmaf(z, fabsf(params.scale), -max);
    const float p = exp2_approximate(fmaf(difference, kLog2E, offset));
    return Mask::kPresent && is_nan && mask.excluded(column) ? 0.f : p;
  }
};

template <class T, class Mask, class Bias, int kRegime>
__global__ void __launch_bounds__(
    kTopkBackwardRegimes[kRegime].threads(),
    (Bias::blocks_per_sm(Mask::blocks_per_sm(kTopkBackwardRegimes[kRegime].blocks_per_sm))))
    topk_backward_kernel(const __grid_constant__ TopkBackwardParams params,
                         const __grid_constant__ Schedule schedule) {
  constexpr TopkBackwardRegime kShape = kTopkBackwardRegimes[kRegime];
  constexpr int kThreads = kShape.threads_per_row, kElements = kPackElements<T>;
  constexpr int kStride = kThreads * kElements, kUnit = kUnitChunks * kStride;
  using Owner = std::conditional_t<(kThreads > 32), BlockRow<kThreads>, WarpRow<kThreads>>;
  Owner owner;
  const int64_t block = blockIdx.x / schedule.blocks_per_row;
  const int part = static_cast<int>(blockIdx.x) % schedule.blocks_per_row;
  const int64_t number = block * kShape.rows_per_block + owner.row_in_block();
  const bool is_row = number < params.rows;  // else shadows one, writes nothing
  const int64_t row = is_row ? number : params.rows - 1;
  const RowIndex index = row_at(schedule, row);
  const int columns = static_cast<int>(params.shape.columns);
  const RowPlace<kElements> place(params.shape, Window{}, index);
  const int begin = place.first_column + part * kShape.units * kUnit;
  const Bounds bounds{max(begin, 0),
                      static_cast<int>(min(int64_t{begin} + kShape.units * kUnit,
                                           static_cast<int64_t>(columns)))};
  const Logits<T, Mask, Bias> logits(params, index, bounds, place.grid);
  const RowReader<T, kElements, true> reader(params.scores, params.is_dense, place.first_element,
                                             index, place.grid, bounds, columns,
                                             row + kElements >= params.rows);
  const TopkProbability<T, Mask, Bias> probability(params, logits.mask, row);

  const auto with_selected = [&](auto&& body) {  // body(index, P, g)
    with_dtype(params.probabilities_type, [&](auto tag) {
      using P = decltype(tag);
      const int64_t first = row * params.k;
      for (int i = owner.thread(); i < params.k; i += kThreads) {
        const float p = to_float(static_cast<const P*>(params.probabilities)[first + i]);
        const float g = to_float(static_cast<const P*>(params.gradient)[first + i]);
        body(params.indices[first + i], p, p == 0.f ? 0.f : g);
      }
    });
  };
  float sum = 0.f;
  with_selected([&](int64_t, float p, float g) { sum = fmaf(p, g, sum); });
  sum = owner.sum(sum);
  const float h = params.log_sum_exp_gradient == nullptr ? 0.f : params.log_sum_exp_gradient[row];
  const float of_all = params.renormalize ? h : h - sum;
  const bool has_first_term = !params.renormalize || params.log_sum_exp_gradient != nullptr;

  const float weight = of_all * params.factor;
  const bool is_finite = fabsf(weight) < INFINITY;
  with_dtype(params.logits_gradient_type, [&](auto tag) {
    using Out = decltype(tag);
    const RowWriter<Out, kElements> writer(params.logits_gradient, place.first_element, columns);
    const auto write = [&](int column, float (&z)[kElements]) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) z[j] = probability(z[j], column + j);
      if (is_finite) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) z[j] *= weight;
      } else {  // 0 stays 0
#pragma unroll
        for (int j = 0; j < kElements; ++j) z[j] = z[j] == 0.f ? 0.f : z[j] * weight;
      }
      writer.store(column, z);
    };
#pragma unroll 1
    for (int first = begin; first < bounds.end; first += kUnit) {
      const int at = first + owner.thread() * kElements;
      if (!has_first_term) {
        if (is_row) writer.template fill_behind<kStride, kUnitChunks>(at, begin);
        continue;
      }
      float z[kUnitChunks][kElements];
      Pack<T> raw[kUnitChunks];
      reader.template load<kStride>(at, raw);
      if (kThreads > 32 && reader.is_inside(first, first + kUnit)) {
        logits.template of<kStride, true>(params, first, at, raw, z);
#pragma unroll
        for (int i = 0; i < kUnitChunks; ++i) write(at + i * kStride, z[i]);
        continue;
      }
      logits.template of<kStride, false>(params, first, at, raw, z);
#pragma unroll
      for (int i = 0; i < kUnitChunks; ++i) {
        if (at + i * kStride < bounds.end && is_row) write(at + i * kStride, z[i]);
      }
    }
    if constexpr (kThreads > 32) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    if (!is_row) return;
    with_selected([&](int64_t selected, float p_selected, float g) {
      if (selected < bounds.begin || selected >= bounds.end) return;
      const int column = static_cast<int>(selected);
      const float p = probability(
          logit_at<T, Mask, Bias>(params, index, logits.mask, reader.row, column), column);
      float dz = p == 0.f ? 0.f : p * (of_all + (params.renormalize ? 0.f : g));
      if (params.renormalize && p_selected != 0.f) dz += p_selected * (g - sum);
      static_cast<Out*>(params.logits_gradient)[place.first_element + column] =
          from_float<Out>(dz * params.factor);
    });
  });
}

}  // namespace megasoftmax
