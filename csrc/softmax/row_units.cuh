#pragma once
// Blocks own a long row, one or several: its chunks form units, a warp sums a unit, and the results
// of all units reach every block of the row, which adds them up in the order of units. Several
// blocks are a cluster, and store them in each other's shared memory.
//
// A unit is one batch, several in very long rows; a batch is four chunks for each lane of a warp.
//
// A unit that waits in shared memory has a place there, that of its number in the block's part of
// the row. Blocks that take one row after the other, in the backward pass, may have more places
// than units. The places of a warp are then a ring, and some units of the next row are copied while
// this row is summed and exchanged. The others follow one by one, as this row's units are written.
//
// Rows that a block takes in turn alternate between two arrays of results. In a block one barrier
// for each row is enough then. In a cluster a barrier of all threads would wait for the
// probabilities of the row before, which are still on their way to memory, so results are counted
// where they arrive. Each warp of each block sends something for every row, if only to be counted:
// who has all results of a row knows that every warp has read those of the row before, and may
// send those of the next row to where they stood.

#include "../common/integers.h"
#include "../common/reduce.cuh"
#include "chunks.cuh"

namespace megasoftmax {

// This lane's packs of a batch, from shared memory.
template <class T, int kElements, int kChunks>
__device__ inline void load_kept(const Pack<T, kElements>* kept,
                                 Pack<T, kElements> (&packs)[kChunks]) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) packs[i] = kept[i * 32];
}

// A lane joins kUnitsAtOnce results of units at a time, and loads several such groups together. A
// group without results changes no bits.
inline constexpr int kUnitsAtOnce = 4, kUnitsOfGroup = kUnitsAtOnce * 32;
template <int kGroups, class Body>
__device__ __forceinline__ void for_each_group(const MaxAndSum* of_units, int units, Body&& body) {
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) % 32; first < units;
       first += kGroups * kUnitsOfGroup) {
    MaxAndSum results[kGroups][kUnitsAtOnce];
#pragma unroll
    for (int i = 0; i < kGroups * kUnitsAtOnce; ++i)
      results[i / kUnitsAtOnce][i % kUnitsAtOnce] =
          first + i * 32 < units ? of_units[first + i * 32] : MaxAndSum{kLowest, 0.f};
#pragma unroll
    for (const auto& group : results) body(group);
  }
}

// The sum of a few units, as warp_sum makes it of as many lanes.
__device__ inline float sum_as_lanes(const float (&sums)[kUnitsAtOnce]) {
  static_assert(kUnitsAtOnce == 4);
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// By a whole warp. A few units without shuffles.
template <int kGroups>
__device__ inline MaxAndSum merge_units(const MaxAndSum* of_units, int units, Exponent exponent) {
  if (units <= kUnitsAtOnce) {
    MaxAndSum results[kUnitsAtOnce];
    float max = kLowest, sums[kUnitsAtOnce];
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i) {
      results[i] = i < units ? of_units[i] : MaxAndSum{kLowest, 0.f};
      max = fmaxf(max, results[i].max);
    }
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i)
      sums[i] = __fmul_rn(results[i].sum, exponent(results[i].max, max));
    return {max, sum_as_lanes(sums)};
  }
  MaxAndSum mine{kLowest, 0.f};
  for_each_group<kGroups>(of_units, units, [&](const MaxAndSum(&group)[kUnitsAtOnce]) {
    float max = mine.max;
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i) max = fmaxf(max, group[i].max);
    mine.sum *= exponent(mine.max, max);
    mine.max = max;
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i) mine.sum += group[i].sum * exponent(group[i].max, max);
  });
  return warp_merge<32>(mine, exponent);
}

// The same of sums alone.
template <int kGroups>
__device__ inline float sum_units(const MaxAndSum* of_units, int units) {
  if (units <= kUnitsAtOnce) {
    float sums[kUnitsAtOnce];
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i) sums[i] = i < units ? of_units[i].sum : 0.f;
    return sum_as_lanes(sums);
  }
  float total = 0.f;
  for_each_group<kGroups>(of_units, units, [&](const MaxAndSum(&group)[kUnitsAtOnce]) {
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i) total += group[i].sum;
  });
  return warp_sum<32>(total);
}

