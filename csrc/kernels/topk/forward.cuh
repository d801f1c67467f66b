#pragma once
// The k largest of softmax(z), z = scale * logit + bias, and their columns, without the others.
//
// A block, or the blocks of a cluster or of the whole GPU, own a row. They read it once: sums of
// exponentials as in softmax, and the largest logit of each group of a thread, usually 16 or 32
// logits. The k-th largest of the threads' largest is a threshold; the few groups that reach it are
// read again, from the L2 cache, and what reaches it in them is ranked. A row of V logits costs
// V reads, and writes of k probabilities and columns.

#include <cooperative_groups.h>

#include "logit.cuh"
#include "select.cuh"

namespace megasoftmax {

// A block's part of a row.
template <class T, class Mask, class Bias, int kThreads>
struct TopkPart {
  static constexpr int kElements = kPackElements<T>;
  static constexpr int kStride = kThreads * kElements, kUnit = kUnitChunks * kStride;
  static constexpr int kGroupElements = kUnitChunks * kElements;  // of one unit

  const TopkForwardParams& params;
  RowPlace<kElements> place;
  int begin;  // the column of its first chunk
  int units, units_per_group;
  Bounds bounds;
  Logits<T, Mask, Bias> logits;
  RowReader<T, kElements, true> reader;

  __device__ TopkPart(const TopkForwardParams& params, const Schedule& schedule,
                      const RowIndex& index, int rank)
      : params(params),
        place(params.shape, Window{}, index),
        begin(place.first_column + rank * schedule.max_units * kUnit),
        units(min(schedule.max_units,
                  max(divide_up(place.grid.end(place.visible) - begin, kUnit), 0))),
        units_per_group(schedule.unit_batches),
        bounds{max(begin, 0), min(begin + units * kUnit, place.visible.end)},
        logits(params, index, bounds, place.grid),
        reader(params.scores, params.is_dense, place.first_element, index, place.grid, bounds,
               static_cast<int>(params.shape.columns), place.row + kElements >= params.rows) {}

  __device__ int groups() const { return divide_up(units, units_per_group); }
  // The column of a thread's first chunk in a unit.
  __device__ int column(int unit, int thread) const {
    return begin + unit * kUnit + thread * kElements;
  }

  __device__ float logit(int column) const {
    return logit_at<T, Mask, Bias>(params, place.index, logits.mask, reader.row, column);
  }

  // Adds a thread's chunks of a unit to its sum; returns the largest logit.
  __device__ __forceinline__ float sum_unit(int unit, MaxAndSum& mine, Exponent exponent) const {
    const int first = begin + unit * kUnit, at = column(unit, static_cast<int>(threadIdx.x));
    Pack<T> raw[kUnitChunks];
    if (reader.is_inside(first, first + kUnit)) {
      const T* const source = keep_in_register(reader.row + at);
#pragma unroll
      for (int i = 0; i < kUnitChunks; ++i)
        raw[i] = load_streaming<T, kElements>(source + i * kStride);
      return sum_chunks<true>(first, at, raw, mine, exponent);
    }
    reader.template load<kStride>(at, raw);
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kUnitChunks; ++i) {  // one by one: ends of rows need the registers
      if (first + i * kStride >= bounds.end) break;
      Pack<T> chunk[1] = {raw[i]};
      largest = fmaxf(largest, sum_chunks<false>(first + i * kStride, at + i * kStride, chunk, mine,
                                                 exponent));
    }
    return largest;
  }

