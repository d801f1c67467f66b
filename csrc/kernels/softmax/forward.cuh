#pragma once
// p = exp(z - max z) / (sum exp(z - max z) + exp(sink - max z)),  z = scale * score + bias,
// excluded entries 0.
//
// A group of threads owns a row. One pass reads the visible chunks and keeps maxima and sums, one
// reduction merges them, one pass writes. Every visible score is read once and every probability
// written once (bf16: 4 bytes per element, 3 when causal); what neither registers nor shared memory
// can keep is read twice.

#include "row_owner.cuh"
#include "sink.cuh"

namespace megasoftmax {

// Makes logits of raw scores: complete ones with a bias; without, divided by |scale|, which the
// exponent makes good.
template <class T, class Mask, class Bias>
struct Logits {
  static constexpr int kElements = kPackElements<T>;

  RowIndex index;
  Bounds bounds;
  ChunkGrid<kElements> grid;
  Mask mask;

  __device__ Logits(const ForwardParams& params, const RowIndex& index, const Bounds& bounds,
                    ChunkGrid<kElements> grid)
      : index(index), bounds(bounds), grid(grid), mask(params.mask, index) {}

  // Of chunks at column, column + kStride, ...: -inf outside the bounds and where masked. Whole
  // groups of chunks are skipped, and unspecified, where the first of them begins behind the
  // bounds. kInside: all are within the bounds.
  template <int kStride, bool kInside, int kChunks>
  __device__ void of(const ForwardParams& params, int first, int column, Pack<T> (&raw)[kChunks],
                     float (&z)[kChunks][kElements]) const {
    [[maybe_unused]] MaskBytes<kElements> excluded[kChunks];
    if constexpr (Mask::kPresent)
      mask.template load<kElements, kStride, kInside>(column, bounds, excluded);
    [[maybe_unused]] Pack<typename Bias::Element, kElements> added[kChunks];
    if constexpr (Bias::kPresent) {
      const RowReader<typename Bias::Element, kElements, false> bias(
          params.bias, false, 0, index, grid, bounds, static_cast<int>(params.shape.columns), true);
      bias.template load<kStride>(column, added);
    }
    if (!Bias::kPresent && params.scale < 0) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) raw[i].flip_signs();
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (!kInside && first + i * kStride >= bounds.end) continue;
      const int at = column + i * kStride;
      if (!kInside && !Bias::kPresent && at >= bounds.end) raw[i] = Pack<T>::lowest();
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        z[i][j] = Bias::kPresent ? fmaf(raw[i][j], params.scale, added[i][j]) : raw[i][j];
        if constexpr (Mask::kPresent) z[i][j] = excluded[i].is_set(j) ? -INFINITY : z[i][j];
      }
      if (kInside || (Bias::kPresent ? bounds.contains(at, kElements) : !straddles(at))) continue;
#pragma unroll
      for (int j = 0; j < kElements; ++j) z[i][j] = bounds.contains(at + j) ? z[i][j] : -INFINITY;
    }
  }

  // Is a chunk partly inside the bounds?
  __device__ bool straddles(int column) const {
    return column < bounds.end && !bounds.contains(column, kElements);
  }
};

// exp(z - max z) of such logits.
template <class Bias>
__device__ inline Exponent exponent_of(const ForwardParams& params) {
  return {Bias::kPresent ? kLog2E : fabsf(params.scale) * kLog2E};
}

// Adds a batch of chunks with maximum `max`, and leaves its exponentials relative to the maximum so
// far. Groups of chunks are skipped where the first begins at `end` or behind it.
template <int kStride, int kChunks, int kElements>
__device__ inline void accumulate(MaxAndSum& mine, bool is_first_batch, float max,
                                  float (&z)[kChunks][kElements], int first, int end,
                                  Exponent exponent) {
  max = fmaxf(mine.max, max);
  if (!is_first_batch) mine.sum *= exponent(mine.max, max);
  mine.max = max;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (first + i * kStride >= end) continue;
#pragma unroll
    for (int j = 0; j < kElements; ++j) z[i][j] = exponent(z[i][j], max);
    mine.sum += reduce_pairwise(z[i], [](float a, float b) { return a + b; });
  }
}

