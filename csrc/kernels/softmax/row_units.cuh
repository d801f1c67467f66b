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

  // The place of a batch in shared memory: of its own, or in a ring of the warp's.
  __device__ int place(int unit, int batch) const { return unit * kUnitBatches + batch; }
  template <int kSlots>
  __device__ int place_in_ring(int position) const {
    return position % kSlots * kWarps + first_unit();
  }
  // The warp's batches in order, of a row that does not fit shared memory.
  __device__ int positions(const UnitPart& part) const {
    return max(last_unit(part) - first_unit() + kWarps, 0) / kWarps * schedule_.unit_batches;
  }
  __device__ int unit_of(int position) const {
    return first_unit() + position / schedule_.unit_batches * kWarps;
  }
  __device__ int batch_of(int position) const { return position % schedule_.unit_batches; }

  // The packs of that place, kPacks for each chunk: this lane's first one, the next is 32 further.
  template <class Pack, int kPacks = 1>
  __device__ Pack* kept(char* shared_memory, int place) const {
    return reinterpret_cast<Pack*>(shared_memory) + place * (kChunksPerBatch * kPacks) + lane();
  }

  // Where the results go: behind the kept packs. Rows that a block takes in turn alternate between
  // two arrays, so that one barrier for each row is enough.
  template <class Pack, int kPacks = 1>
  __device__ void start(char* shared_memory, int64_t row, bool is_later_turn, bool is_odd_turn) {
    // Until its other blocks have started.
    if (schedule_.is_cluster && !is_later_turn) wait_for_cluster();
    if (schedule_.blocks_per_row > 1 && !schedule_.is_cluster) {
      results_ = static_cast<MaxAndSum*>(schedule_.results) + row * schedule_.max_units;
    } else {
      auto* const end = reinterpret_cast<Pack*>(shared_memory) +
                        schedule_.kept_batches * (kChunksPerBatch * kPacks);
      results_ = reinterpret_cast<MaxAndSum*>(end) + (is_odd_turn ? schedule_.max_units : 0);
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