  template <bool kInside, int kChunks>
  __device__ __forceinline__ float sum_chunks(int first, int at, Pack<T> (&raw)[kChunks], MaxAndSum& mine,
                              Exponent exponent) const {
    float z[kChunks][kElements];
    logits.template of<kStride, kInside>(params, first, at, raw, z);
    float largest = -INFINITY;
    if constexpr (kInside && !Mask::kPresent && !Bias::kPresent) {
      largest = largest_lane(raw);
    } else {
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        largest = fmaxf(largest,
                        reduce_pairwise(z[i], [](float a, float b) { return fmaxf(a, b); }));
    }
    const float max = fmaxf(mine.max, largest);
    mine.sum *= exponent(mine.max, max);
    mine.max = max;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) z[i][j] = exponent(z[i][j], max);
      mine.sum += reduce_pairwise(z[i], [](float a, float b) { return a + b; });
    }
    return largest;
  }

  // Sums, and the largest logit of each group of this thread. NaN is not among them.
  __device__ MaxAndSum sum(float* groups, Exponent exponent) const {
    MaxAndSum mine{kLowest, 0.f};
    float largest = -INFINITY;
    int left = units_per_group;
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
      largest = fmaxf(largest, sum_unit(unit, mine, exponent));
      if (--left > 0 && unit + 1 < units) continue;
      *groups = largest;
      groups += kThreads;
      largest = -INFINITY;
      left = units_per_group;
    }
    return mine;
  }

  // For rows with NaN: groups that hold one have it as their largest.
  __device__ void find_nan(float* groups) const {
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
#pragma unroll 1
      for (int i = 0; i < kGroupElements; ++i) {
        const int at = column(unit, 0) + place_in_unit(static_cast<int>(threadIdx.x), i);
        if (!bounds.contains(at)) continue;
        const float z = logit(at);
        if (z != z) groups[unit / units_per_group * kThreads] = z;
      }
    }
  }

  // The column of a thread's i-th logit of a unit, from the unit's first.
  __device__ static int place_in_unit(int thread, int i) {
    return i / kElements * kStride + thread * kElements + i % kElements;
  }

  // Appends the part's keys from `threshold` on.
  __device__ void collect(uint64_t threshold, const float* groups,
                          Selection<kThreads>& selection) const {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    int* const waiting = selection.waiting[thread / 32];
    int count = 0;
    const int group_count = this->groups();
#pragma unroll 1
    for (int group = 0; group < group_count; ++group) {
      const int first_unit = group * units_per_group;
      const uint64_t best =
          key_of(groups[group * kThreads + thread], max(column(first_unit, thread), 0));
      const unsigned votes = __ballot_sync(~0u, best >= threshold);
      if (best >= threshold) waiting[count + __popc(votes & ((1u << lane) - 1))] =
          group * kThreads + thread;
      count += __popc(votes);
      if (count < Selection<kThreads>::kFlush && group + 1 < group_count) continue;
      __syncwarp();
      if (selection.is_full()) return;
      look_at(waiting, count, threshold, selection);
      __syncwarp();
      count = 0;
    }
  }

 private:
  // A warp looks at groups, several at a time.
  __device__ void look_at(const int* waiting, int count, uint64_t threshold,
                          Selection<kThreads>& selection) const {
    constexpr int kLanes = kGroupElements, kGroups = 32 / kLanes, kAtATime = 4;
    static_assert(kLanes <= 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int unit = 0; unit < units_per_group; ++unit) {
#pragma unroll 1
      for (int i = 0; i < count; i += kGroups * kAtATime) {
        uint64_t keys[kAtATime];
#pragma unroll
        for (int j = 0; j < kAtATime; ++j) {
          const int at = i + j * kGroups + lane / kLanes;
          keys[j] = kNoKey;
          if (at >= count) continue;
          const int group = waiting[at] / kThreads, thread = waiting[at] % kThreads;
          const int column = this->column(group * units_per_group + unit, 0) +
                             place_in_unit(thread, lane % kLanes);
          if (bounds.contains(column)) keys[j] = key_of(logit(column), column);
        }
#pragma unroll
        for (int j = 0; j < kAtATime; ++j)
          selection.append(keys[j] != kNoKey && keys[j] >= threshold, keys[j]);
      }
    }
  }
};

// What a row's keys become: probabilities, or logits.
template <class Mask, int kThreads>
__device__ void write_topk(const TopkForwardParams& params, const RowIndex& index, int64_t row,
                           MaxAndSum total, Exponent exponent, bool has_bias,
                           const uint64_t* sorted) {
  const int thread = static_cast<int>(threadIdx.x);
  const Denominator denominator(total, exponent, SinkLogit{}, 0);
  const float to_z = has_bias ? 1.f : fabsf(params.scale);
  if (thread == 0) {
    // The sum is relative to the maximum as it is, not as rounding leaves it.
    const float max = total.max * to_z, rest = fmaf(total.max, to_z, -max);
    const float special = denominator.is_empty() ? -INFINITY : NAN;
    const float log_sum = logf(total.sum) + rest;
    const bool is_regular = denominator.is_regular();
    params.statistics[row] = is_regular ? max : special;
    params.statistics[params.rows + row] = is_regular ? log_sum : special;
    params.statistics[2 * params.rows + row] = is_regular ? max + log_sum : special;
  }
  float max = total.max, factor = denominator.factor;
  bool is_regular = denominator.is_regular(), is_empty = denominator.is_empty();
  if (params.renormalize) {
    max = logit_of(sorted[0]);
    is_empty = max == -INFINITY;
    float sum = 0.f;
    for (int i = 0; i < params.k; ++i) sum += exponent(logit_of(sorted[i]), max);
    is_regular = is_regular && sum > 0.f;
    factor = reciprocal_approximate(sum);
  }
  const Mask mask(params.mask, index);
  with_dtype(params.probabilities_type, [&](auto tag) {
    using Out = decltype(tag);
    auto* const out = static_cast<Out*>(params.probabilities) + row * params.k;
    for (int i = thread; i < params.k; i += kThreads) {
      const float z = logit_of(sorted[i]);
      const int column = column_of(sorted[i]);
      float value = exponent(z, max) * factor;
      if (params.candidates) {
        value = z * to_z;
      } else if (!is_regular) {
        value = (is_empty && params.can_exclude) || mask.excluded(column) ? 0.f : NAN;
      }
      out[i] = from_float<Out>(value);
      params.indices[row * params.k + i] = column;
    }
  });
}

