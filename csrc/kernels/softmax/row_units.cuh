#pragma once
// Blocks own a long row, one or several: its chunks form units, a warp sums a unit, and the results
// of all units reach every block of the row, which adds them up in the order of units. Blocks of a
// cluster store them in each other's shared memory; where the blocks of a row are spread over the
// whole GPU, in global memory.
//
// A unit is two batches, more in very long rows; a batch is two chunks for each lane of a warp.

#include <cooperative_groups.h>

#include "../common/integers.h"
#include "../common/reduce.cuh"
#include "chunks.cuh"

namespace megasoftmax {

// What a block does of a row.
struct UnitPart {
  Bounds bounds;
  int units;         // of the row
  int first, count;  // those of the block
};

template <int kThreads, bool kMayReread>
class UnitRow {
 public:
  static constexpr int kWarps = kThreads / 32;
  static constexpr bool kRereads = kMayReread;
  static_assert((kWarps & (kWarps - 1)) == 0);

  __device__ explicit UnitRow(const Schedule& schedule) : schedule_(schedule) {
    if (schedule.blocks_per_row > 1) rank_ = static_cast<int>(blockIdx.x) % schedule.blocks_per_row;
    if (schedule.is_cluster) arrive_at_cluster();
  }

  __device__ int64_t owner_of_block() const {
    return schedule_.blocks_per_row > 1 ? blockIdx.x / schedule_.blocks_per_row : blockIdx.x;
  }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ bool is_first_thread() const { return thread() == 0; }
  // Among all threads of the row.
  __device__ int thread() const { return rank_ * kThreads + static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return schedule_.blocks_per_row * kThreads; }

  template <int kElements>
  __device__ UnitPart part_of(const Bounds& visible, ChunkGrid<kElements> grid) const {
    const int columns_per_unit = unit_batches() * kChunksPerBatch * kElements;
    const int begin = grid.begin(visible);
    const int units = divide_up(grid.end(visible) - begin, columns_per_unit);
    if (schedule_.blocks_per_row == 1) return {visible, units, 0, units};
    const int share = divide_up(units, schedule_.blocks_per_row);
    const int first = min(rank_ * share, units), count = min(share, units - first);
    const int part_begin = begin + first * columns_per_unit;
    const int part_end = part_begin + count * columns_per_unit;
    return {{max(visible.begin, part_begin), min(visible.end, part_end)}, units, first, count};
  }

  // This warp's units, counted from the block's first one, are first_unit(), then kWarps further
  // each time, up to last_unit(), which is negative where there is none.
  __device__ int first_unit() const { return static_cast<int>(threadIdx.x) / 32; }
  __device__ int last_unit(const UnitPart& part) const {
    return first_unit() + ((part.count - 1 - first_unit()) & ~(kWarps - 1));
  }
  __device__ int unit_batches() const { return kRereads ? schedule_.unit_batches : kUnitBatches; }
  // Of this lane, counted from the row's first visible chunk.
  __device__ int chunk(const UnitPart& part, int unit, int batch) const {
    return ((part.first + unit) * unit_batches() + batch) * kChunksPerBatch + lane();
  }

  template <class Body>
  __device__ void for_units(const UnitPart& part, int from, Body&& body) const {
    for (int unit = from; unit <= last_unit(part); unit += kWarps) body(unit);
  }
  // The place of a batch in shared memory.
  __device__ int place(int unit, int batch) const { return unit * kUnitBatches + batch; }

  // The pass that sums: sum(unit, batch, place) for each of the warp's batches, finish(unit) behind
  // a unit. Batches of rows that are read twice come through a ring of kSlots places, where
  // start(unit, batch, place) begins to copy them; the others have been started before.
  template <int kSlots, class Start, class Sum, class Finish>
  __device__ void sum_pass(const UnitPart& part, Start&& start, Sum&& sum, Finish&& finish) const {
    if constexpr (kRereads) {
      for (int position = 0; position < kSlots; ++position)
        start_position<kSlots>(part, position, start);
      for (int position = 0; position < positions(part); ++position) {
        const int unit = unit_of(position), batch = batch_of(position);
        wait_for_older_copies<kSlots - 1>();
        sum(unit, batch, place_in_ring<kSlots>(position));
        start_position<kSlots>(part, position + kSlots, start);
        if (batch + 1 == unit_batches()) finish(unit);
      }
    } else {
      wait_for_copies();
      for_units(part, first_unit(), [&](int unit) {
#pragma unroll 1
        for (int batch = 0; batch < kUnitBatches; ++batch) sum(unit, batch, place(unit, batch));
        finish(unit);
      });
    }
  }
  // The pass that writes, likewise; rows that are read twice from their end, which is still in the
  // ring.
  template <int kSlots, class Start, class Write, class Finish>
  __device__ void write_pass(const UnitPart& part, Start&& start, Write&& write,
                             Finish&& finish) const {
    if constexpr (kRereads) {
      for (int position = positions(part) - 1; position >= 0; --position) {
        wait_for_older_copies<kSlots - 1>();
        write(unit_of(position), batch_of(position), place_in_ring<kSlots>(position));
        start_position<kSlots>(part, position - kSlots, start);
      }
    } else {
      for_units(part, first_unit(), [&](int unit) {
#pragma unroll 1
        for (int batch = 0; batch < kUnitBatches; ++batch) write(unit, batch, place(unit, batch));
        finish(unit);
      });
    }
  }

