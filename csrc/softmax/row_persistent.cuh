#pragma once
// Very long rows of persistent blocks: several blocks own a row together, as a cluster or as a part
// of the whole GPU, and take one row after the other.
//
// Segments are those of row_segments.cuh, and each warp has consecutive ones. Their warp tiles come
// through a ring of places in shared memory. The last ones stay there until they are written, from
// the end of the row on, and the others are read again. A place that has been written takes a warp
// tile of the next row, so these have places in the opposite order. While a row is written, the
// next one is summed as far as it has arrived. So memory, arithmetic and shared memory are all
// busy.
//
// The results of segments alternate between two arrays: when all blocks have the results of a row,
// they have read those of the row before.

#include <type_traits>

#include "../common/grid.cuh"
#include "row_segments.cuh"

namespace megasoftmax {

template <int kThreads>
class PersistentRow {
 public:
  static constexpr int kWarps = kThreads / 32;

  // `results`: shared memory for those of a cluster, [2, max_segments].
  __device__ PersistentRow(const Schedule& schedule, void* results)
      : schedule_(schedule),
        warp_tiles_per_segment_(schedule.warp_tiles_per_segment),
        ring_(schedule.kept_warp_tiles / kWarps) {
    __shared__ uint64_t words[ClusterExchange::kWords], of_groups[kMaxSegments / kSegmentsOfGroup];
    exchange_.words = keep_shared_address(words);
    of_groups_ = reinterpret_cast<MaxAndSum*>(of_groups);
    if (schedule.is_cluster) {
      rank_ = rank_in_cluster();
      owner_ = cluster_of_block();
      results_ = static_cast<MaxAndSum*>(results);
      next_results_ = results_ + schedule.max_segments;
      exchange_.init();
    } else {
      owner_ = static_cast<int>(blockIdx.x) / blocks();
      rank_ = static_cast<int>(blockIdx.x) - owner_ * blocks();
      results_ = static_cast<MaxAndSum*>(schedule.workspace) + owner_ * schedule.max_segments;
      next_results_ = results_ + schedule.owners * schedule.max_segments;
    }
  }

