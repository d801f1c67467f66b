#pragma once
// The k largest of softmax(z), z = scale * logit + bias, and their columns, without the others.
//
// A block, or the blocks of a cluster or of the whole GPU, own a row. They read it once: sums of
// exponentials as in softmax, and the largest logit of each group of a thread, usually 16 or 32
// logits. The k-th of the largest of some of them is a threshold; the few groups that reach it are
// read again, and what reaches it in them is ranked. A row of V logits costs little more than V
// reads, and writes of k probabilities and columns.

#include "../common/grid.cuh"
#include "row.cuh"
#include "sampling.cuh"
#include "select.cuh"

namespace megasoftmax {

// A block's part of a row. With kHasUnitStride rows have neither mask nor bias, and their logits
// lie side by side: their vectors are loaded whole, at the ends with what lies beside the row in
// the same 16 bytes, or before it in its line of 128 bytes, where the storage holds them.
template <class T, class Mask, class Bias, int kThreads, int kSegmentVectors, bool kHasUnitStride>
struct TopkPart {
  static constexpr int kElements = kPackElements<T>;
  static constexpr int kStride = kThreads * kElements, kSegment = kSegmentVectors * kStride;
  static constexpr int kGroupElements = kSegmentVectors * kElements;  // of one segment

  const TopkForwardParams& params;
  RowIndex index;
  const T* row;
  VectorGrid<kElements> grid;
  int begin;  // the column of its first vector
  int segments, segments_per_group;
  Bounds bounds;
  int last_whole;  // where the last vector may begin that is read whole
  Logits<T, Mask, Bias> logits;

  __device__ TopkPart(const TopkForwardParams& params, const TopkSchedule& schedule,
                      const RowIndex& index, int rank)
      : params(params),
        index(index),
        row(static_cast<const T*>(params.scores.data) + index.offset_in(params.scores)),
        grid(std::conditional_t<kHasUnitStride, LineGrid<kElements>, VectorGrid<kElements>>::
                 aligned_to(static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T)),
                            columns())),
        begin(begin_of(grid, schedule, rank)),
        segments(min(schedule.max_segments, divide_up(columns() - begin, kSegment))),
        segments_per_group(schedule.segments_per_group),
        bounds{max(begin, 0), min(begin + segments * kSegment, columns())},
        last_whole(min(bounds.end - 1, has_whole_vectors(params.scores, row)
                                           ? columns() - 1
                                           : columns() - kElements)),
        logits(params, index, bounds, grid) {}

  __device__ int columns() const { return static_cast<int>(params.shape.columns); }
  // The column of a thread's first vector in a segment.
  __device__ int column(int segment, int thread) const {
    return begin + segment * kSegment + thread * kElements;
  }
  // The column of a thread's i-th logit of a segment, from the segment's first.
  __device__ static int place_in_segment(int thread, int i) {
    return i / kElements * kStride + thread * kElements + i % kElements;
  }
  __device__ float logit(int column) const {
    return logit_at<T, Mask, Bias>(params, index, logits.mask, row, column);
  }

  // The sum of this thread's logits, and the largest of each of its groups, of which the two
  // largest are delegates.
  __device__ MaxAndSum sum(uint32_t* groups, Exponent exponent, uint32_t (&delegates)[2]) const {
    MaxAndSum mine{kLowest, 0.f};
    float largest = -INFINITY;
    int left = segments_per_group;
    delegates[0] = delegates[1] = 0;
    Pack<T> raw[kSegmentVectors];
    if (kHasUnitStride && segments > 0) load_segment(0, raw);
#pragma unroll 1
    for (int segment = 0; segment < segments; ++segment) {
      if constexpr (kHasUnitStride && kThreads == 32) prefetch_segment(segment + 1);
      largest = fmaxf(largest, sum_segment(segment, raw, mine, exponent));
      if (--left > 0 && segment + 1 < segments) continue;
      const uint32_t value = ordered(largest);
      *groups = value;
      groups += kThreads;
      delegates[1] = max(delegates[1], min(delegates[0], value));
      delegates[0] = max(delegates[0], value);
      largest = -INFINITY;
      left = segments_per_group;
    }
    return mine;
  }

  // For rows with NaN, which is not among those largest: it is the largest of its group.
  __device__ void find_nan(uint32_t* groups, uint32_t (&delegates)[2]) const {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int segment = 0; segment < segments; ++segment) {
#pragma unroll 1
      for (int i = 0; i < kGroupElements; ++i) {
        const int column = this->column(segment, 0) + place_in_segment(thread, i);
        if (!bounds.contains(column)) continue;
        const float z = logit(column);
        if (z != z) groups[segment / segments_per_group * kThreads] = delegates[0] = ordered(z);
      }
    }
  }

  // Appends the part's keys from `threshold` on.
  __device__ void collect(uint64_t threshold, const uint32_t* groups,
                          Selection<kThreads>& selection) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int group_count = divide_up(segments, segments_per_group);
    const auto least = static_cast<uint32_t>(threshold >> 32);
    uint32_t wanted = 0;  // a bit for each group of this thread
    static_assert(kMaxGroups <= 32);