  // The packs of that place, kPacks for each chunk: this lane's first one, the next is 32 further.
  template <class Pack, int kPacks = 1>
  __device__ Pack* kept(char* shared_memory, int place) const {
    return reinterpret_cast<Pack*>(shared_memory) + place * (kChunksPerBatch * kPacks) + lane();
  }

  // Where the results go: behind the kept packs. Rows that a block takes in turn alternate between
  // two arrays, so that one barrier for each row is enough.
  template <class Pack, int kPacks = 1>
  __device__ void start(char* shared_memory, int64_t row, int64_t turn) {
    // Until its other blocks have started.
    if (schedule_.is_cluster && turn == 0) wait_for_cluster();
    if (schedule_.blocks_per_row > 1 && !schedule_.is_cluster) {
      results_ = static_cast<MaxAndSum*>(schedule_.results) + row * schedule_.max_units;
    } else {
      auto* const end = reinterpret_cast<Pack*>(shared_memory) +
                        schedule_.kept_batches * (kChunksPerBatch * kPacks);
      results_ = reinterpret_cast<MaxAndSum*>(end) + (turn % 2 != 0 ? schedule_.max_units : 0);
    }
  }
  // By a whole warp, for each of its units.
  __device__ void put(const UnitPart& part, int unit, MaxAndSum result) {
    MaxAndSum* const at = results_ + part.first + unit;
    if (schedule_.is_cluster) {
      if (lane() < schedule_.blocks_per_row) {
        store_to_cluster(at, lane(), reinterpret_cast<const uint64_t&>(result));
      }
    } else if (lane() == 0) {
      *at = result;
    }
  }
  __device__ MaxAndSum merge(const UnitPart& part, Exponent exponent) {
    share_results();
    MaxAndSum total{kLowest, 0.f};
#pragma unroll 4
    for (int i = lane(); i < part.units; i += 32) total.max = fmaxf(total.max, results_[i].max);
    total.max = warp_max<32>(total.max);
#pragma unroll 4
    for (int i = lane(); i < part.units; i += 32)
      total.sum += results_[i].sum * exponent(results_[i].max, total.max);
    total.sum = warp_sum<32>(total.sum);
    return total;
  }
  __device__ float sum(const UnitPart& part) {
    share_results();
    float total = 0.f;
#pragma unroll 4
    for (int i = lane(); i < part.units; i += 32) total += results_[i].sum;
    return warp_sum<32>(total);
  }

 private:
  // The warp's batches in order.
  __device__ int positions(const UnitPart& part) const {
    return max(last_unit(part) - first_unit() + kWarps, 0) / kWarps * unit_batches();
  }
  __device__ int unit_of(int position) const {
    return first_unit() + position / unit_batches() * kWarps;
  }
  __device__ int batch_of(int position) const { return position % unit_batches(); }
  template <int kSlots>
  __device__ int place_in_ring(int position) const {
    return position % kSlots * kWarps + first_unit();
  }
  template <int kSlots, class Start>
  __device__ void start_position(const UnitPart& part, int position, Start&& start) const {
    if (position >= 0 && position < positions(part))
      start(unit_of(position), batch_of(position), place_in_ring<kSlots>(position));
    end_copies();
  }

  __device__ void share_results() {
    if (schedule_.is_cluster) {
      arrive_at_cluster();
      wait_for_cluster();
    } else if (schedule_.blocks_per_row > 1) {
      cooperative_groups::this_grid().sync();
    } else {
      __syncthreads();
    }
  }

  const Schedule& schedule_;
  MaxAndSum* results_ = nullptr;
  int rank_ = 0;
};

}  // namespace megasoftmax