// The largest of such a batch; not NaN unless all are.
template <int kStride, int kChunks, int kElements>
__device__ inline float largest(const float (&z)[kChunks][kElements], int first, int end) {
  float max = kLowest;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (first + i * kStride >= end) continue;
    max = fmaxf(max, reduce_pairwise(z[i], [](float a, float b) { return fmaxf(a, b); }));
  }
  return max;
}

// A NaN or +inf makes the visible row NaN; nothing left makes it 0 where entries can be excluded,
// NaN elsewhere.
template <class Mask, int kElements>
__device__ inline void replace_special(const ForwardParams& params, const Denominator& denominator,
                                       const Bounds& bounds, const Mask& mask, int column,
                                       float (&p)[kElements]) {
  if (denominator.is_regular()) return;
  const float special = denominator.is_empty() && params.can_exclude ? 0.f : NAN;
#pragma unroll
  for (int j = 0; j < kElements; ++j)
    p[j] = bounds.contains(column + j) && !mask.excluded(column + j) ? special : 0.f;
}

template <int kKernel>
inline constexpr KernelShape kForwardShape = kForwardRegimes[kKernel].shape();

template <class T, class Mask, class Bias, int kKernel>
__device__ __forceinline__ void forward_in_registers(const ForwardParams& params,
                                                     const Schedule& schedule) {
  constexpr KernelShape kShape = kForwardShape<kKernel>;
  constexpr int kElements = kPackElements<T>, kChunks = kShape.chunks_per_thread;
  constexpr int kStride = kShape.threads_per_row * kElements, kBatch = kChunks * kStride;
  RowOwner<kShape> owner;
  RowIndex index = row_of_block(schedule, kShape.rows_per_block);
  index.query += owner.row_in_block();
  const bool is_row = index.query < static_cast<int>(params.shape.queries);
  if (!is_row) {
    if (kShape.rows_per_block == 1) return;
    index.query = static_cast<int>(params.shape.queries) - 1;  // shadows a row, writes nothing
  }
  const int columns = static_cast<int>(params.shape.columns);
  const int64_t row = index.row(params.shape), first_element = row * columns;
  const Bounds bounds = Bounds::of(params.window, params.shape, index.query);
  const auto grid = ChunkGrid<kElements>::aligned_to(first_element);
  const RowReader<T, kElements, true> scores(params.scores, params.is_dense, first_element, index,
                                             grid, bounds, columns, row + kElements >= params.rows);
  const Logits<T, Mask, Bias> logits(params, index, bounds, grid);
  const Exponent exponent = exponent_of<Bias>(params);
  const int first_column = grid.begin(bounds);
  const auto with_writer = [&](auto&& write) {
    with_dtype(params.probabilities_type, [&](auto tag) {
      write(RowWriter<decltype(tag), kElements>(params.probabilities, first_element, columns));
    });
  };
  float z[kChunks][kElements];
  const int column = first_column + owner.thread() * kElements;
  Pack<T> raw[kChunks];
  scores.template load<kStride>(column, raw);
  if (is_row) {  // while the loads are in flight
    fill_outside(params.probabilities, params.probabilities_type, row, columns, first_column,
                 first_column + kBatch, owner.thread(), kShape.threads_per_row);
    with_writer([&](const auto& writer) {
      writer.template fill_behind<kStride, kChunks>(column, bounds.end);
    });
  }
  logits.template of<kStride, false>(params, first_column, column, raw, z);
  MaxAndSum mine{kLowest, 0.f};
  accumulate<kStride>(mine, true, largest<kStride>(z, first_column, bounds.end), z, first_column,
                      bounds.end, exponent);
  const MaxAndSum total = owner.merge(mine, exponent);
  const Denominator denominator(total, exponent, params.sink, index.head);
  if (params.log_sum_exp != nullptr && owner.thread() == 0 && is_row)
    params.log_sum_exp[row] = denominator.log_sum_exp();
  const float factor = denominator.factor * exponent(mine.max, total.max);
  if (!is_row) return;
  with_writer([&](const auto& writer) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int at = column + i * kStride;
      if (at >= bounds.end) continue;
#pragma unroll
      for (int j = 0; j < kElements; ++j) z[i][j] *= factor;
      replace_special(params, denominator, bounds, logits.mask, at, z[i]);
      writer.store(at, z[i]);
    }
  });
}