#pragma unroll 4
    for (int group = 0; group < group_count; ++group)
      wanted |= static_cast<uint32_t>(groups[group * kThreads] >= least) << group;
    if (static_cast<uint32_t>(threshold) != 0) {  // what can the best key of a group be?
#pragma unroll 1
      for (uint32_t left = wanted; left != 0; left &= left - 1) {
        const int group = __ffs(left) - 1;
        const int first = max(column(group * segments_per_group, thread), 0);
        if (groups[group * kThreads] == least &&
            static_cast<uint32_t>(threshold) > ~static_cast<uint32_t>(first))
          wanted &= ~(left & -left);
      }
    }
    do {
#pragma unroll 1
      for (; wanted != 0; wanted &= wanted - 1) {
        const int at = atomicAdd(&selection.waiting_count, 1);
        if (at >= Selection<kThreads>::kMaxWaiting) break;
        selection.waiting[at] = (__ffs(wanted) - 1) * kThreads + thread;
      }
      __syncthreads();
      const int count = selection.waiting_count;
      look_at(min(count, Selection<kThreads>::kMaxWaiting), threshold, selection);
      if (count <= Selection<kThreads>::kMaxWaiting) return;
      __syncthreads();  // all have read the count, and the groups that wait
      if (thread == 0) selection.waiting_count = 0;
      __syncthreads();
    } while (selection.count <= kMaxCandidates);
  }

 private:
  __device__ int begin_of(VectorGrid<kElements> grid, const TopkSchedule& schedule,
                          int rank) const {
    const int64_t first = grid.column(0) + int64_t{rank} * schedule.max_segments * kSegment;
    return static_cast<int>(min(first, params.shape.columns));
  }

  // To the L2 cache: the whole vectors of a segment.
  __device__ __forceinline__ void prefetch_segment(int segment) const {
    const int first = column(segment, 0), end = min(first + kSegment, bounds.end);
    const int bytes = (end - first) * static_cast<int>(sizeof(T)) & -16;
    if (bytes > 0 && threadIdx.x == 0) prefetch_to_cache(row + first, bytes);
  }

  // A segment's vectors. What is behind the bounds is unspecified.
  __device__ __forceinline__ void load_segment(int segment, Pack<T> (&raw)[kSegmentVectors]) const {
    const int at = column(segment, static_cast<int>(threadIdx.x));
    const T* const source = keep_in_register(row + at);
    const int room = last_whole - at;
    Pack<T> loaded[kSegmentVectors];
#pragma unroll
    for (int i = 0; i < kSegmentVectors; ++i) {
      if (i * kStride <= room) loaded[i] = load_pack<T, kElements, true>(source + i * kStride);
    }
    if (last_whole < bounds.end - 1) {
#pragma unroll
      for (int i = 0; i < kSegmentVectors; ++i) {
        if (at + i * kStride > last_whole && at + i * kStride < bounds.end)
          loaded[i] = load_partial_vector(at + i * kStride);
      }
    }
#pragma unroll
    for (int i = 0; i < kSegmentVectors; ++i) raw[i] = loaded[i];
  }

  // Adds a thread's vectors of a segment to its sum; returns the largest logit. With kHasUnitStride
  // they are in `raw`, to which those of the next segment come while the second half is summed. All
  // of them at a time: whoever waits for a load waits for the later ones of a loop too.
  __device__ __forceinline__ float sum_segment(int segment, Pack<T> (&raw)[kSegmentVectors],
                                               MaxAndSum& mine, Exponent exponent) const {
    const int first = begin + segment * kSegment,
              at = column(segment, static_cast<int>(threadIdx.x));
    const bool is_inside = first >= bounds.begin && first + kSegment <= bounds.end;
    float largest = -INFINITY;
    if constexpr (!kHasUnitStride) {
      const RowReader<T, kElements, true> reader(params.scores, false, 0, index, grid, bounds,
                                                 columns());
      reader.template load<kStride>(at, raw);
      if (is_inside) return sum_vectors<true>(first, at, raw, mine, exponent);
#pragma unroll
      for (int i = 0; i < kSegmentVectors; ++i) {  // one by one: ends of rows need the registers
        if (first + i * kStride >= bounds.end) break;
        Pack<T> vector[1] = {raw[i]};
        largest = fmaxf(largest, sum_vectors<false>(first + i * kStride, at + i * kStride, vector,
                                                    mine, exponent));
      }
    } else {
      constexpr int kHalf = kSegmentVectors / 2;
      Pack<T> half[kHalf];
      if constexpr (Bias::kCaps) {
        CappedHalf taken = take_capped_half<0>(raw, at, is_inside, half);
        largest = sum_capped_packs(half, taken, mine);
        if (first + kHalf * kStride >= bounds.end) return largest;
        taken = take_capped_half<kHalf>(raw, at, is_inside, half);
        if (segment + 1 < segments) load_segment(segment + 1, raw);
        return fmaxf(largest, sum_capped_packs(half, taken, mine));
      }
      take_half<0>(raw, at, is_inside, half);
      largest = sum_packs(half, mine, exponent);
      if (first + kHalf * kStride >= bounds.end) return largest;
      take_half<kHalf>(raw, at, is_inside, half);
      if (segment + 1 < segments) load_segment(segment + 1, raw);
      largest = fmaxf(largest, sum_packs(half, mine, exponent));
    }
    return largest;
  }

  // The vectors from kFirst on, of those that begin at column `at`, with -inf outside the bounds,
  // and with their signs turned where the scale is negative: an operation in any case, behind which
  // the registers of `raw` are free. kAreFinite: infinite scores become finite.
  template <int kFirst, bool kAreFinite = false>
  __device__ void take_half(const Pack<T> (&raw)[kSegmentVectors], int at, bool is_inside,
                            Pack<T> (&half)[kSegmentVectors / 2]) const {
    const uint32_t flips = params.scale < 0 ? (sizeof(T) == 4 ? 0x80000000u : 0x80008000u) : 0u;
#pragma unroll
    for (int i = 0; i < kSegmentVectors / 2; ++i) {
#pragma unroll
      for (int word = 0; word < half[i].kWords; ++word)
        half[i].words[word] = raw[kFirst + i].words[word] ^ flips;
      if constexpr (kAreFinite) make_finite(half[i]);
    }
    if (is_inside) return;
#pragma unroll
    for (int i = 0; i < kSegmentVectors / 2; ++i) {
      const int first = at + (kFirst + i) * kStride;
      half[i].template fill_outside<Pack<T>::kLowestWord>(bounds.begin - first, bounds.end - first);
    }
  }

  // Of rows that are capped
  struct CappedHalf {
    float largest;   // score
    bool are_small;  // a polynomial serves all
  };
  __device__ CappedLogits<T> capped() const { return CappedLogits<T>(params); }
  template <int kFirst>
  __device__ __forceinline__ CappedHalf
  take_capped_half(const Pack<T> (&raw)[kSegmentVectors], int at, bool is_inside,
                   Pack<T> (&half)[kSegmentVectors / 2]) const {
    take_half<kFirst>(raw, at, is_inside, half);
    const CappedHalf taken{largest_lane(half), capped().are_small(largest_magnitude(half))};
    if (!taken.are_small) take_half<kFirst, true>(raw, at, is_inside, half);
    return taken;
  }
  // Logits are in units of exp2. Returns that of the largest score, as it will be ranked.
  template <int kVectors>
  __device__ __forceinline__ float sum_capped_packs(const Pack<T> (&raw)[kVectors],
                                                    const CappedHalf& taken,
                                                    MaxAndSum& mine) const {
    constexpr Exponent kExponent{1.f};
    if (taken.are_small) {
      const float largest = capped().of_small(taken.largest);
      const float max = raise_maximum(mine, largest, kExponent);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float e[kElements];
        capped().exponents_of_small(raw[i], -max, e);
#pragma unroll
        for (float& z : e) z = exp2_approximate(z);
        mine.sum += reduce_pairwise(e, [](float a, float b) { return a + b; });
      }
      return largest;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float z[kElements];
      capped().template of<true>(raw[i], z);
      const float of_vector = reduce_pairwise(z, [](float a, float b) { return fmaxf(a, b); });
      mine.sum += sum_of_exponentials(z, raise_maximum(mine, of_vector, kExponent), kExponent);
    }
    return capped().of_single(taken.largest);
  }

  __device__ Pack<T> load_partial_vector(int column) const {
    return load_partial<T, kElements>(row + column, 1, bounds.begin - column, bounds.end - column);
  }

  // Packs take half the registers of logits.
  template <int kVectors>
  __device__ static __forceinline__ float sum_packs(const Pack<T> (&raw)[kVectors], MaxAndSum& mine,
                                                    Exponent exponent) {
    const float largest = largest_lane(raw), max = raise_maximum(mine, largest, exponent);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float z[kElements];
#pragma unroll
      for (int j = 0; j < kElements; ++j) z[j] = raw[i][j];
      mine.sum += sum_of_exponentials(z, max, exponent);
    }
    return largest;
  }
  template <bool kInside, int kVectors>
  __device__ __forceinline__ float sum_vectors(int first, int at, Pack<T> (&raw)[kVectors],
                                               MaxAndSum& mine, Exponent exponent) const {
    float z[kVectors][kElements];
    logits.template of<kStride, kInside>(params, first, at, raw, z);
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      largest = fmaxf(largest, reduce_pairwise(z[i], [](float a, float b) { return fmaxf(a, b); }));
    const float max = raise_maximum(mine, largest, exponent);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) mine.sum += sum_of_exponentials(z[i], max, exponent);
    return largest;
  }
  __device__ static float raise_maximum(MaxAndSum& mine, float largest, Exponent exponent) {
    const float max = fmaxf(mine.max, largest);
    mine.sum *= exponent(mine.max, max);
    return mine.max = max;
  }
  __device__ static float sum_of_exponentials(float (&z)[kElements], float max, Exponent exponent) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) z[j] = exponent(z[j], max);
    return reduce_pairwise(z, [](float a, float b) { return a + b; });
  }

  // The first `count` groups that wait: a thread looks at some vectors of them.
  __device__ void look_at(int count, uint64_t threshold, Selection<kThreads>& selection) const {
    constexpr int kVectors = kHasUnitStride ? 2 : 1;  // that are loaded together
    const int thread = thread_index_anew();
#pragma unroll 1
    for (int segment = 0; segment < segments_per_group; ++segment) {
#pragma unroll 1
      for (int i = thread; i < count * kSegmentVectors; i += kVectors * kThreads) {
        int first[kVectors];
        Pack<T> raw[kVectors];
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          first[j] = bounds.end;
          const int at = i + j * kThreads;
          if (at < count * kSegmentVectors) {
            const int waiting = selection.waiting[at / kSegmentVectors];
            const int of_row = waiting / kThreads * segments_per_group + segment;
            if (of_row < segments)
              first[j] = column(of_row, waiting % kThreads) + at % kSegmentVectors * kStride;
          }
          if (kHasUnitStride && first[j] < bounds.end)
            raw[j] = first[j] <= last_whole ? load_pack<T, kElements, true>(row + first[j])
                                            : load_partial_vector(first[j]);
        }
#pragma unroll
        for (int j = 0; j < kVectors; ++j) look_at_vector(raw[j], first[j], threshold, selection);
        if (selection.count > kMaxCandidates) return;
      }
    }
  }
  __device__ __forceinline__ void look_at_vector(const Pack<T>& raw, int first, uint64_t threshold,
                                                 Selection<kThreads>& selection) const {
    const float least = logit_of(threshold);
    [[maybe_unused]] float ranked[kElements];
    if constexpr (Bias::kCaps) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) ranked[j] = capped().of_single(raw[j] * sign());
    }
    const auto z = [&](int j) {
      if constexpr (Bias::kCaps) return ranked[j];
      return kHasUnitStride ? raw[j] * sign() : logit(first + j);
    };
    const auto set_bits = [&](auto&& is_set) {  // without branches
      unsigned bits = 0;
#pragma unroll kHasUnitStride ? kElements : 2
      for (int j = 0; j < kElements; ++j) {
        if (kHasUnitStride || bounds.contains(first + j)) bits |= is_set(z(j)) ? 1u << j : 0u;
      }
      return bits;
    };
    unsigned wanted = set_bits([&](float z) { return !(z < least); });
    if (static_cast<uint32_t>(threshold) != 0 || least != least) {  // of equals up to a column
      const unsigned equal =
          set_bits([&](float z) { return z == least || (z != z && least != least); });
      if (least != least) wanted = equal;
      const auto last =
          min(~static_cast<uint32_t>(threshold), static_cast<uint32_t>(INT32_MAX - 1));
      const int end = min(static_cast<int>(last) + 1, first + kElements);
      wanted &= ~equal | ((1u << max(end - first, 0)) - 1);
    }
    if (kHasUnitStride) wanted &= bits_inside(first);
    selection.append(wanted, [&](int j) {
      if constexpr (Bias::kCaps) return key_of(capped().of_single(raw.at(j) * sign()), first + j);
      return key_of(kHasUnitStride ? raw.at(j) * sign() : logit(first + j), first + j);
    });
  }
  __device__ float sign() const { return params.scale < 0 ? -1.f : 1.f; }
  // Bit j where column first + j is within the bounds.
  __device__ unsigned bits_inside(int first) const {
    const int begin = min(max(bounds.begin - first, 0), kElements);
    const int end = min(max(bounds.end - first, 0), kElements);
    return (1u << end) - (1u << min(begin, end));
  }
};

