#pragma once
// One or several blocks own a long row. Its vectors form segments, and a warp sums a segment. Every
// block of the row gets the results of all segments and adds them up in the order of segments.
// Several blocks form a cluster and store results in each other's shared memory.
//
// A warp tile is four vectors for each lane of a warp. A segment is one warp tile, or several in
// very long rows.
//
// A segment that waits in shared memory has the place of its number in the block's part of the row.
// Persistent blocks of the backward pass may have more places than segments. The places of a warp
// then form a ring. Some segments of the next row are copied while this row is summed and
// exchanged, and the others one by one as segments of this row are written.
//
// Consecutive rows of a block alternate between two arrays of results. So a block needs one barrier
// for each row. In a cluster a barrier of all threads would wait for the probabilities of the row
// before, which are still on their way to memory. Instead results are counted where they arrive.
// Each warp of each block sends something for every row, if only to be counted. A block that has
// all results of a row knows that every warp has read those of the row before, and may send those
// of the next row to the same place.

#include "../common/integers.h"
#include "../common/reduce.cuh"
#include "row_vectors.cuh"

namespace megasoftmax {

// This lane's packs of a tile, from shared memory.
template <class T, int kElements, int kVectors>
__device__ inline void load_kept(const Pack<T, kElements>* kept,
                                 Pack<T, kElements> (&packs)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) packs[i] = kept[i * 32];
}

// A lane joins kSegmentsAtOnce results of segments at a time, and loads several such groups
// together. A group without results changes no bits.
inline constexpr int kSegmentsAtOnce = 4, kSegmentsOfGroup = kSegmentsAtOnce * 32;
template <int kGroups, class Body>
__device__ __forceinline__ void for_each_group(const MaxAndSum* of_segments, int segments,
                                               Body&& body) {
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) % 32; first < segments;
       first += kGroups * kSegmentsOfGroup) {
    MaxAndSum results[kGroups][kSegmentsAtOnce];
#pragma unroll
    for (int i = 0; i < kGroups * kSegmentsAtOnce; ++i)
      results[i / kSegmentsAtOnce][i % kSegmentsAtOnce] =
          first + i * 32 < segments ? of_segments[first + i * 32] : MaxAndSum{kLowest, 0.f};
#pragma unroll
    for (const auto& group : results) body(group);
  }
}