  __device__ int owner() const { return owner_; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ bool is_first_thread() const { return thread() == 0; }
  // Among all threads of the row.
  __device__ int thread() const { return rank_ * kThreads + static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return blocks() * kThreads; }

  template <class Grid>
  __device__ SegmentPart part_of(const Bounds& visible, Grid grid) const {
    return part_of_block(schedule_, warp_tiles_per_segment_, blocks(), rank_, visible, grid);
  }
  // The first vector of a tile, counted from the row's first visible one.
  __device__ int first_vector(const SegmentPart& part, int tile) const {
    return (part.first * warp_tiles_per_segment_ + tile) * kWarpTileVectors;
  }
  // Vectors of the row that segments cover, some of them behind its end.
  __device__ int covered_vectors(const SegmentPart& part) const {
    return part.segments * warp_tiles_per_segment_ * kWarpTileVectors;
  }

  // Takes the block's rows in turn.
  //
  // take(number): a row, with a member `part`.
  // copy(row, tile, place): starts to copy a tile.
  // sum(row, tile, place, before): the lanes' sums of a tile. Beside its own work it adds up
  // those of the segment `before` over the warp. add(sums, of_tile): joins the warp tiles of a
  // segment. write_row(row, pass): calls pass(write), which calls write(tile, place, is_new) for
  // each tile of the row. One that was copied again is new: it comes as it was copied.
  template <class Take, class Copy, class Sum, class Add, class WriteRow>
  __device__ __forceinline__ void for_each_row(Take&& take, Copy&& copy, Sum&& sum, Add&& add,
                                               WriteRow&& write_row) {
    int number = owner_;
    bool has_next = true;
    auto now = take(number), next = now;
    Share of_now, of_next = share_of(next.part);
    const auto start_ahead = [&] {
#pragma unroll 1
      for (int i = 0; i < min(ring_ - of_now.count, of_next.count); ++i) {
        copy(next, of_next.first + i, place_of_next(i));
        end_copies();
      }
    };
    const auto pass_with = [&](auto&& write) {
      pass(
          of_now, of_next, write, [&](int tile, int place) { copy(now, tile, place); },
          [&](int tile, int place) { copy(next, tile, place); },
          [&](int tile, int place, float& before) { return sum(next, tile, place, before); }, add);
    };
    start_ahead();
    begin();
    pass_with([](int, int, bool) {});
    while (has_next) {
      now = next;
      of_now = of_next;
      go_on();
      number += schedule_.owners;
      has_next = number < schedule_.rows;
      if (has_next) next = take(number);
      of_next = has_next ? share_of(next.part) : Share{};
      start_ahead();
      write_row(now, pass_with);
    }
  }

  // The maximum and sum of the row at hand.
  __device__ MaxAndSum merge(const SegmentPart& part, Exponent exponent) const {
    return join(part, [&](auto at_once, const MaxAndSum* results, int segments) {
      return merge_segments<at_once>(results, segments, exponent);
    });
  }
  __device__ float sum(const SegmentPart& part) const {
    const auto add = [](auto at_once, const MaxAndSum* results, int segments) {
      return MaxAndSum{0.f, sum_segments<at_once>(results, segments)};
    };
    return join(part, add).sum;
  }

 private:
  static constexpr int kMostPending = 6;  // copies of warp tiles that are told apart

  __device__ int blocks() const { return schedule_.blocks_per_row; }

  // What a warp has of a row: warp tiles, counted from the block's first one, and segments of the
  // row.
  struct Share {
    int first = 0, count = 0;
    int segment = 0;
  };
  __device__ Share share_of(const SegmentPart& part) const {
    const int each = part.count / kWarps, more = part.count % kWarps;
    const int segment = warp_ * each + min(warp_, more);
    return {segment * warp_tiles_per_segment_,
            (each + (warp_ < more ? 1 : 0)) * warp_tiles_per_segment_, part.first + segment};
  }

  // Before the first row.
  __device__ void begin() const {
    if (schedule_.is_cluster) {
      wait_for_cluster();
    } else if (is_first_thread()) {
      *arrivals() = 0;
    }
  }

  // Writes the row at hand and sums the next one. restart(tile, place) copies a warp tile of the
  // row at hand again, start(tile, place) one of the next row.
  template <class Write, class Restart, class Start, class Sum, class Add>
  __device__ __forceinline__ void pass(const Share& now, const Share& next, Write&& write,
                                       Restart&& restart, Start&& start, Sum&& sum,
                                       Add&& add) const {
    // Each step ends a group of copies. Batch i < ring_ of the next row is in the group of step
    // i - lead; groups before step 0 are those that were started ahead.
    const int room = ring_ - now.count, lead = min(room, next.count);
    const int in_flight = ring_ > 3 ? 2 : 1;  // warp tiles of the next row that are on their way
    int left = now.count, position = now.count > 0 ? (now.count - 1) % ring_ : 0;
    int started = max(lead, 0), summed = 0, place_of_sum = 0;
    int segment = next.segment, of_segment = 0;
    MaxAndSum sums{kLowest, 0.f};
#pragma unroll 1
    for (int step = 0; left > 0 || summed < next.count; ++step) {
      if (left > 0) {
        const int tile = --left, place = place_of(position);
        const bool is_new = tile < -room;
        if (is_new) wait_for_copies_before<kMostPending>(ring_ - 1);
        write(now.first + tile, place, is_new);
        if (tile >= ring_) {
          restart(now.first + tile - ring_, place);
        } else if (started < next.count) {
          start(next.first + started++, place);
        }
        position = position == 0 ? ring_ - 1 : position - 1;
      }
      if (summed < next.count && (left == 0 || started - summed > in_flight)) {
        wait_for_copies_before<kMostPending>(summed < ring_ ? step - 1 - summed + lead : ring_ - 1);
        const int place = place_of_next(place_of_sum);
        float before = sums.sum;
        const MaxAndSum of_tile = sum(next.first + summed, place, before);
        if (of_segment > 0) {
          add(sums, of_tile);
        } else {
          if (summed > 0) put(segment++, {sums.max, before});
          sums = of_tile;
        }
        if (++of_segment == warp_tiles_per_segment_) of_segment = 0;
        if (summed + ring_ < next.count) start(next.first + summed + ring_, place);
        if (++place_of_sum == ring_) place_of_sum = 0;
        ++summed;
      }
      end_copies();
    }
    if (next.count > 0) put(segment, {sums.max, warp_sum<32>(sums.sum)});
  }
  // The next row is at hand from here on.
  __device__ void go_on() {
    ++iteration_;
    MaxAndSum* const results = results_;
    results_ = next_results_;
    next_results_ = results;
  }

  // All blocks of the launch wait for each other in the first iteration. Later those of a row do so
  // alone: rows then end at different times, and memory always has something to do. How many blocks
  // have arrived lies behind the results.
  __device__ unsigned* arrivals() const {
    const int behind = 2 * schedule_.owners * schedule_.max_segments + owner_;
    return reinterpret_cast<unsigned*>(static_cast<MaxAndSum*>(schedule_.workspace) + behind);
  }
  __device__ int place_of(int position) const {
    return (iteration_ % 2 == 0 ? position : ring_ - 1 - position) * kWarps + warp_;
  }
  __device__ int place_of_next(int position) const {
    return (iteration_ % 2 == 0 ? ring_ - 1 - position : position) * kWarps + warp_;
  }

  // By a whole warp, for each of its segments of the next row.
  __device__ void put(int segment, const MaxAndSum& result) const {
    if (schedule_.is_cluster) {
      exchange_.send(blocks(), iteration_ + 1, &next_results_[segment], result);
    } else if (lane() == 0) {
      next_results_[segment] = result;
    }
  }
  // function(at_once, results, segments) of the results of all segments, `at_once` groups at a
  // time. If there are very many segments, each warp joins groups, and the results of all warps are
  // joined again.
  template <class Function>
  __device__ MaxAndSum join(const SegmentPart& part, Function&& function) const {
    if (schedule_.is_cluster) {
      if (share_of(part).count == 0) exchange_.send_nothing(blocks(), iteration_);
      if (threadIdx.x < 32) exchange_.wait(blocks(), iteration_, part, kWarps);
      __syncthreads();
    } else if (iteration_ == 0) {
      sync_grid();
    } else {
      sync_blocks(arrivals(), blocks() * iteration_);
    }
    // Together, for the latency of one: they may come from global memory.
    using All = std::integral_constant<int, kSegmentsOfWarp / kSegmentsOfGroup>;
    using One = std::integral_constant<int, 1>;
    if (part.segments <= kSegmentsOfWarp) return function(All{}, results_, part.segments);
    const int groups = divide_up(part.segments, kSegmentsOfGroup);
#pragma unroll 1
    for (int group = warp_; group < groups; group += kWarps) {
      const int first = group * kSegmentsOfGroup;
      const MaxAndSum of_group =
          function(One{}, results_ + first, min(part.segments - first, kSegmentsOfGroup));
      if (lane() == 0) of_groups_[group] = of_group;
    }
    __syncthreads();
    return function(One{}, of_groups_, groups);
  }

  const Schedule& schedule_;
  const int warp_tiles_per_segment_, ring_;
  ClusterExchange exchange_;
  MaxAndSum *of_groups_, *results_, *next_results_;
  int owner_ = 0, rank_ = 0;
  int iteration_ = -1;  // of the row at hand; before the first one there is none
  // See SegmentRow.
  const int warp_ = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
};

}  // namespace megasoftmax