template <class T, class Mask, class Bias, int kKernel>
__device__ __forceinline__ void forward_in_units(const ForwardParams& params,
                                                 const Schedule& schedule) {
  constexpr KernelShape kShape = kForwardShape<kKernel>;
  constexpr int kElements = kPackElements<T>, kChunks = kShape.chunks_per_thread;
  constexpr int kStride = 32 * kElements;  // in columns
  constexpr bool kTakesTurns = kShape.takes_turns;
  using Owner = RowOwner<kShape>;
  using Row = RowPlace<kElements>;
  using Reader = RowReader<T, kElements, true>;
  // What shared memory keeps is logits, if they have the type of the scores: mask and bounds are
  // applied once.
  constexpr bool kKeepsLogits = !Bias::kPresent && !Owner::kRereads;
  constexpr int kSlots = kRingBytes / static_cast<int>(sizeof(Pack<T>)) / kChunksPerBatch;
  extern __shared__ __align__(16) char shared_memory[];

  Owner owner(schedule);
  const Exponent exponent = exponent_of<Bias>(params);
  const auto kept = [&](int place) { return owner.template kept<Pack<T>>(shared_memory, place); };
  const int columns = static_cast<int>(params.shape.columns);
  const auto scores_of = [&](const Row& row, const UnitPart& part) {
    return Reader(params.scores, params.is_dense, row.first_element, row.index, row.grid,
                  part.bounds, columns, row.row + kElements >= params.rows);
  };
  // The column of this lane's first chunk, and whether all of the warp's are inside.
  const auto column_of = [&](const Row& row, const UnitPart& part, int unit, int batch) {
    return row.first_column + owner.chunk(part, unit, batch) * kElements;
  };
  const auto is_inside = [&](const Reader& scores, int column) {
    const int first = column - owner.lane() * kElements;
    return scores.is_inside(first, first + kChunks * kStride);
  };
  const auto start_copies = [&](const Reader& scores, int column, int place) {
    scores.template start_copies<kStride, kChunks>(is_inside(scores, column), column, kept(place),
                                                   32);
  };
  const auto start_units = [&](const Row& row, const UnitPart& part, int from, int to) {
    const Reader scores = scores_of(row, part);
    for (int unit = from; unit <= to; unit += Owner::kWarps) {
#pragma unroll
      for (int batch = 0; batch < kUnitBatches; ++batch)
        start_copies(scores, column_of(row, part, unit, batch), owner.place(unit, batch));
    }
  };

  int64_t number = owner.owner_of_block();
  const RowIndex index = kTakesTurns ? row_at(schedule, number) : row_of_block(schedule, 1);
  if (index.query >= static_cast<int>(params.shape.queries)) return;
  Row row(params.shape, params.window, index);
  UnitPart part = owner.part_of(row.visible, row.grid);
  if constexpr (!Owner::kRereads) start_units(row, part, owner.first_unit(), owner.last_unit(part));

  for (int turn = 0;; ++turn) {
    const Reader scores = scores_of(row, part);
    const Logits<T, Mask, Bias> logits(params, row.index, part.bounds, row.grid);
    float z[kChunks][kElements];
    const auto load = [&](int place, Pack<T>(&raw)[kChunks]) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) raw[i] = kept(place)[i * 32];
    };
    const auto sum_batch = [&](int column, int place, bool is_first_batch, MaxAndSum& mine) {
      const int first = column - owner.lane() * kElements;
      Pack<T> raw[kChunks];
      load(place, raw);
      float max;
      if (is_inside(scores, column)) {
        logits.template of<kStride, true>(params, first, column, raw, z);
        max = Mask::kPresent || Bias::kPresent ? largest<kStride>(z, first, part.bounds.end)
                                               : largest_lane(raw);
      } else {
        logits.template of<kStride, false>(params, first, column, raw, z);
        max = largest<kStride>(z, first, part.bounds.end);
      }
      const bool has_changed = Mask::kPresent || params.scale < 0 || !is_inside(scores, column);
      if (kKeepsLogits && has_changed) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) kept(place)[i * 32] = Pack<T>::round(z[i]);
      }
      accumulate<kStride>(mine, is_first_batch, max, z, first, part.bounds.end, exponent);
    };
    const auto start = [&](int unit, int batch, int place) {
      start_copies(scores, column_of(row, part, unit, batch), place);
    };
    fill_outside(params.probabilities, params.probabilities_type, row.row, columns,
                 row.first_column, row.grid.end(row.visible), owner.thread(), owner.threads());
    owner.template start<Pack<T>>(shared_memory, row.row, turn);
    MaxAndSum mine;
    owner.template sum_pass<kSlots>(
        part, start,
        [&](int unit, int batch, int place) {
          if (batch == 0) mine = {kLowest, 0.f};
          sum_batch(column_of(row, part, unit, batch), place, batch == 0, mine);
        },
        [&](int unit) { owner.put(part, unit, warp_merge<32>(mine, exponent)); });
    const MaxAndSum total = owner.merge(part, exponent);
    const Denominator denominator(total, exponent, params.sink, row.index.head);
    if (params.log_sum_exp != nullptr && owner.is_first_thread())
      params.log_sum_exp[row.row] = denominator.log_sum_exp();
    const float log2_factor = log2f(denominator.factor);

    // Where this row leaves shared memory the next one comes in.
    number += schedule.owners;
    const bool has_next = kTakesTurns && number < schedule.rows;
    const Row next(params.shape, params.window, has_next ? row_at(schedule, number) : row.index);
    const UnitPart next_part = owner.part_of(next.visible, next.grid);
    const int last = owner.last_unit(part), next_last = has_next ? owner.last_unit(next_part) : -1;
    with_dtype(params.probabilities_type, [&](auto tag) {
      const RowWriter<decltype(tag), kElements> writer(params.probabilities, row.first_element,
                                                       columns);
      const auto write_batch = [&](int unit, int batch, int place) {
        const int column = column_of(row, part, unit, batch);
        Pack<T> raw[kChunks];
        load(place, raw);
        if constexpr (kKeepsLogits) {
          unpack(raw, z);
        } else {
          logits.template of<kStride, false>(params, column - owner.lane() * kElements, column, raw,
                                             z);
        }
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          const int at = column + i * kStride;
          if (at >= part.bounds.end) continue;
#pragma unroll
          for (int j = 0; j < kElements; ++j) {
            z[i][j] = exp2_approximate(fmaf(z[i][j] - total.max, exponent.c, log2_factor));
          }
          replace_special(params, denominator, part.bounds, logits.mask, at, z[i]);
          writer.store(at, z[i]);
        }
      };
      owner.template write_pass<kSlots>(part, start, write_batch, [&](int unit) {
        if (kTakesTurns && unit <= next_last) start_units(next, next_part, unit, unit);
      });
    });
    if (!has_next) break;
    start_units(next, next_part, max(last + Owner::kWarps, owner.first_unit()), next_last);
    row = next;
    part = next_part;
  }
}

// The tables' budgets of registers are those of compute capability 9.0; before it, rows in
// registers need a few more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int blocks_per_sm(const KernelShape& shape) {
  return shape.storage == Storage::kRegisters ? shape.blocks_per_sm - (shape.blocks_per_sm + 7) / 8
                                              : shape.blocks_per_sm;
}
#else
constexpr int blocks_per_sm(const KernelShape& shape) { return shape.blocks_per_sm; }
#endif

template <class T, class Mask, class Bias, int kKernel>
__global__ void __launch_bounds__(
    kForwardShape<kKernel>.threads(),
    (Bias::blocks_per_sm(Mask::blocks_per_sm(blocks_per_sm(kForwardShape<kKernel>)))))
    softmax_forward_kernel(const __grid_constant__ ForwardParams params,
                           const __grid_constant__ Schedule schedule) {
  if constexpr (kForwardShape<kKernel>.storage == Storage::kRegisters) {
    forward_in_registers<T, Mask, Bias, kKernel>(params, schedule);
  } else {
    forward_in_units<T, Mask, Bias, kKernel>(params, schedule);
  }
}

}  // namespace megasoftmax
