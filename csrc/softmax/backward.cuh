#pragma once
// dz = p * (g - D),  D = sum(g * p) - h,  d scores = scale * dz,  d bias = the sum of dz over
// broadcast dimensions;  g and h are the gradients of probabilities and log-sum-exp. With dropout,
// g is 0 where an entry was dropped, else factor * g. Where p is exactly 0, dz is exactly 0 and g
// does not enter D, whatever it holds there.
//
// A group of threads owns the rows that share a row of the bias gradient and takes them one after
// the other. Without a bias gradient it owns one row. Both inputs are read once, the gradient is
// written once (bf16: 6 bytes per element, 4 when causal).

#include <algorithm>

#include "bias_gradient.cuh"
#include "denominator.cuh"
#include "inputs.cuh"
#include "row_owner.cuh"

namespace megasoftmax {

// Probability 0 takes a lane out of all that follows.
template <class T>
__device__ inline void clear_outside(Pack<T>& probabilities, int column, const Bounds& bounds) {
  if (bounds.contains(column, kPackElements<T>)) return;
  probabilities.template fill_outside<0>(bounds.begin - column, bounds.end - column);
}

// dz of an element, whose g is 0 where p is and still lacks its factor. D that is not finite must
// not meet those.
__device__ inline float logit_gradient(float g, float p, float factor, float d, bool is_finite) {
  return is_finite || p != 0.f ? fmaf(p, fmaf(g, factor, -d), 0.f) : 0.f;  // never -0
}
template <class T, int kElements>
__device__ inline void logits_gradient(const Pack<T, kElements>& g, const Pack<T, kElements>& p,
                                       float factor, float d, bool is_finite,
                                       float (&dz)[kElements]) {
#pragma unroll
  for (int j = 0; j < kElements; ++j) dz[j] = logit_gradient(g[j], p[j], factor, d, is_finite);
}

template <class Inputs, template <KernelShape, int> class BiasGradientOf, int kKernel>
__device__ __forceinline__ void backward_in_registers(const BackwardParams& params,
                                                      const Schedule& schedule) {
  using T = typename Inputs::Element;
  constexpr KernelShape kShape = kBackwardKernel<kKernel>;
  constexpr int kElements = kPackElements<T>, kVectors = kShape.vectors_per_thread;
  constexpr int kStride = kShape.threads_per_row * kElements, kTileColumns = kVectors * kStride;
  constexpr int kGroup = std::min(kShape.threads_per_row, 32) * kElements;
  using Biases = BiasGradientOf<kShape, kElements>;
  using Grid = typename Inputs::Entries::template Grid<kElements>;
  constexpr bool kIsPair = Inputs::kMayDrop && !Biases::kPresent && kShape.may_hold_pairs();
  constexpr bool kIsWindowed = rows_of_shape(kBackwardRegimes, kKernel) == kWindowed;
  ZeroBlock zeros;
  if constexpr (kIsWindowed) zeros = ZeroBlock::make<kShape.threads()>();
  RowOwner<kShape> owner;
  const int columns = static_cast<int>(params.shape.columns);
  RowIndex owner_index = row_of_block<kShape>(schedule);
  bool is_owner;
  if (!find_query<kShape, kIsPair>(owner.row_in_block(),
                                   static_cast<int>(params.bias_shape.queries), owner_index.query,
                                   is_owner))
    return;
  Biases biases(params, owner_index.row(params.bias_shape));
  const RowsOfOwner<Biases::kPresent> rows(params, owner_index);

  const int64_t iterations = rows.iterations(params);
  for (int64_t iteration = 0; iteration < iterations;
       ++iteration) {  // as many for all owners in a warp
    const bool has_row = rows.has(params, iteration), is_row = is_owner && has_row;
    const RowIndex index = rows.at(params, has_row ? iteration : 0);
    const int64_t row = index.row(params.shape), first_element = row * columns;
    const Bounds bounds = Bounds::of<true>(params, index);
    // With a bias gradient every row of the owner must put a column into the same vector, and odd
    // rows are partial throughout.
    const auto grid = Grid::aligned_to(Biases::kPresent ? 0 : first_element, columns);
    const bool is_contiguous = !Biases::kPresent && params.is_contiguous;
    using Reader = RowReader<T, kElements, true, Biases::kPresent ? kElements : 1>;
    const Reader gradients(params.gradient, is_contiguous, first_element, index, grid, bounds,
                           columns);
    const Reader probabilities(params.probabilities, is_contiguous, first_element, index, grid,
                               bounds, columns);
    Extent extent = extent_of<kIsPair>(grid, bounds);
    if (Biases::kPresent) extent.first_column = 0;
    const int begin = extent.first_column, end = extent.end;
    // Where the first of each group of vectors begins.
    const int first = begin + owner.first_thread() * kElements;
    const int column = begin + owner.thread() * kElements;
    Pack<T> g[kVectors], p[kVectors];
    if constexpr (Inputs::kMakes) {  // what is not loaded is small
#pragma unroll
      for (auto& pack : p) pack = {};
    }
    gradients.template load<kStride>(column, g);
    probabilities.template load<kStride>(column, p);
    const auto fill_rest = [&](auto&& fill) {
      fill_outside(params.scores_gradient, params.scores_gradient_type, row, columns, begin,
                   begin + kTileColumns, fill);
    };
    if (kIsWindowed && is_row) {
      fill_rest([&](char* from, char* to) {
        zeros.fill(from, to, owner.thread(), kShape.threads_per_row);
      });
    }
    float mine = 0.f;
    if constexpr (Inputs::kMakes) {
      const Inputs inputs(params, index, bounds, grid);
      mine = inputs.template make<kShape.threads_per_row, kIsPair, !Biases::kPresent>(extent, g, p);
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (first + i * kStride >= end) continue;
        if (!extent.inside.contains(first + i * kStride, kGroup))
          clear_outside(p[i], column + i * kStride, bounds);
        mine += dot(g[i], p[i]);
      }
    }
    const float factor = Inputs::factor(params);
    const float scale = Inputs::template scale<!Biases::kPresent>(params);
    const float d = finish_dot(params, row, index.head, owner.sum(mine) * factor,
                               owner.thread() == 0 && is_row);
    if (!is_row) continue;
    // Except in windowed rows, zeros leave with the gradients beside them, so that memory gets
    // whole lines at a time.
    with_result_dtype<T>(params.scores_gradient_type, [&](auto tag) {
      const RowWriter<decltype(tag), kElements> writer(
          params.scores_gradient, first_element, columns,
          !Biases::kPresent || columns % kElements == 0);
      const auto write = [&](auto is_finite) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const int group = first + i * kStride, at = column + i * kStride;
          Pack<decltype(tag), kElements> pack = {};
          if (group < end) {
            float dz[kElements], dx[kElements];
            logits_gradient(g[i], p[i], factor, d, is_finite, dz);
#pragma unroll
            for (int j = 0; j < kElements; ++j) dx[j] = dz[j] * scale;
            pack = writer.round(dx);
            if (at < bounds.end) biases.add(i, at, dz);
          }
          writer.store(writer.whole_vectors && writer.columns.contains(group, kGroup), at, pack);
        }
      };
      if (isfinite(d)) {
        write(std::true_type{});
      } else {
        write(std::false_type{});
      }
    });
    if constexpr (!kIsWindowed) {
      fill_rest([&](char* from, char* to) {
        fill_zero(from, to, owner.thread(), kShape.threads_per_row);
      });
    }
  }
  if constexpr (kIsWindowed) ZeroBlock::finish();
  if (is_owner) biases.finish(owner.thread());
}

