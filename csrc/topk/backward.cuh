#pragma once
// dz_j = p_j (h - sum(g P)) + sum over k with i_k = j of g_k p_j,  p = exp(z - log-sum-exp), with P
// the k probabilities, g their gradients, h that of the log-sum-exp; renormalised
// dz_j = p_j h + sum over k with i_k = j of P_k (g_k - sum(g P)).
//
// Of sigmoids s, without h: dz_j = sum over k with i_k = j of P_k (g_k - sum(g P)) (1 - s_j), where
// sum(g P) counts if they are renormalised.
//
// Nothing is summed over a row, so any number of threads can own a part of it: they write the first
// term, then, behind a barrier, both terms where an index is theirs. Short rows do so in shared
// memory. Each logit is read once and each gradient written once.

#include "row.cuh"

namespace megasoftmax {

// exp(z - max z - log sum) of a row.
template <class Mask>
struct TopkProbability {
  const Mask& mask;
  float sign, c;  // z = sign * x * c / log2(e), of what is given
  float max, offset;
  int columns;
  bool is_nan;

  __device__ TopkProbability(const TopkBackwardParams& params, const Mask& mask, float max,
                             float log_sum, float sign, float c)
      : mask(mask),
        sign(sign),
        c(c),
        max(max),
        offset(log_sum * -kLog2E),
        columns(static_cast<int>(params.shape.columns)),
        is_nan(max != max) {
    if (max != -INFINITY) return;
    // A row without a visible entry: -inf, and every probability is 0.
    this->max = 0.f;
    offset = params.can_exclude ? 0.f : NAN;
  }
  __device__ float operator()(float x, int column) const {
    const float p = exp2_approximate(fmaf(fmaf(x, sign, -max), c, offset));
    const bool is_of_row = column >= 0 && column < columns;  // not beside it in an end's vector
    return Mask::kPresent && is_nan && is_of_row && mask.excluded(column) ? 0.f : p;
  }
};

// One of the k entries, and what it adds to the gradient of its logit.
struct TopkEntry {
  int column = -1;       // -1: not in this part of the row
  float p = 0.f;         // its probability among all logits, or 1 less its sigmoid
  float selected = 0.f;  // as it was returned, among the k if renormalised
  float gradient = 0.f;  // of `selected`
};

// With kIsContiguous rows have neither mask nor bias, and follow each other: their vectors are
// loaded whole, at the ends with what lies beside the row in the same 16 bytes, where the storage
// holds them.
template <class T, class Mask, class Bias, int kRegime, bool kIsContiguous>
__global__ void __launch_bounds__(
    kTopkBackwardRegimes[kRegime].threads(),
    (blocks_with_registers(Bias::blocks_per_sm(kTopkBackwardRegimes[kRegime].blocks_per_sm /
                                               (kIsContiguous ? 1 : 2)),
                           kTopkBackwardRegimes[kRegime].threads())))
    topk_backward_kernel(const __grid_constant__ TopkBackwardParams params,
                         const __grid_constant__ TopkSchedule schedule) {
  constexpr TopkBackwardRegime kShape = kTopkBackwardRegimes[kRegime];
  constexpr int kThreads = kShape.threads_per_row, kElements = kPackElements<T>;
  constexpr int kVectors = kShape.vectors_per_thread;
  constexpr int kStride = kThreads * kElements, kSegment = kVectors * kStride;
  constexpr int kBlock = kThreads * kShape.rows_per_block;
  using Owner = std::conditional_t<(kThreads > 32), BlockRow<kThreads>, WarpRow<kThreads>>;
  Owner owner;
  const int64_t block = blockIdx.x / schedule.blocks_per_row;
  const int part = static_cast<int>(blockIdx.x) % schedule.blocks_per_row;
  const int64_t number = block * kShape.rows_per_block + owner.row_in_block();
  const bool is_row = number < params.rows;  // else shadows one, writes nothing
  const int64_t row = is_row ? number : params.rows - 1;
  const RowIndex index = row_at(schedule, row);
  const int columns = static_cast<int>(params.shape.columns);
  using Grid = std::conditional_t<kIsContiguous, LineGrid<kElements>, VectorGrid<kElements>>;
  const RowPlace<kElements, Grid> place(params.shape, index, Bounds{0, columns});
  const int begin = place.first_column + part * schedule.max_segments * kSegment;
  const Bounds bounds{max(begin, 0),
                      static_cast<int>(min(int64_t{begin} + schedule.max_segments * kSegment,
                                           static_cast<int64_t>(columns)))};
  const T* const logits_row =
      static_cast<const T*>(params.scores.data) + index.offset_in(params.scores);
  const Logits<T, Mask, Bias> logits(params, index, bounds, place.grid);
  // Gradients of the k probabilities stay at their entries.
  const bool has_only_second_term = params.renormalize || params.sigmoid;
  const bool has_first_term = !has_only_second_term || params.log_sum_exp_gradient != nullptr;
  // Such rows of several segments come through a ring, where each thread reads what it has copied.
  constexpr bool kHasRing = kIsContiguous && kShape.segments > 1;
  extern __shared__ __align__(16) char shared_memory[];
  Pack<T>* const ring = reinterpret_cast<Pack<T>*>(shared_memory) + threadIdx.x;
  const auto place_in_ring = [&](int segment) {
    return ring + segment % kTopkBackwardStages * (kVectors * kBlock);
  };
  Pack<T> raw[kVectors];
  // Where the last vector may begin that is read whole.
  const int last_whole =
      min(bounds.end - 1,
          has_whole_vectors(params.scores, logits_row) ? columns - 1 : columns - kElements);
  const auto load_end = [&](int at) {
    return load_partial<T, kElements>(logits_row + at, 1, bounds.begin - at, bounds.end - at);
  };
  const auto start = [&](int segment) {
    if (!kIsContiguous || !has_first_term) return;
    const int first = begin + segment * kSegment + owner.thread() * kElements;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = first + i * kStride;
      if constexpr (kHasRing) {
        if (at <= last_whole) start_copy(place_in_ring(segment) + i * kBlock, logits_row + at);
      } else if (at < bounds.end) {
        raw[i] = at <= last_whole ? load_pack<T, kElements, true>(logits_row + at) : load_end(at);
      }
    }
    if constexpr (kHasRing) {
      end_copies();
      if (last_whole >= bounds.end - 1) return;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = first + i * kStride;
        if (at > last_whole && at < bounds.end) place_in_ring(segment)[i * kBlock] = load_end(at);
      }
    }
  };
  const auto finish = [&](int segment) {
    if constexpr (kHasRing) {
      wait_for_older_copies<kTopkBackwardStages - 1>();
#pragma unroll
      for (int i = 0; i < kVectors; ++i) raw[i] = place_in_ring(segment)[i * kBlock];
    } else if constexpr (!kIsContiguous) {
      const RowReader<T, kElements, true> reader(params.scores, params.is_contiguous,
                                                 place.first_element, index, place.grid, bounds,
                                                 columns);
      reader.template load<kStride>(begin + segment * kSegment + owner.thread() * kElements, raw);
    }
  };
  for (int segment = 0; segment < (kHasRing ? kTopkBackwardStages : 1); ++segment) start(segment);

  // All that does not depend on each other is read before the first of it is used.
  const float largest = params.statistics[row], log_sum = params.statistics[params.rows + row];
  const float h = params.log_sum_exp_gradient == nullptr ? 0.f : params.log_sum_exp_gradient[row];
  const auto read_entry = [&](int i) {
    TopkEntry entry;
    const int64_t at = row * params.k + i, column = params.indices[at];
    with_result_dtype<T>(params.probabilities_type, [&](auto tag) {
      using P = decltype(tag);
      entry.selected = to_float(static_cast<const P*>(params.probabilities)[at]);
      entry.gradient = to_float(static_cast<const P*>(params.gradient)[at]);
    });
    if (entry.selected == 0.f) entry.gradient = 0.f;
    if (column >= bounds.begin && column < bounds.end) entry.column = static_cast<int>(column);
    return entry;
  };
  TopkEntry first_entry;
  if (owner.thread() < params.k) first_entry = read_entry(owner.thread());
  const float unit = unit_of<Bias>(params, row);
  const TopkProbability<Mask> probability(params, logits.mask, largest, log_sum,
                                          kIsContiguous && params.scale < 0 ? -1.f : 1.f,
                                          unit * kLog2E);
  const auto find_probability = [&](TopkEntry& entry) {
    if (entry.column < 0) return;
    const float x = kIsContiguous ? to_float(logits_row[entry.column])
                                  : logit_at<T, Mask, Bias>(params, index, logits.mask, logits_row,
                                                            entry.column);
    entry.p =
        params.sigmoid
            ? reciprocal_approximate(1.f + exp2_approximate(x * probability.sign * probability.c))
            : probability(x, entry.column);
  };
  find_probability(first_entry);
  float sum = first_entry.selected * first_entry.gradient;
  for (int i = owner.thread() + kThreads; i < params.k; i += kThreads) {
    const TopkEntry other = read_entry(i);
    sum = fmaf(other.selected, other.gradient, sum);
  }
  sum = owner.sum(sum);
  if (!params.renormalize && params.sigmoid) sum = 0.f;
  // The derivative of z by the logits, but for a softcap's part of it.
  const float scale = params.row_scale.data == nullptr ? params.scale : unit;
  const float to_result = params.of_bias ? 1.f : scale;
  const float of_all = has_only_second_term ? h : h - sum, weight = of_all * to_result;
  const bool is_finite = fabsf(weight) < INFINITY;

  // Rows of one segment meet their entries in shared memory, and are written in whole sectors.
  constexpr bool kIsStaged = kShape.segments == 1;
  static_assert(!kIsStaged || kThreads <= 32);
  constexpr int kReads = kIsContiguous ? 1 : kVectors;
  [[maybe_unused]] __shared__ float staged[kIsStaged ? kVectors : 1][kIsStaged ? kBlock : 1]
                                          [kElements];
  with_result_dtype<T>(params.logits_gradient_type, [&](auto tag) {
    using Out = decltype(tag);
    const RowWriter<Out, kElements> writer(params.logits_gradient, place.first_element, columns);
    const bool is_bent = Bias::kPresent && params.softcap.is_given() && !params.of_bias;
    const auto weigh = [&](int column, const Pack<T>& scores, float (&z)[kElements]) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) z[j] = probability(z[j], column + j);
      if (is_finite) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) z[j] *= weight;
      } else {  // 0 stays 0
#pragma unroll
        for (int j = 0; j < kElements; ++j) z[j] = z[j] == 0.f ? 0.f : z[j] * weight;
      }
      if (is_bent) {
        float slopes[kElements];
        find_slopes(scores, params.softcap, slopes);
#pragma unroll
        for (int j = 0; j < kElements; ++j) z[j] *= slopes[j];
      }
    };
    const auto write = [&](int column, const Pack<T>& scores, float (&z)[kElements]) {
      weigh(column, scores, z);
      writer.store(column, z);
    };
    const auto of_entry = [&](const TopkEntry& entry) {
      const float of_selected = has_only_second_term ? 0.f : entry.gradient;
      float dz = entry.p == 0.f ? 0.f : entry.p * (of_all + of_selected);
      if (has_only_second_term && entry.selected != 0.f)
        dz += entry.selected * (entry.gradient - sum) * (params.sigmoid ? entry.p : 1.f);
      dz *= to_result;
      if (is_bent) {
        float score[1] = {to_float(logits_row[entry.column * params.scores.column_stride])};
        cap_scores<T, false>(score, params.softcap);
        dz *= slope_of_tanh(score[0]);
      }
      return dz;
    };
    const auto for_entries = [&](auto&& put) {
      if (first_entry.column >= 0) put(first_entry.column, of_entry(first_entry));
      for (int i = owner.thread() + kThreads; i < params.k; i += kThreads) {
        TopkEntry other = read_entry(i);
        find_probability(other);
        if (other.column >= 0) put(other.column, of_entry(other));
      }
    };
    if constexpr (kIsStaged) {
      const int at = begin + owner.thread() * kElements;
      const int first_thread = static_cast<int>(threadIdx.x) - owner.thread();
      [[maybe_unused]] float read[kReads][kElements];
      if (has_first_term) {
        finish(0);
        if constexpr (!kIsContiguous)
          logits.template of<kStride, false>(params, begin, at, raw, read);
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float z[kElements] = {};
        if (has_first_term && at + i * kStride < bounds.end) {
#pragma unroll
          for (int j = 0; j < kElements; ++j)
            z[j] = kIsContiguous ? raw[i][j] : read[i % kReads][j];
          weigh(at + i * kStride, raw[i], z);
        }
#pragma unroll
        for (int j = 0; j < kElements; ++j) staged[i][threadIdx.x][j] = z[j];
      }
      __syncwarp();
      for_entries([&](int column, float dz) {
        const int vector = (column - begin) / kElements;
        staged[vector / kThreads][first_thread + vector % kThreads][(column - begin) % kElements] =
            dz;
      });
      __syncwarp();
      if (!is_row) return;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (at + i * kStride >= bounds.end) continue;
        float z[kElements];
#pragma unroll
        for (int j = 0; j < kElements; ++j) z[j] = staged[i][threadIdx.x][j];
        writer.store(at + i * kStride, z);
      }
      return;
    }
    int first = begin;
#pragma unroll 1
    for (int segment = 0; first < bounds.end; ++segment, first += kSegment) {
      const int at = first + owner.thread() * kElements;
      if (!has_first_term) {
        if (is_row) writer.template fill_behind<kStride, kVectors>(at, begin);
        continue;
      }
      finish(segment);
      if constexpr (kIsContiguous) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (at + i * kStride >= bounds.end || !is_row) continue;
          float z[kElements];
#pragma unroll
          for (int j = 0; j < kElements; ++j) z[j] = raw[i][j];
          write(at + i * kStride, raw[i], z);
        }
        if constexpr (kHasRing) start(segment + kTopkBackwardStages);
      } else {
        float z[kVectors][kElements];
        logits.template of<kStride, false>(params, first, at, raw, z);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (at + i * kStride < bounds.end && is_row) write(at + i * kStride, raw[i], z[i]);
        }
      }
    }
    if constexpr (kThreads > 32) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    if (!is_row) return;
    for_entries([&](int column, float dz) {
      static_cast<Out*>(params.logits_gradient)[place.first_element + column] = from_float<Out>(dz);
    });
  });
}

}  // namespace megasoftmax
