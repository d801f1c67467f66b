#pragma once
// Which tiles of queries a block of Hopper's forward takes, and which tiles of keys for each.

#include "../../exclusion.cuh"
#include "../../parts.cuh"
#include "../../tile_of_queries.cuh"
#include "memory.cuh"

namespace megasoftmax {

// What a block owns: queries of a head, 64 for each warpgroup, or all queries of several heads that
// share keys, one head for each warpgroup.
template <bool kMayShare>
struct QueriesOfBlock : TileOfQueries {
  int heads = 0;  // 0: the warpgroups share the queries of one head

  __device__ QueriesOfBlock(const AttentionForwardParams& params, int queries_per_tile, int number)
      : TileOfQueries(params, queries_per_tile, number) {
    first_query -= params.query_tile_offset;
    if (!kMayShare || params.heads_of_block == 1) return;
    const int group = static_cast<int>(params.heads_per_key_head.divisor);
    int key_head, before;
    params.blocks_of_heads.split(head, key_head, before);
    before *= params.heads_of_block;
    head = key_head * group + before;
    heads = min(params.heads_of_block, group - before);
  }
  // From the assigned tile. Members are uniform over the lanes.
  __device__ explicit QueriesOfBlock(const TileOfQueries& assigned) : TileOfQueries(assigned) {
    first_query = uniform(first_query);
    head = uniform(head);
    batch = uniform(batch);
    split = uniform(split);
  }
  // The head of a warpgroup. Warpgroups without one get the last head.
  __device__ int head_of(int warpgroup) const {
    return kMayShare && heads > 0 ? head + min(warpgroup, heads - 1) : head;
  }
  // The first query of a warpgroup. It lies beyond the tensor for warpgroups without queries.
  __device__ int query_of(const AttentionForwardParams& params, int warpgroup) const {
    if (kMayShare && heads > 0) return warpgroup < heads ? 0 : params.queries;
    const int query = first_query + 64 * warpgroup;
    return query < 0 ? params.queries : query;
  }
};

// The keys from the first tile to the last of which a mask of keys, if there is one, leaves some.
__device__ inline KeyRange keys_left(const AttentionParams& params, int batch, int head) {
  if (params.block_mask.words == nullptr) return {0, params.keys};
  const BlockMaskLayout& layout = params.block_mask.layout;
  const uint32_t* const seen = params.block_mask.of(batch, head) + layout.seen_by_query();
  int first = 0, last = layout.words_of_keys() - 1;
  while (first < last && __ldg(seen + first) == 0) ++first;
  while (first < last && __ldg(seen + last) == 0) --last;
  const uint32_t word = __ldg(seen + first);
  if (word == 0) return {0, 0};
  return {(first * 32 + __ffs(static_cast<int>(word)) - 1) * kMaskTile,
          (last * 32 + 32 - __clz(static_cast<int>(__ldg(seen + last)))) * kMaskTile};
}

// The tiles of keys that a block takes, one after the other.
template <int kQueries, int kKeys, HopperMask kMask>
class TilesOfBlock {
  static constexpr bool kIsUnmasked = kMask != HopperMask::kAny;

 public:
  int key, end;   // the first key of the tile at hand; none is left from `end` on
  uint32_t step;  // how many the block took before