// What a block does of a row.
struct UnitPart {
  Bounds bounds;
  int units;         // of the row
  int share;         // of a block, if there are enough
  int first, count;  // those of the block
};

// Of block `rank` of so many that share a row.
template <class Grid>
__device__ inline UnitPart part_of_block(const Schedule& schedule, int unit_batches, int blocks,
                                         int rank, const Bounds& visible, Grid grid) {
  const int columns_per_unit = unit_batches * kChunksPerBatch * Grid::kChunkElements;
  const int begin = grid.begin(visible);
  const int units = divide_up(grid.end(visible) - begin, columns_per_unit);
  if (blocks == 1) return {visible, units, units, 0, units};
  int share, rest;
  schedule.units.split(units + blocks - 1, share, rest);
  const int first = min(rank * share, units), count = min(share, units - first);
  const int part_begin = begin + first * columns_per_unit;
  const int part_end = part_begin + count * columns_per_unit;
  return {{max(visible.begin, part_begin), min(visible.end, part_end)}, units, share, first, count};
}

// How the blocks of a cluster get the results of units, which are counted where they arrive: see
// above. Rows that follow each other use two barriers in turn.
struct ClusterExchange {
  uint64_t* words;  // in shared memory: the barriers, and what nobody reads

  static constexpr int kWords = 2 + 1;

  __device__ void init() const {
    if (threadIdx.x == 0) {
      init_byte_barrier(&words[0]);
      init_byte_barrier(&words[1]);
    }
    arrive_at_cluster_relaxed();
  }
  // By a whole warp, to each of the row's blocks.
  __device__ void send(int blocks, int turn, void* at, const MaxAndSum& result) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < blocks)
      send_to_cluster(at, &words[turn % 2], lane, reinterpret_cast<const uint64_t&>(result));
  }
  // By a warp without results of the row, to be counted.
  __device__ void send_nothing(int blocks, int turn) const { send(blocks, turn, words + 2, {}); }
  // By a whole warp: until all results have come. Each of the `warps` of a block sends one at
  // least.
  __device__ void wait(int blocks, int turn, const UnitPart& part, int warps) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int units = min(part.share, max(part.units - lane * part.share, 0));
    const int all_sent = sum_of_lanes(lane < blocks ? max(units, warps) : 0);
    if (lane == 0) expect_bytes(&words[turn % 2], all_sent * kResultBytes);
    wait_for_bytes(&words[turn % 2], turn / 2 % 2);
  }
};

// kTakesTurns: blocks take one row after the other. kMayShare: several blocks may own a row.
template <int kThreads, bool kMayReread, bool kTakesTurns, bool kMayShare>
class UnitRow {
 public:
  static constexpr int kWarps = kThreads / 32;
  static constexpr bool kRereads = kMayReread;
  static_assert((kWarps & (kWarps - 1)) == 0);
  static_assert(!kRereads || !(kTakesTurns || kMayShare));

  // `results`: shared memory for those of two rows, which alternate.
  __device__ UnitRow(const Schedule& schedule, void* results)
      : schedule_(schedule), results_of_even_(static_cast<MaxAndSum*>(results)) {
    __shared__ uint64_t words[ClusterExchange::kWords];
    exchange_.words = keep_shared_address(words);
    if (kMayShare) {
      rank_ = rank_in_cluster();
      exchange_.init();
    }
  }

  __device__ int owner() const {
    return kMayShare ? cluster_of_block() : static_cast<int>(blockIdx.x);
  }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ bool is_first_thread() const { return thread() == 0; }
  // Among all threads of the row.
  __device__ int thread() const { return rank_ * kThreads + static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return blocks() * kThreads; }

  template <class Grid>
  __device__ UnitPart part_of(const Bounds& visible, Grid grid) const {
    return part_of_block(schedule_, unit_batches(), blocks(), rank_, visible, grid);
  }

  // This warp's units, counted from the block's first one, are first_unit(), then kWarps further
  // each time, up to last_unit(), which is negative where there is none.
  __device__ int first_unit() const { return warp_; }
  __device__ int last_unit(const UnitPart& part) const {
    return first_unit() + ((part.count - 1 - first_unit()) & ~(kWarps - 1));
  }
  // From the warp's first unit to behind its last one.
  __device__ int span(const UnitPart& part) const {
    return last_unit(part) + kWarps - first_unit();
  }

