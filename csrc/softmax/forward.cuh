#pragma once
// p = exp(z - max z) / denominator,  z = scale * score + bias, excluded entries 0. The denominator
// is the sum of exp(z - max z) and what denominator.cuh adds. With dropout, dropped entries are 0
// and others p * factor.
//
// A group of threads owns a row. One pass reads the visible vectors and keeps maxima and sums, one
// reduction merges them, one pass writes. Every visible score is read once and every probability
// written once (bf16: 4 bytes per element, 3 when causal); what neither registers nor shared memory
// can keep is read twice.

#include <algorithm>

#include "dropping.cuh"
#include "logits.cuh"
#include "row_owner.cuh"

namespace megasoftmax {

// Instances of masks and biases look for ranges too, where they are given.
template <class Mask, class Bias>
inline constexpr bool kMayHaveRange = Mask::kMayHaveRange || Bias::kPresent || Bias::kCaps;

template <class Mask>
using EntriesOf = std::conditional_t<Mask::kDrops, KeptEntries, AllEntries>;

// What is read with the scores would come in more pieces along their lines.
template <class Mask, class Bias, int kElements>
using GridOf =
    std::conditional_t<!Mask::kDrops && (Mask::kPresent || Bias::kPresent), VectorGrid<kElements>,
                       typename EntriesOf<Mask>::template Grid<kElements>>;

template <class T, class Mask, class Bias, int kKernel>
__device__ __forceinline__ void forward_in_registers(const ForwardParams& params,
                                                     const Schedule& schedule) {
  constexpr KernelShape kShape = kForwardKernel<kKernel>;
  constexpr int kElements = kPackElements<T>, kVectors = kShape.vectors_per_thread;
  constexpr int kStride = kShape.threads_per_row * kElements, kTileColumns = kVectors * kStride;
  constexpr int kGroup = std::min(kShape.threads_per_row, 32) * kElements;
  using Entries = EntriesOf<Mask>;
  constexpr bool kIsPair = Mask::kDrops && kShape.may_hold_pairs();
  constexpr bool kIsWindowed = rows_of_shape(kForwardRegimes, kKernel) == kWindowed;
  ZeroBlock zeros;
  if constexpr (kIsWindowed) zeros = ZeroBlock::make<kShape.threads()>();
  RowOwner<kShape> owner;
  RowIndex index = row_of_block<kShape>(schedule);
  bool is_row;
  if (!find_query<kShape, kIsPair>(owner.row_in_block(), static_cast<int>(params.shape.queries),
                                   index.query, is_row))
    return;
  const int columns = static_cast<int>(params.shape.columns);
  const int64_t row = index.row(params.shape), first_element = row * columns;
  const Bounds bounds = Bounds::of<kMayHaveRange<Mask, Bias>>(params, index);
  const auto grid = GridOf<Mask, Bias, kElements>::aligned_to(first_element, columns);
  const Extent extent = extent_of<kIsPair>(grid, bounds);
  const int first_column = extent.first_column, end = extent.end;
  const RowReader<T, kElements, true> scores(params.scores, params.is_contiguous, first_element,
                                             index, grid, bounds, columns);
  const Logits<T, Mask, Bias> logits(params, index, bounds, grid);
  const Entries entries(params, index);
  const Exponent exponent = exponent_of<Bias>(params);
  // Where the first of each group of vectors begins.
  const int first = first_column + owner.first_thread() * kElements;
  float z[kVectors][kElements];
  int column = first_column + owner.thread() * kElements;
  Pack<T> raw[kVectors];
  if constexpr (Bias::kCaps) {  // what is not loaded is small
#pragma unroll
    for (auto& pack : raw) pack = {};
  }
  scores.template load<kStride>(column, raw);
  // Rows of ragged lengths would store zeros piece by piece in the loop below.
  const bool is_whole_row = columns % kElements == 0;
  const int stored = is_whole_row ? kTileColumns : round_up(max(end - first_column, 0), kGroup);
  const auto fill_rest = [&](auto&& fill) {
    fill_outside(params.probabilities, params.probabilities_type, row, columns, first_column,
                 first_column + stored, fill);
  };
  if (kIsWindowed && is_row) {
    fill_rest([&](char* from, char* to) {
      zeros.fill(from, to, owner.thread(), kShape.threads_per_row);
    });
  }
  const auto kept = entries.template of_tile<kShape.threads_per_row, kIsPair, kElements, kVectors>(
      first_column, end);
  // Else the columns of all vectors would stay in registers.
  if (kIsPair) column = static_cast<int>(unknown(static_cast<uint32_t>(column)));
  MaxAndSum mine{kLowest, 0.f};
  if constexpr (Bias::kPresent) {
    logits.template of<kStride, false>(params, first, extent, column, raw, z);
    accumulate<kStride>(mine, true, largest<kStride>(z, first, end), z, z, first, end, exponent);
  } else if constexpr (Bias::kCaps) {
    const CappedLogits<T> capped(params);
    const bool are_small = prepare_capped(capped, raw);
    logits.template exclude<kStride, false>(params, first, extent, column, raw);
    mine.max = reference_of_bounded(params, index.head);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * kStride >= end) continue;
      capped.exponentials(raw[i], are_small, mine.max, z[i]);
      mine.sum += reduce_pairwise(z[i], [](float a, float b) { return a + b; });
    }
  } else {
    logits.template exclude<kStride, false>(params, first, extent, column, raw);
    accumulate<kStride>(mine, true, largest_lane(raw), raw, z, first, end, exponent);
  }
  const MaxAndSum total = owner.merge(mine, exponent);
  const Denominator denominator(Bias::kCaps ? of_bounded(total) : total, exponent, params,
                                index.head);
  if (params.log_sum_exp != nullptr && owner.thread() == 0 && is_row)
    params.log_sum_exp[row] = denominator.log_sum_exp();
  const float factor = denominator.factor * exponent(mine.max, total.max) * entries.factor(params);
  if (!is_row) return;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kStride >= end) continue;