  // `assigned` is not used if the launch is unmasked.
  __device__ TilesOfBlock(const AttentionForwardParams& params, const TileOfQueries& block,
                          const AssignedTile<kQueries>& assigned, uint32_t step)
      : step(step) {
    KeyRange seen;
    if constexpr (kIsUnmasked) {
      const int last_query = min(block.first_query + kQueries, params.queries) - 1;
      seen = {visible_keys(params, max(block.first_query, 0)).begin,
              visible_keys(params, last_query).end};
      if constexpr (kMask == HopperMask::kKeys) {
        const KeyRange left = keys_left(params, block.batch, block.head);
        seen = {max(seen.begin, left.begin), min(seen.end, left.end)};
      }
    } else {
      seen = {assigned.next(0), assigned.end()};
    }
    const KeyRange part =
        part_of<kKeys>(params, {seen.begin / kKeys * kKeys, seen.end}, block.split);
    end = part.end;
    if constexpr (kIsUnmasked) {
      go_to(part.begin);
    } else {
      const int first = max(part.begin, seen.begin);
      go_to(params.block_mask.words == nullptr || first >= end
                ? first
                : tiles_.from(params, block.batch, block.head, block.first_query,
                              first / kMaskTile * kMaskTile));
    }
  }
  __device__ bool are_left() const { return key < end; }
  __device__ void advance(const AttentionForwardParams& params, const TileOfQueries& block,
                          const AssignedTile<kQueries>& assigned) {
    if constexpr (kIsUnmasked) {
      key += kKeys;
    } else {
      go_to(params.block_mask.words != nullptr
                ? tiles_.after(params, key + kKeys - kMaskTile, [&] { return block; })
                : assigned.next(key + kKeys));
    }
    ++step;
  }
  // Whether the mask may exclude a pair of the tile at hand.
  __device__ bool may_exclude() const {
    return !kIsUnmasked && (tiles_.may_exclude(key) || tiles_.may_exclude(key + kKeys - kMaskTile));
  }

 private:
  // The key after the last tile of the block mask may lie in a tile that begins before the end. All
  // lanes take the same steps, which the compiler does not see. Unless it is told, it computes them
  // in registers of lanes, between the products whose matrices need these.
  __device__ void go_to(int seen) {
    key = seen < end ? seen / kKeys * kKeys : end;
    if constexpr (!kIsUnmasked) key = uniform(key);
  }

  [[maybe_unused]] KeyTiles<kQueries> tiles_;
};

// The tiles of keys as the copying warp tells them the other warps, unless a launch is unmasked.
class FollowedTiles {
 public:
  int key;
  uint32_t step;

  __device__ FollowedTiles(int first_key, uint32_t step) : key(uniform(first_key)), step(step) {}
  __device__ bool are_left() const { return key != kNoKey; }
  // What a step is told, as one word.
  __device__ static int told(int next_key, bool may_exclude) { return next_key | may_exclude; }
  // Reads the word of the step at hand, whose keys are there and not yet used.
  __device__ void read(int told) { told_ = uniform(told); }
  __device__ void advance() {
    key = told_ & ~1;
    ++step;
  }
  __device__ bool may_exclude() const { return (told_ & 1) != 0; }

 private:
  int told_ = kNoKey;
};

// The tiles of queries of a persistent block. In a round each block takes one tile.
// * Causal tiles become shorter, so every other round is in reverse.
// * Else only one tile of a head may be shorter. Each round is moved by one block, so that no block
//   gets the short tiles of all heads.
// * With HopperMask::kAny, lengths are not known. Then a block takes its next tile from a
//   counter in global memory when it is done with one.
class WorkOfBlock {
 public:
  __device__ explicit WorkOfBlock(const AttentionForwardParams& params)
      : is_even_(params.window_left < 0 && params.window_right < 0),
        place_(static_cast<int>(blockIdx.x)),
        count_(static_cast<int>(params.order.tiles * params.key_heads *
                                params.blocks_of_heads.divisor * params.batches)) {}
  __device__ int number() const { return first_ + place_; }
  __device__ bool is_left() const { return number() < count_; }
  __device__ bool may_come() const { return first_ < count_; }
  __device__ void advance() {
    const int blocks = static_cast<int>(gridDim.x);
    first_ += blocks;
    place_ = !is_even_ ? blocks - 1 - place_ : place_ + 1 < blocks ? place_ + 1 : 0;
  }
  // The number of the block's next tile, or one that is too large. With a counter only lane 0 of
  // the copying warp gets it.
  __device__ uint32_t next(const AttentionForwardParams& params) const {
    if (params.tile_counter != nullptr)
      return threadIdx.x == 0 ? gridDim.x + atomicAdd(params.tile_counter, 1) : 0;
    WorkOfBlock after = *this;
    after.advance();
    return after.may_come() ? static_cast<uint32_t>(after.number()) : ~0u;
  }
  __device__ bool has(uint32_t number) const { return number < static_cast<uint32_t>(count_); }

 private:
  bool is_even_;
  int first_ = 0, place_;  // the first tile of the round, and the block's place in it
  int count_;
};

}  // namespace megasoftmax