// What a row's keys, in order, become: probabilities, or z.
template <class Mask, int kThreads>
__device__ void write_topk(const TopkForwardParams& params, const RowIndex& index, int64_t row,
                           MaxAndSum total, const NumbersOfRow& numbers, const uint64_t* sorted) {
  const int thread = thread_index_anew();
  const float unit = numbers.unit;
  const Exponent exponent{unit * kLog2E};
  const RowStatistics statistics(total, unit);
  if (thread == 0) statistics.write(params, row);
  float max = total.max, sum = total.sum;
  bool is_empty = statistics.is_empty();
  int kept = params.k;
  if (params.limits.are_given) {
    const WithinLimits found = limit_row(
        params.k, params.drawn == nullptr ? nullptr : params.drawn + row, numbers, total, sorted);
    kept = found.count;
    if (params.renormalize) sum = found.sum;
  } else if (params.renormalize) {
    max = logit_of(sorted[0]);
    is_empty = max == -INFINITY;
    sum = 0.f;
    for (int i = thread % 32; i < params.k; i += 32) sum += exponent(logit_of(sorted[i]), max);
    sum = warp_sum<32>(sum);
  }
  const bool is_regular = statistics.is_regular() && !is_empty;
  const float factor = reciprocal_approximate(sum);
  const Mask mask(params.mask, index);
  for (int i = thread; i < params.k; i += kThreads) {
    const float z = logit_of(sorted[i]);
    const int column = column_of(sorted[i]);
    float value = i < kept ? exponent(z, max) * factor : 0.f;
    if (params.candidates) {
      value = z * unit;
    } else if (!is_regular) {
      value = (is_empty && params.can_exclude) || mask.excluded(column) ? 0.f : NAN;
    }
    const int64_t at = row * params.k + i;
    with_dtype(params.probabilities_type, [&](auto tag) {
      using Out = decltype(tag);
      static_cast<Out*>(params.probabilities)[at] = from_float<Out>(value);
    });
    params.indices[at] = column;
  }
}