#pragma unroll
    for (int j = 0; j < kElements; ++j) z[i][j] *= factor;
  }
  if (!denominator.is_regular()) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * kStride < end)
        replace_special(params, denominator, bounds, logits.mask, column + i * kStride, z[i]);
    }
  }
  // Except in windowed rows, zeros leave with the probabilities beside them, so that memory gets
  // whole lines at a time.
  with_result_dtype<T>(params.probabilities_type, [&](auto tag) {
    using Result = Pack<decltype(tag), kElements>;
    const RowWriter<decltype(tag), kElements> writer(params.probabilities, first_element, columns);
    auto* const target = keep_in_register(writer.row + column);
    const auto result = [&](int i) {
      Result pack = Result::round(z[i]);
      kept.drop(i, pack);
      return pack;
    };
    if (is_whole_row) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        Result pack = {};
        if (first + i * kStride < end) pack = result(i);
        if (column + i * kStride < columns) writer.store_whole(target + i * kStride, pack);
      }
      return;
    }
    // Ragged rows cut vectors of the line that they begin in, and of their end. A lane has at most
    // one at the end, whose store is deferred, so that its code is there once.
    Result last = {};
    int last_at = columns;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int group = first + i * kStride, at = column + i * kStride;
      if (group >= end) continue;
      const Result pack = result(i);
      if (writer.columns.contains(group, kGroup) || writer.columns.contains(at, kElements)) {
        writer.store_whole(target + i * kStride, pack);
      } else if (at >= columns) {
        continue;
      } else if (i * kStride < kLineVectors * kElements) {  // column 0 may cut it
        store_partial(target + i * kStride, pack, -at, columns - at);
      } else {
        last = pack;
        last_at = at;
      }
    }
    if (last_at < columns) store_partial(writer.row + last_at, last, 0, columns - last_at);
  });
  if constexpr (kIsWindowed) {
    ZeroBlock::finish();
  } else {
    fill_rest(
        [&](char* from, char* to) { fill_zero(from, to, owner.thread(), kShape.threads_per_row); });
  }
}