// What a block of a row spread over several hands on, in the workspace: its sums, then its keys.
struct TopkPartials {
  MaxAndSum* sums;  // [rows, blocks of a row]
  uint64_t* keys;   // [rows, blocks of a row, k]

  __device__ TopkPartials(const TopkForwardParams& params, int blocks)
      : sums(static_cast<MaxAndSum*>(params.workspace)),
        keys(reinterpret_cast<uint64_t*>(sums + params.rows * blocks)) {}
};

template <class T, class Mask, class Bias, int kRegime>
__global__ void __launch_bounds__(kTopkRegimes[kRegime].threads,
                                  Bias::blocks_per_sm(Mask::blocks_per_sm(
                                      kTopkRegimes[kRegime].blocks_per_sm)))
    topk_forward_kernel(const __grid_constant__ TopkForwardParams params,
                        const __grid_constant__ Schedule schedule) {
  constexpr int kThreads = kTopkRegimes[kRegime].threads;
  constexpr bool kSpreads = kTopkRegimes[kRegime].blocks_per_row != 1;
  using Owner = std::conditional_t<(kThreads > 32), BlockRow<kThreads>, WarpRow<kThreads>>;
  extern __shared__ __align__(16) float group_maxima[];
  __shared__ Selection<kThreads> selection;

  const int thread = static_cast<int>(threadIdx.x);
  const int blocks = kSpreads ? schedule.blocks_per_row : 1;
  const int rank = static_cast<int>(blockIdx.x) % blocks;
  const int64_t step = gridDim.x / blocks;
  const bool has_many_delegates = 4 * params.k > kThreads;
  const Exponent exponent = exponent_of<Bias>(params);
  Owner owner;
  for (int64_t row = blockIdx.x / blocks; row < params.rows; row += step) {
    const RowIndex index = row_at(schedule, row);
    const TopkPart<T, Mask, Bias, kThreads> part(params, schedule, index, rank);
    MaxAndSum total = owner.merge(part.sum(group_maxima + thread, exponent), exponent);
    if (total.sum != total.sum) part.find_nan(group_maxima + thread);
    uint32_t best = 0, of_odd = 0;  // of groups, and of those with an odd number apart
    for (int group = 0; group < part.groups(); ++group) {
      const uint32_t value = ordered(group_maxima[group * kThreads + thread]);
      const bool is_odd = has_many_delegates && group % 2 != 0;
      best = max(best, is_odd ? 0 : value);
      of_odd = max(of_odd, is_odd ? value : 0);
    }
    selection.delegates[thread] = uint64_t{best} << 32;
    selection.delegates[kThreads + thread] = uint64_t{of_odd} << 32;
    selection.select(params.k, has_many_delegates, [&](uint64_t threshold) {
      part.collect(threshold, group_maxima, selection);
    });
    if constexpr (kSpreads) {
      const TopkPartials partials(params, blocks);
      const int64_t first = row * blocks;
      if (thread == 0) partials.sums[first + rank] = total;
      for (int i = thread; i < params.k; i += kThreads)
        partials.keys[(first + rank) * params.k + i] = selection.sorted[i];
      if (schedule.is_cluster) {
        arrive_at_cluster();
        wait_for_cluster();
      } else {
        cooperative_groups::this_grid().sync();
      }
      if (rank != 0) continue;
      MaxAndSum mine{kLowest, 0.f};
      for (int i = thread; i < blocks; i += kThreads) mine.merge(partials.sums[first + i], exponent);
      total = owner.merge(mine, exponent);
      const uint64_t* const keys = partials.keys + first * params.k;
      const int count = blocks * params.k;
      uint64_t largest = kNoKey;
      for (int i = thread; i < count; i += kThreads) largest = max(largest, keys[i]);
      selection.delegates[thread] = largest;
      selection.select(params.k, false, [&](uint64_t threshold) {
        for (int i = thread; i - thread % 32 < count; i += kThreads) {
          const uint64_t key = i < count ? keys[i] : kNoKey;
          selection.append(key != kNoKey && key >= threshold, key);
        }
      });
    }
    write_topk<Mask, kThreads>(params, index, row, total, exponent, Bias::kPresent,
                               selection.sorted);
    __syncthreads();
  }
}

}  // namespace megasoftmax