// What blocks of a row spread over several hand on: their sums, then their keys, in order if there
// are k. In the workspace, or in the shared memory of the first block of a cluster.
struct TopkPartials {
  MaxAndSum* sums;    // [blocks of a row]
  uint64_t* keys;     // [blocks of a row, k]
  uint64_t* arrived;  // of a cluster: the first block's barrier

  __device__ TopkPartials(const TopkForwardParams& params, void* workspace, int64_t row, int blocks)
      : sums(static_cast<MaxAndSum*>(workspace) + row * blocks),
        keys(static_cast<uint64_t*>(workspace) + params.rows * blocks + row * blocks * params.k),
        arrived(nullptr) {}
  __device__ TopkPartials(char* shared, uint64_t* arrived, int blocks)
      : sums(reinterpret_cast<MaxAndSum*>(shared)),
        keys(reinterpret_cast<uint64_t*>(shared) + blocks),
        arrived(arrived) {}

  __device__ void put_sum(int rank, const MaxAndSum& sum) const {
    put(sums + rank, reinterpret_cast<const uint64_t&>(sum));
  }
  __device__ void put_key(int i, uint64_t key) const { put(keys + i, key); }

 private:
  __device__ void put(void* at, uint64_t value) const {
    if (arrived != nullptr) {
      send_to_cluster(at, arrived, 0, value);
    } else {
      *static_cast<uint64_t*>(at) = value;
    }
  }
};