// The sum of a few segments, as warp_sum makes it of as many lanes.
__device__ inline float sum_as_lanes(const float (&sums)[kSegmentsAtOnce]) {
  static_assert(kSegmentsAtOnce == 4);
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// By a whole warp. A few segments without shuffles.
template <int kGroups>
__device__ inline MaxAndSum merge_segments(const MaxAndSum* of_segments, int segments,
                                           Exponent exponent) {
  if (segments <= kSegmentsAtOnce) {
    MaxAndSum results[kSegmentsAtOnce];
    float max = kLowest, sums[kSegmentsAtOnce];
#pragma unroll
    for (int i = 0; i < kSegmentsAtOnce; ++i) {
      results[i] = i < segments ? of_segments[i] : MaxAndSum{kLowest, 0.f};
      max = fmaxf(max, results[i].max);
    }
#pragma unroll
    for (int i = 0; i < kSegmentsAtOnce; ++i)
      sums[i] = __fmul_rn(results[i].sum, exponent(results[i].max, max));
    return {max, sum_as_lanes(sums)};
  }
  MaxAndSum mine{kLowest, 0.f};
  for_each_group<kGroups>(of_segments, segments, [&](const MaxAndSum(&group)[kSegmentsAtOnce]) {
    float max = mine.max;
#pragma unroll
    for (int i = 0; i < kSegmentsAtOnce; ++i) max = fmaxf(max, group[i].max);
    mine.sum *= exponent(mine.max, max);
    mine.max = max;
#pragma unroll
    for (int i = 0; i < kSegmentsAtOnce; ++i)
      mine.sum += group[i].sum * exponent(group[i].max, max);
  });
  return warp_merge<32>(mine, exponent);
}

// The sum over all segments, without maxima.
template <int kGroups>
__device__ inline float sum_segments(const MaxAndSum* of_segments, int segments) {
  if (segments <= kSegmentsAtOnce) {
    float sums[kSegmentsAtOnce];
#pragma unroll
    for (int i = 0; i < kSegmentsAtOnce; ++i) sums[i] = i < segments ? of_segments[i].sum : 0.f;
    return sum_as_lanes(sums);
  }
  float total = 0.f;
  for_each_group<kGroups>(of_segments, segments, [&](const MaxAndSum(&group)[kSegmentsAtOnce]) {
#pragma unroll
    for (int i = 0; i < kSegmentsAtOnce; ++i) total += group[i].sum;
  });
  return warp_sum<32>(total);
}

// What a block does of a row.
struct SegmentPart {
  Bounds bounds;
  int segments;      // of the row
  int share;         // of a block, if there are enough
  int first, count;  // those of the block
};

// The part of block `rank`, one of `blocks` that share a row.
template <class Grid>
__device__ inline SegmentPart part_of_block(const Schedule& schedule, int warp_tiles_per_segment,
                                            int blocks, int rank, const Bounds& visible,
                                            Grid grid) {
  const int columns_per_segment = warp_tiles_per_segment * kWarpTileVectors * Grid::kVectorElements;
  const int begin = grid.begin(visible);
  const int segments = divide_up(grid.end(visible) - begin, columns_per_segment);
  if (blocks == 1) return {visible, segments, segments, 0, segments};
  int share, rest;
  schedule.divide_segments.split(segments + blocks - 1, share, rest);
  const int first = min(rank * share, segments), count = min(share, segments - first);
  const int part_begin = begin + first * columns_per_segment;
  const int part_end = part_begin + count * columns_per_segment;
  return {
      {max(visible.begin, part_begin), min(visible.end, part_end)}, segments, share, first, count};
}

// How the blocks of a cluster get the results of segments, which are counted where they arrive: see
// above. Rows that follow each other use two barriers in turn.
struct ClusterExchange {
  uint64_t* words;  // in shared memory: the barriers, and a dummy slot

  static constexpr int kWords = 2 + 1;

  __device__ void init() const {
    if (threadIdx.x == 0) {
      init_byte_barrier(&words[0]);
      init_byte_barrier(&words[1]);
    }
    arrive_at_cluster_relaxed();
  }
  // By a whole warp, to each of the row's blocks.
  __device__ void send(int blocks, int iteration, void* at, const MaxAndSum& result) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < blocks)
      send_to_cluster(at, &words[iteration % 2], lane, reinterpret_cast<const uint64_t&>(result));
  }
  // By a warp without results of the row, to be counted.
  __device__ void send_nothing(int blocks, int iteration) const {
    send(blocks, iteration, words + 2, {});
  }
  // By a whole warp: until all results have come. Each of the `warps` of a block sends one at
  // least.
  __device__ void wait(int blocks, int iteration, const SegmentPart& part, int warps) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int segments = min(part.share, max(part.segments - lane * part.share, 0));
    const int all_sent = sum_of_lanes(lane < blocks ? max(segments, warps) : 0);
    if (lane == 0) expect_bytes(&words[iteration % 2], all_sent * kResultBytes);
    wait_for_bytes(&words[iteration % 2], iteration / 2 % 2);
  }
};

// kIsPersistent: blocks take one row after the other. kMayShare: several blocks may own a row.
template <int kThreads, bool kMayReread, bool kIsPersistent, bool kMayShare>
class SegmentRow {
 public:
  static constexpr int kWarps = kThreads / 32;
  static constexpr bool kRereads = kMayReread;
  static_assert((kWarps & (kWarps - 1)) == 0);
  static_assert(!kRereads || !(kIsPersistent || kMayShare));

  // `results`: shared memory for those of two rows, which alternate.
  __device__ SegmentRow(const Schedule& schedule, void* results)
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
  __device__ SegmentPart part_of(const Bounds& visible, Grid grid) const {
    return part_of_block(schedule_, warp_tiles_per_segment(), blocks(), rank_, visible, grid);
  }

  // This warp's segments, counted from the block's first one, are first_segment(), then kWarps
  // further each time, up to last_segment(), which is negative where there is none.
  __device__ int first_segment() const { return warp_; }
  __device__ int last_segment(const SegmentPart& part) const {
    return first_segment() + ((part.count - 1 - first_segment()) & ~(kWarps - 1));
  }
  // From the warp's first segment to behind its last one.
  __device__ int span(const SegmentPart& part) const {
    return last_segment(part) + kWarps - first_segment();
  }