template <class Inputs, template <KernelShape, int> class BiasGradientOf, int kKernel>
__device__ __forceinline__ void backward_in_segments(const BackwardParams& params,
                                                     const Schedule& schedule) {
  using T = typename Inputs::Element;
  constexpr KernelShape kShape = kBackwardKernel<kKernel>;
  constexpr int kElements = kPackElements<T>, kVectors = kShape.vectors_per_thread;
  constexpr int kStride = 32 * kElements, kTileColumns = kVectors * kStride;  // in columns
  constexpr bool kIsPersistent = kShape.is_persistent;
  constexpr bool kRereads = kShape.storage == Storage::kReread;
  using Biases = BiasGradientOf<kShape, kElements>;
  using Owner = RowOwner<kShape>;
  using Row = RowPlace<kElements, typename Inputs::Entries::template Grid<kElements>>;
  using Reader = RowReader<T, kElements, true, Biases::kPresent ? kElements : 1>;
  static_assert(!Biases::kPresent || !kIsPersistent);
  constexpr int kSlots = kRingBytes / static_cast<int>(2 * sizeof(Pack<T>)) / kWarpTileVectors;
  extern __shared__ __align__(16) char shared_memory[];

  constexpr int kPacks = 2 * kWarpTileVectors;  // of a tile
  Owner owner(schedule, shared_memory + schedule.kept_warp_tiles * kPacks * sizeof(Pack<T>));
  const int columns = static_cast<int>(params.shape.columns);
  // The block's part of a row, and how to read it.
  struct Place {
    Row row;
    SegmentPart part;
  };
  struct Taken : Place {
    Reader gradients, probabilities;
  };
  const auto place_of = [&](const RowIndex& index) {
    const Row row(params.shape, index, Bounds::of<true>(params, index), Biases::kPresent);
    return Place{row, owner.part_of(row.visible, row.grid)};
  };
  const auto take = [&](const Place& place) {
    const auto reader_of = [&](const Strided& tensor) {
      return Reader(tensor, !Biases::kPresent && params.is_contiguous, place.row.first_element,
                    place.row.index, place.row.grid, place.part.bounds, columns);
    };
    return Taken{place, reader_of(params.gradient), reader_of(params.probabilities)};
  };
  // The gradient of each warp tile, then its probabilities.
  Pack<T>* const shared_packs =
      keep_shared_address(reinterpret_cast<Pack<T>*>(shared_memory) + owner.lane());
  const auto kept = [&](int place) { return shared_packs + place * kPacks; };
  // The columns of the warp's first vector and of this lane's.
  const auto first_of = [&](const Taken& of, int tile) {
    return of.row.first_column + owner.first_vector(of.part, tile) * kElements;
  };
  const auto column_of = [&](int first) { return first + owner.lane() * kElements; };
  const auto are_inside = [&](const Taken& of, int first) {
    return of.gradients.inside.contains(first, kTileColumns) &&
           of.probabilities.inside.contains(first, kTileColumns);
  };
  const auto start_copies = [&](const Taken& of, int tile, int place) {
    const int first = first_of(of, tile), column = column_of(first);
    const bool inside = are_inside(of, first);
    of.gradients.template start_copies<kStride, kVectors>(inside, column, kept(place), 32);
    of.probabilities.template start_copies<kStride, kVectors>(inside, column,
                                                              kept(place) + kWarpTileVectors, 32);
  };
  // Returns the sum of their products.
  const auto make_inputs = [&](const Taken& of, const Inputs& inputs, int first, Pack<T>* packs) {
    float sum = 0.f;
    if constexpr (Inputs::kMakes && !Inputs::kMayDrop && kRereads) {
#pragma unroll 1  // their kernels make them in two places
      for (int i = 0; i < kVectors; ++i) {
        const int at = first + i * kStride;
        Pack<T> g[1] = {packs[i * 32]}, p[1] = {packs[kWarpTileVectors + i * 32]};
        sum += inputs.template make<32, false, true>({at, of.part.bounds.end, {}}, g, p);
        packs[i * 32] = g[0];
        packs[kWarpTileVectors + i * 32] = p[0];
      }
    } else if constexpr (Inputs::kMakes) {
      Pack<T> g[kVectors], p[kVectors];
      load_kept(packs, g);
      load_kept(packs + kWarpTileVectors, p);
      sum =
          inputs.template make<32, false, !Biases::kPresent>({first, of.part.bounds.end, {}}, g, p);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        packs[i * 32] = g[i];
        packs[kWarpTileVectors + i * 32] = p[i];
      }
    }
    return sum;
  };
  const auto inputs_of = [&](const Taken& of) {
    return Inputs(params, of.row.index, of.part.bounds, of.row.grid);
  };
  const auto sum_tile = [&](const Taken& of, const Inputs& inputs, int tile, int place,
                            float& before) {
    const int first = first_of(of, tile);
    Pack<T>* const packs = kept(place);
    if constexpr (Inputs::kMakes) {
      const float sum = make_inputs(of, inputs, first, packs);
      before = warp_sum<32>(before);
      return MaxAndSum{0.f, sum};
    }
    if (!are_inside(of, first)) {
#pragma unroll 1
      for (int i = 0; i < kVectors; ++i) {
        Pack<T> p = packs[kWarpTileVectors + i * 32];
        clear_outside(p, column_of(first) + i * kStride, of.part.bounds);
        packs[kWarpTileVectors + i * 32] = p;
      }
    }
    // Whole packs: dot alone would load elements, and only where it needs them.
    Pack<T> g[kVectors], p[kVectors];
    load_kept(packs, g);
    load_kept(packs + kWarpTileVectors, p);
    before = warp_sum<32>(before);
    MaxAndSum result{0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) result.sum += dot(g[i], p[i]);
    return result;
  };
  const auto add = [](MaxAndSum& sums, const MaxAndSum& of_tile) { sums.sum += of_tile.sum; };
  const auto fill_rest = [&](const Taken& of) {
    const Row& row = of.row;
    fill_outside(params.scores_gradient, params.scores_gradient_type, row.row, columns,
                 row.first_column, row.grid.end(row.visible), owner.thread(), owner.threads());
  };

  int number = owner.owner();
  const RowIndex owner_index =
      kIsPersistent ? row_at(schedule, number) : row_of_block<kShape>(schedule);
  if (owner_index.query >= static_cast<int>(params.bias_shape.queries)) return;
  Biases biases(params, owner_index.row(params.bias_shape));
  // Writes a row from its sum, which `write_all` does tile by tile.
  const auto write_row = [&](const Taken& of, const Inputs& inputs, float sum, auto&& write_all) {
    const float factor = Inputs::factor(params);
    const float scale = Inputs::template scale<!Biases::kPresent>(params);
    const float d =
        finish_dot(params, of.row.row, of.row.index.head, sum * factor, owner.is_first_thread());
    with_result_dtype<T>(params.scores_gradient_type, [&](auto tag) {
      const RowWriter<decltype(tag), kElements> writer(
          params.scores_gradient, of.row.first_element, columns,
          !Biases::kPresent || columns % kElements == 0);
      const bool is_plain = writer.whole_vectors && isfinite(d);
      const auto scores_gradient = [&](Pack<T> g, const Pack<T>& p, bool is_finite,
                                       float (&dz)[kElements], float (&dx)[kElements]) {
        g.clear_where_zero(p);
        logits_gradient(g, p, factor, d, is_finite, dz);
#pragma unroll
        for (int j = 0; j < kElements; ++j) dx[j] = dz[j] * scale;
      };
      const auto write_tile = [&](int tile, int place, bool is_new) {
        const int first = first_of(of, tile), column = column_of(first);
        Pack<T>* const packs = kept(place);
        if (is_new) make_inputs(of, inputs, first, packs);
        float dz[kElements], dx[kElements];
        Pack<T> g[kVectors], p[kVectors];
        load_kept(packs, g);
        load_kept(packs + kWarpTileVectors, p);
        keep_loads_together();
        if (is_plain && are_inside(of, first)) {
          auto* const target = keep_in_register(writer.row + column);
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            scores_gradient(g[i], p[i], true, dz, dx);
            writer.store_whole(target + i * kStride, dx);
            biases.add(i, column + i * kStride, dz);
          }
        } else {
#pragma unroll 1
          for (int i = 0; i < kVectors; ++i) {
            const int at = column + i * kStride;
            if (at >= of.part.bounds.end) break;
            Pack<T> visible = packs[kWarpTileVectors + i * 32];
            if (is_new) clear_outside(visible, at, of.part.bounds);
            scores_gradient(packs[i * 32], visible, false, dz, dx);
            writer.store(at, dx);
            biases.add(i, at, dz);
          }
        }
      };
      write_all(write_tile);
    });
  };

  if constexpr (kRereads && kIsPersistent) {
    owner.for_each_row([&](int number) { return take(place_of(row_at(schedule, number))); },
                       start_copies,
                       [&](const Taken& of, int tile, int place, float& before) {
                         return sum_tile(of, inputs_of(of), tile, place, before);
                       },
                       add,
                       [&](const Taken& of, auto&& pass) {
                         fill_rest(of);
                         write_row(of, inputs_of(of), owner.sum(of.part), pass);
                       });
  } else {
    const RowsOfOwner<Biases::kPresent> rows(params, owner_index);
    biases.begin(owner.thread());
    if (!rows.has(params, 0)) return;
    // Segments from..to of a row, which come to places of their own.
    const auto start_segments = [&](const Place& at, int from, int to, auto&& place) {
      const Taken of = take(at);
#pragma unroll 1
      for (int segment = from; segment <= to; segment += Owner::kWarps) {
        start_copies(of, segment, place(segment));
        end_copies();
      }
    };
    Place at = place_of(rows.at(params, 0));
    if constexpr (!kRereads)
      start_segments(at, owner.first_segment(), owner.last_segment(at.part),
                     [&](int segment) { return owner.place_of(segment); });
    for (int iteration = 0;; ++iteration) {
      const Taken now = take(at);
      const SegmentPart& part = now.part;
      fill_rest(now);
      owner.start(iteration);
      const Inputs inputs = inputs_of(now);
      const auto sum = [&](int tile, int place, float& before) {
        return sum_tile(now, inputs, tile, place, before);
      };
      const auto start = [&](int tile, int place) { start_copies(now, tile, place); };
      // The next row comes in where there is room already, and later where this row leaves.
      number += schedule.owners;
      const bool has_next =
          kIsPersistent ? number < schedule.rows : rows.has(params, iteration + 1);
      const Place next = place_of(!has_next       ? now.row.index
                                  : kIsPersistent ? row_at(schedule, number)
                                                  : rows.at(params, iteration + 1));
      constexpr bool kHasNext = !kRereads && (kIsPersistent || Biases::kPresent);
      const int next_last = has_next ? owner.last_segment(next.part) : -1;
      const int span_ahead = has_next ? owner.span_ahead(part, next.part) : 0;
      const auto start_next = [&](int from, int to) {
        if constexpr (kHasNext)
          start_segments(next, from, to,
                         [&](int segment) { return owner.place_of_next(part, segment); });
      };
      if constexpr (kRereads) {
        owner.template sum_ring<kSlots>(part, start, sum, add);
      } else {
        start_next(owner.first_segment(), owner.first_segment() + span_ahead - Owner::kWarps);
        owner.sum_pass(part, span_ahead / Owner::kWarps, sum);
      }
      write_row(now, inputs, owner.sum(part), [&](auto&& write_tile) {
        if constexpr (kRereads) {
          owner.template write_ring<kSlots>(part, start, write_tile);
        } else {
          owner.write_pass(part, write_tile, [&](int segment) {
            const int following = segment + span_ahead;
            if (kHasNext && following <= next_last) start_next(following, following);
          });
        }
      });
      if (!has_next) break;
      if constexpr (!kRereads && !kIsPersistent)
        start_next(max(owner.last_segment(part) + Owner::kWarps, owner.first_segment()), next_last);
      owner.go_on(part);
      at = next;
    }
    biases.finish(owner.thread());
  }
}

template <class Inputs, template <KernelShape, int> class BiasGradientOf, int kKernel>
__global__ void __launch_bounds__(
    kBackwardKernel<kKernel>.threads(),
    (blocks_with_registers(
        Inputs::blocks_per_sm(
            BiasGradientOf<kBackwardKernel<kKernel>,
                           kPackElements<typename Inputs::Element>>::blocks_per_sm()),
        kBackwardKernel<kKernel>.threads())))
    softmax_backward_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ Schedule schedule) {
  if constexpr (kBackwardKernel<kKernel>.storage == Storage::kRegisters) {
    backward_in_registers<Inputs, BiasGradientOf, kKernel>(params, schedule);
  } else {
    backward_in_segments<Inputs, BiasGradientOf, kKernel>(params, schedule);
  }
}

}  // namespace megasoftmax