// Other rows need more registers.
template <class Bias, int kRegime, bool kHasUnitStride>
inline constexpr int kTopkBlocksPerSm =
    Bias::blocks_per_sm(kTopkRegimes[kRegime].blocks_per_sm / (kHasUnitStride ? 1 : 2));

template <class T, class Mask, class Bias, int kRegime, bool kHasUnitStride>
__global__ void __launch_bounds__(
    kTopkRegimes[kRegime].threads,
    (blocks_with_registers(kTopkBlocksPerSm<Bias, kRegime, kHasUnitStride>,
                           kTopkRegimes[kRegime].threads)))
    topk_forward_kernel(const __grid_constant__ TopkForwardParams params,
                        const __grid_constant__ TopkSchedule schedule) {
  constexpr int kThreads = kTopkRegimes[kRegime].threads, kWarps = kThreads / 32;
  constexpr bool kSpreads = kTopkRegimes[kRegime].blocks_per_row != 1;
  extern __shared__ __align__(16) char shared_memory[];
  auto* const groups = reinterpret_cast<uint32_t*>(shared_memory);
  __shared__ Selection<kThreads> selection;
  __shared__ MaxAndSum sums_of_warps[kWarps], total;
  __shared__ NumbersOfRow numbers;
  __shared__ uint64_t arrived;  // a barrier: what blocks of the cluster hand on

  const int blocks = kSpreads ? schedule.blocks_per_row : 1;
  const bool is_cluster = kSpreads && schedule.is_cluster;
  const int rank = is_cluster ? rank_in_cluster() : static_cast<int>(blockIdx.x) % blocks;
  // Asked anew where it is needed: 64 bits would take two registers throughout.
  const auto row_of_block = [&] {
    const int first = is_cluster ? cluster_of_block() : block_index_anew() / blocks;
    const int64_t before =
        blockIdx.y == 0 ? 0 : int64_t{blockIdx.y} * (static_cast<int>(gridDim.x) / blocks);
    return first + before;
  };
  const int64_t row = row_of_block();
  if (row >= params.rows) return;
  if constexpr (kSpreads) {
    if (is_cluster) {  // which has one row
      if (threadIdx.x == 0) {
        init_byte_barrier(&selection.shared);
        init_byte_barrier(&arrived);
        expect_bytes(&selection.shared, selection.bytes_of_cluster(blocks));
        if (rank == 0) expect_bytes(&arrived, static_cast<int>(blocks * partial_bytes(params.k)));
      }
      arrive_at_cluster_relaxed();
    }
  }
  const RowIndex index = row_at(schedule, row);
  // Capped logits are in units of exp2 until they are sorted.
  const Exponent exponent{Bias::kCaps ? 1.f : unit_of<Bias>(params, row) * kLog2E};
  const TopkPart<T, Mask, Bias, kThreads, kTopkRegimes[kRegime].vectors_per_thread, kHasUnitStride>
      part(params, schedule, index, rank);
  uint32_t delegates[2];
  const MaxAndSum mine = part.sum(groups + threadIdx.x, exponent, delegates);
  const int thread = thread_index_anew();
  const MaxAndSum of_warp = warp_merge<32>(mine, exponent);
  if (of_warp.sum != of_warp.sum) part.find_nan(groups + thread, delegates);
  if (thread % 32 == 0) sums_of_warps[thread / 32] = of_warp;
  selection.put_delegates(delegates);
  if (thread == 0) selection.count = selection.waiting_count = 0;
  if constexpr (kSpreads) {
    if (is_cluster) {
      wait_for_cluster();
      selection.share_with_cluster(delegates[0], rank, blocks);
    }
  }
  __syncthreads();
  // One warp finds a threshold for all, while others find the cluster's and the total.
  const auto put_total = [&] {
    const int lane = thread_index_anew() % 32;
    const MaxAndSum of_block = warp_merge<kWarps>(sums_of_warps[lane % kWarps], exponent);
    if (lane == 0) total = of_block;
  };
  const auto is_warp = [](int warp) { return thread_index_anew() / 32 == warp; };
  if (is_warp(0)) selection.put_threshold(0, selection.least_of_delegates(params.k));
  if (is_warp(1 % kWarps)) put_total();
  if (thread == kThreads - 1) {
    const int64_t same_row = row_of_block();
    numbers.read(params, same_row, unit_of<Bias>(params, same_row));
  }
  if constexpr (kSpreads) {
    if (is_cluster && is_warp(2 % kWarps))
      selection.put_threshold(1, selection.least_of_cluster(params.k, blocks));
  }
  __syncthreads();
  uint32_t reached = selection.reached[0];
  if constexpr (kSpreads) {
    if (is_cluster) reached = max(reached, selection.reached[1]);
  }
  selection.select(params.k, uint64_t{reached} << 32, [&](uint64_t least) {
    part.collect(least, groups + thread_index_anew(), selection);
  });
  if constexpr (kSpreads) {
    const TopkPartials partials =
        is_cluster
            ? TopkPartials(shared_memory + groups_bytes(schedule.max_segments,
                                                        schedule.segments_per_group, kThreads),
                           &arrived, blocks)
            : TopkPartials(params, schedule.workspace, row, blocks);
    if (thread == 0) partials.put_sum(rank, total);
    // In order, unless a cluster's block has fewer than k: they are handed on as they are.
    const int found = selection.count;
    if (is_cluster && found < params.k) {
      for (int i = thread; i < found; i += kThreads)
        partials.put_key(rank * params.k + i, selection.candidates[i]);
    } else {
      selection.for_ranked(
          params.k, [&](int i, uint64_t key) { partials.put_key(rank * params.k + i, key); });
    }
    for (int i = found + thread; i < params.k; i += kThreads)
      partials.put_key(rank * params.k + i, kNoKey);
    if (!is_cluster) sync_grid();
    if (rank != 0) return;
    // What k keys of one block reach.
    const auto last_of_block = [&](int i) {
      return static_cast<uint32_t>(partials.keys[i * params.k + params.k - 1] >> 32);
    };
    const int lane = thread_index_anew() % 32;
    if (is_cluster) {
      __syncthreads();  // all warps have read the candidates
      if (thread == 0) selection.count = 0;
      wait_for_bytes(&arrived, 0);
      reached = max(reached, largest_of_lanes(lane < blocks ? last_of_block(lane) : 0u));
      if (is_warp(0)) {
        const MaxAndSum of_cluster =
            warp_merge<32>(lane < blocks ? partials.sums[lane] : MaxAndSum{kLowest, 0.f}, exponent);
        if (lane == 0) total = of_cluster;
      }
      __syncthreads();
    } else {  // also what a few of each block reach
      const int of_block = divide_up(params.k, blocks);
      uint32_t of_one = 0, of_each = ~0u;
      MaxAndSum of_thread{kLowest, 0.f};
      for (int i = thread; i < blocks; i += kThreads) {
        of_thread.merge(partials.sums[i], exponent);
        of_one = max(of_one, last_of_block(i));
        of_each =
            min(of_each, static_cast<uint32_t>(partials.keys[i * params.k + of_block - 1] >> 32));
      }
      of_thread = warp_merge<32>(of_thread, exponent);
      of_one = largest_of_lanes(of_one);
      of_each = smallest_of_lanes(of_each);
      if (lane == 0) {
        sums_of_warps[thread / 32] = of_thread;
        selection.delegates[0][thread / 32] = of_one;
        selection.delegates[1][thread / 32] = of_each;
      }
      if (thread == 0) selection.count = 0;
      __syncthreads();
      if (is_warp(0)) put_total();
      of_one = largest_of_lanes(selection.delegates[0][lane % kWarps]);
      of_each = smallest_of_lanes(selection.delegates[1][lane % kWarps]);
      reached = max(reached, max(of_one, of_each));
    }
    selection.select(params.k, uint64_t{reached} << 32, [&](uint64_t least) {
      constexpr int kKeys = 4;  // on their way together
#pragma unroll 1
      for (int first = thread; first < blocks * params.k; first += kKeys * kThreads) {
        uint64_t keys[kKeys];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          const int at = first + i * kThreads;
          keys[i] = at < blocks * params.k ? partials.keys[at] : kNoKey;
        }
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
          selection.append(keys[i] != kNoKey && keys[i] >= least, [&](int) { return keys[i]; });
      }
    });
  }
  selection.for_ranked(params.k, [&](int i, uint64_t key) {
    if constexpr (Bias::kCaps) {
      selection.sorted[i] = key_of(logit_of(key) * kLn2, column_of(key));
    } else {
      selection.sorted[i] = key;
    }
  });
  __syncthreads();
  if constexpr (Bias::kCaps) {
    const MaxAndSum capped{total.max * kLn2, total.sum};
    write_topk<Mask, kThreads>(params, index, row_of_block(), capped, numbers, selection.sorted);
  } else {
    write_topk<Mask, kThreads>(params, index, row_of_block(), total, numbers, selection.sorted);
  }
}

}  // namespace megasoftmax