  // The place of a segment of this row, and of one of the next row.
  __device__ int place_of(int segment) const { return place_from(begin_, segment); }
  __device__ int place_of_next(const SegmentPart& part, int segment) const {
    return place_from(begin_of_next(part), segment);
  }
  // The span of those segments of the next row for which there are places beside this row's.
  __device__ int span_ahead(const SegmentPart& part, const SegmentPart& next) const {
    return kIsPersistent ? min(places() - span(part), span(next)) : 0;
  }
  // This row has been written: the next one takes its part.
  __device__ void go_on(const SegmentPart& part) { begin_ = begin_of_next(part); }
  __device__ int warp_tiles_per_segment() const {
    return kRereads ? schedule_.warp_tiles_per_segment : kWarpTilesPerSegment;
  }
  // The first vector of one of the block's warp tiles, counted from the row's first visible one.
  __device__ int first_vector(const SegmentPart& part, int tile) const {
    return (part.first * warp_tiles_per_segment() + tile) * kWarpTileVectors;
  }

  // Vectors of the row that segments cover, some of them behind its end.
  __device__ int covered_vectors(const SegmentPart& part) const {
    return part.segments * warp_tiles_per_segment() * kWarpTileVectors;
  }

  // The pass that sums: sum(tile, place, before) for each of the warp's warp tiles is the lanes'
  // sums of a tile. Warp tiles are counted from the block's first one, as segments are, and places
  // are those of warp tiles in shared memory. sum() also adds up `before` over the warp, the sums
  // of the segment before, which overlaps the two chains of shuffles. All copies have been started
  // before, and are waited for one by one; copies of `ahead` segments of the next row after them.
  template <class Sum>
  __device__ void sum_pass(const SegmentPart& part, int ahead, Sum&& sum) const {
    MaxAndSum sums{kLowest, 0.f};
    const auto sum_segment = [&](int segment, int place) {
      float before = sums.sum;
      const MaxAndSum of_segment = sum(segment, place, before);
      if (segment != first_segment()) put(part, segment - kWarps, {sums.max, before});
      sums = of_segment;
    };
    const int last = last_segment(part);
    if constexpr (kIsPersistent) {
#pragma unroll 1
      for (int segment = first_segment(); segment <= last; segment += kWarps) {
        wait_for_copies_before<kMostPending>((last - segment) / kWarps + ahead);
        sum_segment(segment, place_of(segment));
      }
    } else {
      // Groups of copies without any make up for segments that there are not, or no more.
#pragma unroll 1
      for (int segment = last + kWarps; segment < first_segment() + kPending * kWarps;
           segment += kWarps)
        end_copies();
#pragma unroll 1
      for (int segment = first_segment(); segment <= last; segment += kWarps) {
        wait_for_older_copies<kPending - 1>();
        sum_segment(segment, segment);
        end_copies();
      }
    }
    if (last >= 0) put(part, last, {sums.max, warp_sum<32>(sums.sum)});
  }
  // The pass that writes: write(tile, place, is_new), then finish(tile).
  template <class Write, class Finish>
  __device__ void write_pass(const SegmentPart& part, Write&& write, Finish&& finish) const {
    const int last = last_segment(part);
#pragma unroll 1
    for (int segment = first_segment(); segment <= last; segment += kWarps) {
      write(segment, place_of(segment), false);
      finish(segment);
    }
  }

  // The pass that sums, of rows that are read twice. Warp tiles come through a ring of kSlots
  // places, where start(tile, place) begins to copy one. add(sums, of_tile) joins the warp tiles of
  // a segment.
  template <int kSlots, class Start, class Sum, class Add>
  __device__ void sum_ring(const SegmentPart& part, Start&& start, Sum&& sum, Add&& add) const {
    MaxAndSum sums{kLowest, 0.f};
    for (int position = 0; position < kSlots; ++position)
      start_position<kSlots>(part, position, start);
    for (int position = 0; position < positions(part); ++position) {
      wait_for_older_copies<kSlots - 1>();
      float before = sums.sum;
      const MaxAndSum of_tile = sum(tile_at(position), place_in_ring<kSlots>(position), before);
      if (position % warp_tiles_per_segment() != 0) {
        add(sums, of_tile);
      } else {
        if (position != 0) put(part, segment_at(position) - kWarps, {sums.max, before});
        sums = of_tile;
      }
      start_position<kSlots>(part, position + kSlots, start);
    }
    const int last = last_segment(part);
    if (last >= 0) put(part, last, {sums.max, warp_sum<32>(sums.sum)});
  }
  // From the row's end, which is still in the ring as the sum left it. What is new to write() comes
  // as it was copied.
  template <int kSlots, class Start, class Write>
  __device__ void write_ring(const SegmentPart& part, Start&& start, Write&& write) const {
    const int last = positions(part) - 1;
    for (int position = last; position >= 0; --position) {
      wait_for_older_copies<kSlots - 1>();
      write(tile_at(position), place_in_ring<kSlots>(position), position + kSlots <= last);
      start_position<kSlots>(part, position - kSlots, start);
    }
  }