  // The place of a unit of this row, and of one of the next row.
  __device__ int place_of(int unit) const { return place_from(begin_, unit); }
  __device__ int place_of_next(const UnitPart& part, int unit) const {
    return place_from(begin_of_next(part), unit);
  }
  // The span of those units of the next row for which there are places beside this row's.
  __device__ int span_ahead(const UnitPart& part, const UnitPart& next) const {
    return kTakesTurns ? min(places() - span(part), span(next)) : 0;
  }
  // This row has been written: the next one takes its part.
  __device__ void go_on(const UnitPart& part) { begin_ = begin_of_next(part); }
  __device__ int unit_batches() const { return kRereads ? schedule_.unit_batches : kUnitBatches; }
  // The first chunk of one of the block's batches, counted from the row's first visible one.
  __device__ int first_chunk(const UnitPart& part, int batch) const {
    return (part.first * unit_batches() + batch) * kChunksPerBatch;
  }

  // Chunks of the row that units cover, some of them behind its end.
  __device__ int covered_chunks(const UnitPart& part) const {
    return part.units * unit_batches() * kChunksPerBatch;
  }

  // The pass that sums: sum(batch, place, before) for each of the warp's batches is the lanes' sums
  // of a batch. Batches are counted from the block's first one, as units are, and places are those
  // of batches in shared memory. Beside its own work sum() adds up `before` over the warp, the sums
  // of the unit before: a chain of shuffles is nothing to wait for. All copies have been started
  // before, and are waited for one by one; copies of `ahead` units of the next row after them.
  template <class Sum>
  __device__ void sum_pass(const UnitPart& part, int ahead, Sum&& sum) const {
    MaxAndSum sums{kLowest, 0.f};
    const auto sum_unit = [&](int unit, int place) {
      float before = sums.sum;
      const MaxAndSum of_unit = sum(unit, place, before);
      if (unit != first_unit()) put(part, unit - kWarps, {sums.max, before});
      sums = of_unit;
    };
    const int last = last_unit(part);
    if constexpr (kTakesTurns) {
#pragma unroll 1
      for (int unit = first_unit(); unit <= last; unit += kWarps) {
        wait_for_copies_before<kMostPending>((last - unit) / kWarps + ahead);
        sum_unit(unit, place_of(unit));
      }
    } else {
      // Groups of copies without any make up for units that there are not, or no more.
#pragma unroll 1
      for (int unit = last + kWarps; unit < first_unit() + kPending * kWarps; unit += kWarps)
        end_copies();
#pragma unroll 1
      for (int unit = first_unit(); unit <= last; unit += kWarps) {
        wait_for_older_copies<kPending - 1>();
        sum_unit(unit, unit);
        end_copies();
      }
    }
    if (last >= 0) put(part, last, {sums.max, warp_sum<32>(sums.sum)});
  }
  // The pass that writes: write(batch, place, is_new), then finish(batch).
  template <class Write, class Finish>
  __device__ void write_pass(const UnitPart& part, Write&& write, Finish&& finish) const {
    const int last = last_unit(part);
#pragma unroll 1
    for (int unit = first_unit(); unit <= last; unit += kWarps) {
      write(unit, place_of(unit), false);
      finish(unit);
    }
  }

  // The same of rows that are read twice: their batches come through a ring of kSlots places, where
  // start(batch, place) begins to copy one. add(sums, of_batch) joins those of a unit.
  template <int kSlots, class Start, class Sum, class Add>
  __device__ void sum_ring(const UnitPart& part, Start&& start, Sum&& sum, Add&& add) const {
    MaxAndSum sums{kLowest, 0.f};
    for (int position = 0; position < kSlots; ++position)
      start_position<kSlots>(part, position, start);
    for (int position = 0; position < positions(part); ++position) {
      wait_for_older_copies<kSlots - 1>();
      float before = sums.sum;
      const MaxAndSum of_batch = sum(batch_at(position), place_in_ring<kSlots>(position), before);
      if (position % unit_batches() != 0) {
        add(sums, of_batch);
      } else {
        if (position != 0) put(part, unit_at(position) - kWarps, {sums.max, before});
        sums = of_batch;
      }
      start_position<kSlots>(part, position + kSlots, start);
    }
    const int last = last_unit(part);
    if (last >= 0) put(part, last, {sums.max, warp_sum<32>(sums.sum)});
  }
  // From the row's end, which is still in the ring as the sum left it. What is new to write() comes
  // as it was copied.
  template <int kSlots, class Start, class Write>
  __device__ void write_ring(const UnitPart& part, Start&& start, Write&& write) const {
    const int last = positions(part) - 1;
    for (int position = last; position >= 0; --position) {
      wait_for_older_copies<kSlots - 1>();
      write(batch_at(position), place_in_ring<kSlots>(position), position + kSlots <= last);
      start_position<kSlots>(part, position - kSlots, start);
    }
  }