template <class T, class Mask, class Bias, int kKernel>
__device__ __forceinline__ void forward_in_segments(const ForwardParams& params,
                                                    const Schedule& schedule) {
  constexpr KernelShape kShape = kForwardKernel<kKernel>;
  constexpr int kElements = kPackElements<T>, kVectors = kShape.vectors_per_thread;
  constexpr int kStride = 32 * kElements, kTileColumns = kVectors * kStride;  // in columns
  using Owner = RowOwner<kShape>;
  using Entries = EntriesOf<Mask>;
  using Row = RowPlace<kElements, GridOf<Mask, Bias, kElements>>;
  using Kept = typename Entries::template Kept<kElements * kVectors>;
  using Reader = RowReader<T, kElements, true>;
  // With a bias, logits are made anew of scores and bias in the pass that writes, and a few vectors
  // at a time: they need registers. Without one shared memory keeps them, in the type of the
  // scores: mask and bounds are applied once.
  constexpr int kBiasVectors = 2;
  extern __shared__ __align__(16) char shared_memory[];

  Owner owner(schedule,
              shared_memory + schedule.kept_warp_tiles * kWarpTileVectors * sizeof(Pack<T>));
  const Exponent exponent = exponent_of<Bias>(params);
  Pack<T>* const shared_packs =
      keep_shared_address(reinterpret_cast<Pack<T>*>(shared_memory) + owner.lane());
  const auto kept = [&](int place) { return shared_packs + place * kWarpTileVectors; };
  const int columns = static_cast<int>(params.shape.columns);
  const auto column_of = [&](int first) { return first + owner.lane() * kElements; };

  // A row that the block takes, and how to read its part of it.
  struct Taken {
    Row row;
    SegmentPart part;
    Reader scores;
    Logits<T, Mask, Bias> logits;
  };
  const auto take = [&](const RowIndex& index) {
    const Row row(params.shape, index, Bounds::of<kMayHaveRange<Mask, Bias>>(params, index));
    const SegmentPart part = owner.part_of(row.visible, row.grid);
    return Taken{row, part,
                 Reader(params.scores, params.is_contiguous, row.first_element, index, row.grid,
                        part.bounds, columns),
                 Logits<T, Mask, Bias>(params, index, part.bounds, row.grid)};
  };
  // The column of the warp's first vector.
  const auto first_of = [&](const Taken& of, int tile) {
    return of.row.first_column + owner.first_vector(of.part, tile) * kElements;
  };
  const auto start_copies = [&](const Taken& of, int tile, int place) {
    const int first = first_of(of, tile);
    of.scores.template start_copies<kStride, kVectors>(
        of.scores.inside.contains(first, kTileColumns), column_of(first), kept(place), 32);
  };
  using MaskVectors = MaskBytes<kElements>[kVectors];
  const auto load_mask = [&](const Taken& of, int first, MaskVectors& excluded) {
    if constexpr (Mask::kPresent) {
      if (of.scores.inside.contains(first, kTileColumns)) {
        of.logits.mask.template load<kElements, kStride, true>(column_of(first), of.part.bounds,
                                                               excluded);
      } else {
        of.logits.mask.template load<kElements, kStride, false>(column_of(first), of.part.bounds,
                                                                excluded);
      }
    }
  };
  [[maybe_unused]] const auto capped_logits = [&] { return CappedLogits<T>(params); };
  // Logits of scores as they were copied, also to where they are kept. Returns whether a polynomial
  // caps them all, if they are capped.
  const auto prepare = [&](const Taken& of, int first, const MaskVectors& excluded,
                           Pack<T>(&raw)[kVectors], Pack<T>* packs) {
    if (of.scores.inside.contains(first, kTileColumns)) {
      bool are_plain = !Mask::kPresent && params.scale >= 0;
      if constexpr (Bias::kCaps)
        are_plain = are_plain && capped_logits().template are_small<false>(raw);
      if (are_plain) return true;
      of.logits.template prepare<kStride, true>(params, column_of(first), excluded, raw);
    } else {
      of.logits.template prepare<kStride, false>(params, column_of(first), excluded, raw);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) packs[i * 32] = raw[i];
    if constexpr (Bias::kCaps) return capped_logits().template are_small<true>(raw);
    return true;
  };
  // Of rows that are capped: sums the exponentials, which take the place of scores if results allow
  // it.
  [[maybe_unused]] const auto sum_capped = [&](const Taken& of, Pack<T>(&raw)[kVectors],
                                               bool are_small, Pack<T>* packs, float& before) {
    const float reference = reference_of_bounded(params, of.row.index.head);
    if constexpr (kKeepsExponentials<T>) {
      const auto sum = sum_of_capped<true>(raw, are_small, capped_logits(), reference, before);
      if (params.probabilities_type == DType::kFloat32) return sum;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) packs[i * 32] = raw[i];
      return sum;
    } else {
      return sum_of_capped<false>(raw, are_small, capped_logits(), reference, before);
    }
  };
  // The mask of a warp's next segment, loaded while the scores are on their way and while the
  // segment before is summed.
  static_assert(!Bias::kCaps || !Mask::kPresent);  // what follows makes exponentials at once
  constexpr bool kLoadsAhead = Mask::kPresent && !Bias::kPresent && !kShape.is_persistent;
  [[maybe_unused]] MaskVectors excluded_next;
  // Logits of part of a tile, with a bias.
  const auto logits_with_bias = [&](const Taken& of, int first, int place, int from,
                                    float (&z)[kBiasVectors][kElements]) {
    Pack<T> raw[kBiasVectors];
    load_kept(kept(place) + from * 32, raw);
    first += from * kStride;
    if (of.scores.inside.contains(first, kBiasVectors * kStride)) {
      of.logits.template of<kStride, true>(params, first, column_of(first), raw, z);
    } else {
      of.logits.template of<kStride, false>(params, first, column_of(first), raw, z);
    }
  };
  const auto sum_tile = [&](const Taken& of, int tile, int place, float& before) {
    const int first = first_of(of, tile);
    if constexpr (Bias::kPresent) {
      before = warp_sum<32>(before);
      MaxAndSum mine{kLowest, 0.f};
#pragma unroll 1
      for (int from = 0; from < kVectors; from += kBiasVectors) {
        float z[kBiasVectors][kElements];
        logits_with_bias(of, first, place, from, z);
        const int begin = first + from * kStride, end = of.part.bounds.end;
        accumulate<kStride>(mine, from == 0, largest<kStride>(z, begin, end), z, z, begin, end,
                            exponent);
      }
      const float max = warp_max<32>(mine.max);
      return MaxAndSum{max, mine.sum * exponent(mine.max, max)};
    } else {
      Pack<T> raw[kVectors];
      if constexpr (kLoadsAhead) {
        load_kept(kept(place), raw);
        prepare(of, first, excluded_next, raw, kept(place));
        const int next = tile + Owner::kWarps;
        if (next <= owner.last_segment(of.part)) load_mask(of, first_of(of, next), excluded_next);
      } else {
        [[maybe_unused]] MaskVectors excluded;
        load_mask(of, first, excluded);
        load_kept(kept(place), raw);
        const bool are_small = prepare(of, first, excluded, raw, kept(place));
        if constexpr (Bias::kCaps) return sum_capped(of, raw, are_small, kept(place), before);
      }
      return sum_of(raw, exponent, before);
    }
  };
  // Writes a row from the maximum and the sum of all of it, which `write_all` does tile by tile.
  const auto write_row = [&](const Taken& of, const MaxAndSum& total, auto&& write_all) {
    const Entries entries(params, of.row.index);
    const Denominator denominator(Bias::kCaps ? of_bounded(total) : total, exponent, params,
                                  of.row.index.head);
    if (params.log_sum_exp != nullptr && owner.is_first_thread())
      params.log_sum_exp[of.row.row] = denominator.log_sum_exp();
    const float log2_factor = log2f(denominator.factor * entries.factor(params));
    const bool is_regular = denominator.is_regular();

    with_result_dtype<T>(params.probabilities_type, [&](auto tag) {
      const RowWriter<decltype(tag), kElements> writer(params.probabilities, of.row.first_element,
                                                       columns);
      const auto probability = [&](float z) {
        return exp2_approximate(fmaf(z - total.max, exponent.c, log2_factor));
      };
      constexpr bool kIsKept = Bias::kCaps && kKeepsExponentials<T, decltype(tag)>;
      // Of a vector without a bias, as it waits. is_small: as of CappedLogits::of.
      [[maybe_unused]] const auto make_probabilities = [&](const Pack<T>& pack, bool is_small,
                                                           float (&p)[kElements]) {
        if constexpr (Bias::kCaps) capped_logits().exponentials(pack, is_small, total.max, p);
#pragma unroll
        for (int j = 0; j < kElements; ++j)
          p[j] = Bias::kCaps ? p[j] * denominator.factor : probability(pack[j]);
      };
      const auto store = [&](int at, const Kept& kept, int i, float (&p)[kElements]) {
        replace_special(params, denominator, of.part.bounds, of.logits.mask, at, p);
        auto pack = writer.round(p);
        kept.drop(i, pack);
        writer.store(at, pack);
      };
      // To the caches. Whole rows of a cluster take less time without it, causal rows more.
      const bool has_hint = !kShape.may_share_rows || kShape.is_persistent ||
                            of.row.visible.begin > 0 || of.row.visible.end < columns;
      const auto write_tile = [&](int tile, int place, bool is_new) {
        const int first = first_of(of, tile), column = column_of(first);
        const Kept kept_entries =
            entries.template of_tile<32, false, kElements, kVectors>(first, of.part.bounds.end);
        float p[kElements];
        if constexpr (Bias::kPresent) {
#pragma unroll 1
          for (int from = 0; from < kVectors; from += kBiasVectors) {
            float z[kBiasVectors][kElements];
            logits_with_bias(of, first, place, from, z);
#pragma unroll
            for (int i = 0; i < kBiasVectors; ++i) {
              const int at = column + (from + i) * kStride;
              if (at >= of.part.bounds.end) continue;
#pragma unroll
              for (int j = 0; j < kElements; ++j) p[j] = probability(z[i][j]);
              store(at, kept_entries, from + i, p);
            }
          }
        } else {
          Pack<T>* const packs = kept(place);
          Pack<T> raw[kVectors];
          load_kept(packs, raw);
          keep_loads_together();
          if (is_new) {
            [[maybe_unused]] MaskVectors excluded;
            load_mask(of, first, excluded);
            [[maybe_unused]] const bool are_small = prepare(of, first, excluded, raw, packs);
            [[maybe_unused]] float none = 0.f;
            if constexpr (kIsKept) sum_capped(of, raw, are_small, packs, none);
          }
          bool is_plain = is_regular;
          if constexpr (Bias::kCaps && !kIsKept)
            is_plain = is_regular && capped_logits().template are_small<true>(raw);
          if (is_plain && first >= 0 && first + kTileColumns <= columns) {
            auto* const target = keep_in_register(writer.row + column);
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
              Pack<decltype(tag), kElements> pack;
              if constexpr (kIsKept) {
                pack = probabilities_of(raw[i], denominator.factor);
              } else {
                make_probabilities(raw[i], true, p);
                pack = writer.round(p);
              }
              kept_entries.drop(i, pack);
              if (has_hint) {
                writer.store_whole(target + i * kStride, pack);
              } else {
                store_pack(target + i * kStride, pack);
              }
            }
          } else {
#pragma unroll 1
            for (int i = 0; i < kVectors; ++i) {
              const int at = column + i * kStride;
              if (at >= columns) break;
              const Pack<T> pack = packs[i * 32];
              if constexpr (kIsKept) {
                const Pack<T> result = probabilities_of(pack, denominator.factor);
#pragma unroll
                for (int j = 0; j < kElements; ++j) p[j] = result[j];
              } else {
                make_probabilities(pack, false, p);
              }
              store(at, kept_entries, i, p);
            }
          }
        }
      };
      write_all(write_tile);
    });
    // Without a bias, segments are written whole: what lies outside the bounds waits as -inf.
    const int end = Bias::kPresent
                        ? of.row.grid.end(of.row.visible)
                        : of.row.first_column + owner.covered_vectors(of.part) * kElements;
    fill_outside(params.probabilities, params.probabilities_type, of.row.row, columns,
                 of.row.first_column, end, owner.thread(), owner.threads());
  };

  if constexpr (kShape.is_persistent) {
    owner.for_each_row(
        [&](int number) { return take(row_at(schedule, number)); }, start_copies, sum_tile,
        [&](MaxAndSum& sums, const MaxAndSum& of_tile) { sums.merge(of_tile, exponent); },
        [&](const Taken& of, auto&& pass) { write_row(of, owner.merge(of.part, exponent), pass); });
  } else {
    const RowIndex index = row_of_block<kShape>(schedule);
    if (index.query >= static_cast<int>(params.shape.queries)) return;
    const Taken taken = take(index);
    const SegmentPart& part = taken.part;
#pragma unroll 1
    for (int segment = owner.first_segment(); segment <= owner.last_segment(part);
         segment += Owner::kWarps) {
      start_copies(taken, segment, segment);
      end_copies();
    }
    owner.start(0);
    if constexpr (kLoadsAhead) {
      if (owner.first_segment() <= owner.last_segment(part))
        load_mask(taken, first_of(taken, owner.first_segment()), excluded_next);
    }
    owner.sum_pass(part, 0, [&](int segment, int place, float& before) {
      return sum_tile(taken, segment, place, before);
    });
    write_row(taken, owner.merge(part, exponent),
              [&](auto&& write_tile) { owner.write_pass(part, write_tile, [](int) {}); });
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

// Blocks that a launch leaves registers for. Masks need no more of them: left alone, the compiler
// takes up to 16 more of a thread, and with them a quarter of the blocks. Rows in shared memory,
// which load their mask ahead, then have 64.
template <class Mask, class Bias>
constexpr int blocks_per_sm(const KernelShape& shape) {
  constexpr bool kIsMasked = Mask::kPresent && !Mask::kDrops;
  if (kIsMasked && shape.storage == Storage::kRegisters)
    return Bias::blocks_per_sm(blocks_per_sm(shape));
  if (kIsMasked && !Bias::kPresent && shape.storage == Storage::kShared)
    return 65536 / (64 * shape.threads());
  // Persistent blocks have registers for a mask without leaving a block out.
  if (shape.storage == Storage::kReread) return Bias::blocks_per_sm(shape.blocks_per_sm);
  return Bias::blocks_per_sm(Mask::blocks_per_sm(blocks_per_sm(shape)));
}

template <class T, class Mask, class Bias, int kKernel>
__global__ void __launch_bounds__(
    kForwardKernel<kKernel>.threads(),
    (blocks_with_registers(blocks_per_sm<Mask, Bias>(kForwardKernel<kKernel>),
                           kForwardKernel<kKernel>.threads())))
    softmax_forward_kernel(const __grid_constant__ ForwardParams params,
                           const __grid_constant__ Schedule schedule) {
  if constexpr (kForwardKernel<kKernel>.storage == Storage::kRegisters) {
    forward_in_registers<T, Mask, Bias, kKernel>(params, schedule);
  } else {
    forward_in_segments<T, Mask, Bias, kKernel>(params, schedule);
  }
}

}  // namespace megasoftmax