  // Begins a row of the block.
  __device__ void start(int iteration) {
    // Until its other blocks have started.
    if (kMayShare && iteration == 0) wait_for_cluster();
    iteration_ = iteration;
    results_ = results_of_even_ + (iteration % 2 != 0 ? schedule_.max_segments : 0);
  }
  // By a whole warp, for each of its segments.
  __device__ void put(const SegmentPart& part, int segment, MaxAndSum result) const {
    MaxAndSum* const at = results_ + part.first + segment;
    if (kMayShare) {
      exchange_.send(blocks(), iteration_, at, result);
    } else if (lane() == 0) {
      *at = result;
    }
  }
  __device__ MaxAndSum merge(const SegmentPart& part, Exponent exponent) const {
    share_results(part);
    return merge_segments<1>(results_, part.segments, exponent);
  }
  __device__ float sum(const SegmentPart& part) const {
    share_results(part);
    return sum_segments<1>(results_, part.segments);
  }

 private:
  // The warp's warp tiles in order.
  __device__ int positions(const SegmentPart& part) const {
    return max(last_segment(part) - first_segment() + kWarps, 0) / kWarps *
           warp_tiles_per_segment();
  }
  __device__ int segment_at(int position) const {
    return first_segment() + position / warp_tiles_per_segment() * kWarps;
  }
  __device__ int tile_at(int position) const {
    return segment_at(position) * warp_tiles_per_segment() + position % warp_tiles_per_segment();
  }
  template <int kSlots>
  __device__ int place_in_ring(int position) const {
    return position % kSlots * kWarps + first_segment();
  }
  template <int kSlots, class Start>
  __device__ void start_position(const SegmentPart& part, int position, Start&& start) const {
    if (position >= 0 && position < positions(part))
      start(tile_at(position), place_in_ring<kSlots>(position));
    end_copies();
  }

  // The span of this warp's places, which have the numbers of segments. In a ring the first one
  // follows the last one.
  __device__ int places() const {
    return (schedule_.kept_warp_tiles - 1 - first_segment() + kWarps) & ~(kWarps - 1);
  }
  __device__ int in_ring(int place) const { return place < places() ? place : place - places(); }
  // The place of a segment of a row that begins at place `begin` of the ring.
  __device__ int place_from(int begin, int segment) const {
    return kIsPersistent ? in_ring(begin + segment - first_segment()) + first_segment() : segment;
  }
  __device__ int begin_of_next(const SegmentPart& part) const {
    return kIsPersistent ? in_ring(begin_ + span(part)) : 0;
  }

  static constexpr int kPending = 4;      // segments whose copies are waited for apart
  static constexpr int kMostPending = 6;  // of persistent blocks

  // of the row

  __device__ int blocks() const { return kMayShare ? schedule_.blocks_per_row : 1; }

  __device__ void share_results(const SegmentPart& part) const {
    if constexpr (kMayShare) {
      if (last_segment(part) < 0) exchange_.send_nothing(blocks(), iteration_);
      if (threadIdx.x < 32) exchange_.wait(blocks(), iteration_, part, kWarps);
    }
    __syncthreads();
  }

  const Schedule& schedule_;
  MaxAndSum* const results_of_even_;
  MaxAndSum* results_ = nullptr;
  ClusterExchange exchange_;
  int rank_ = 0, iteration_ = 0;
  int begin_ = 0;  // how far into the ring the row begins
  // By a shuffle, so that the compiler knows that all lanes have the same number. Loops over
  // segments then need no code for diverging lanes (64 registers of a thread instead of 78).
  const int warp_ =
      kWarps == 1 ? 0 : __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
};

}  // namespace megasoftmax