  // Of a row that the block takes.
  __device__ void start(int turn) {
    // Until its other blocks have started.
    if (kMayShare && turn == 0) wait_for_cluster();
    turn_ = turn;
    results_ = results_of_even_ + (turn % 2 != 0 ? schedule_.max_units : 0);
  }
  // By a whole warp, for each of its units.
  __device__ void put(const UnitPart& part, int unit, MaxAndSum result) const {
    MaxAndSum* const at = results_ + part.first + unit;
    if (kMayShare) {
      exchange_.send(blocks(), turn_, at, result);
    } else if (lane() == 0) {
      *at = result;
    }
  }
  __device__ MaxAndSum merge(const UnitPart& part, Exponent exponent) const {
    share_results(part);
    return merge_units<1>(results_, part.units, exponent);
  }
  __device__ float sum(const UnitPart& part) const {
    share_results(part);
    return sum_units<1>(results_, part.units);
  }

 private:
  // The warp's batches in order.
  __device__ int positions(const UnitPart& part) const {
    return max(last_unit(part) - first_unit() + kWarps, 0) / kWarps * unit_batches();
  }
  __device__ int unit_at(int position) const {
    return first_unit() + position / unit_batches() * kWarps;
  }
  __device__ int batch_at(int position) const {
    return unit_at(position) * unit_batches() + position % unit_batches();
  }
  template <int kSlots>
  __device__ int place_in_ring(int position) const {
    return position % kSlots * kWarps + first_unit();
  }
  template <int kSlots, class Start>
  __device__ void start_position(const UnitPart& part, int position, Start&& start) const {
    if (position >= 0 && position < positions(part))
      start(batch_at(position), place_in_ring<kSlots>(position));
    end_copies();
  }

  // The span of this warp's places, which have the numbers of units. In a ring the first one
  // follows the last one.
  __device__ int places() const {
    return (schedule_.kept_batches - 1 - first_unit() + kWarps) & ~(kWarps - 1);
  }
  __device__ int in_ring(int place) const { return place < places() ? place : place - places(); }
  // Of a row that begins so far into the ring.
  __device__ int place_from(int begin, int unit) const {
    return kTakesTurns ? in_ring(begin + unit - first_unit()) + first_unit() : unit;
  }
  __device__ int begin_of_next(const UnitPart& part) const {
    return kTakesTurns ? in_ring(begin_ + span(part)) : 0;
  }

  static constexpr int kPending = 4;      // units whose copies are waited for apart
  static constexpr int kMostPending = 6;  // where blocks take turns

  // Of the row.
  __device__ int blocks() const { return kMayShare ? schedule_.blocks_per_row : 1; }

  __device__ void share_results(const UnitPart& part) const {
    if constexpr (kMayShare) {
      if (last_unit(part) < 0) exchange_.send_nothing(blocks(), turn_);
      if (threadIdx.x < 32) exchange_.wait(blocks(), turn_, part, kWarps);
    }
    __syncthreads();
  }

  const Schedule& schedule_;
  MaxAndSum* const results_of_even_;
  MaxAndSum* results_ = nullptr;
  ClusterExchange exchange_;
  int rank_ = 0, turn_ = 0;
  int begin_ = 0;  // how far into the ring the row begins
  // Of a shuffle the compiler knows that it is the same for the whole warp: loops over units and
  // tests of them then need no care of lanes that part (64 registers of a thread instead of 78).
  const int warp_ =
      kWarps == 1 ? 0 : __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
};

}  // namespace megasoftmax
