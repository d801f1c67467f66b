#pragma once
// Turns of blocks that add to the same gradients of queries. So sums have the same order each time.
// A block waits for blocks of lower numbers, which begin earlier.
//
// kLastKeysFirst: with causality a block begins with the queries at its own keys. Blocks with later
// keys do not see these, so it adds at once, and comes to the first queries of the next block a
// step after that block. But the longest blocks begin last, and end alone.
//
// kFirstKeysFirst: with causality the longest blocks begin first. All begin with the last queries,
// so a block waits at its first tile for those before it, and stays behind them. Beside the rest of
// the block that is short where heads share keys: it has a step of each head for a tile.

#include "exclusion.cuh"

namespace megasoftmax {

// How many tiles of kKeys keys in [begin, end) have a step for the tile of queries that begins at
// `query`, by the block mask.
template <int kKeys, int kQueries>
__device__ __forceinline__ int visible_steps(const AttentionParams& params, int batch, int head,
                                             int query, int begin, int end) {
  constexpr int kTiles = kKeys / kMaskTile;  // of the block mask
  static_assert(kTiles == 1 || kTiles == 2);
  const BlockMaskLayout& layout = params.block_mask.layout;
  const int line = query / kMaskTile;
  const uint32_t* const words = params.block_mask.of(batch, head) + layout.seen_by_query();
  const auto seen_at = [&](int word) {
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < divide_up(kQueries, kMaskTile); ++i) {
      if (line + i < layout.query_tiles)
        seen |= __ldg(words + int64_t{line + i} * layout.words_of_keys() + word);
    }
    return kTiles == 2 ? (seen | seen >> 1) & 0x55555555u : seen;
  };
  const int first = begin * kTiles, last = end * kTiles;
  int count = 0;
  for (int word = first / 32; word * 32 < last; ++word) {
    uint32_t seen = seen_at(word);
    if (word == first / 32) seen &= ~0u << first % 32;
    if (word == last / 32) seen &= ~(~0u << last % 32);
    count += __popc(seen);
  }
  return count;
}
// visible_steps as a function call, for kernels that would lack registers for it inline. Kernels
// with wgmma products cannot call functions.
template <int kKeys, int kQueries>
__device__ __noinline__ int visible_steps_apart(const AttentionParams& params, int batch, int head,
                                                int query, int begin, int end) {
  return visible_steps<kKeys, kQueries>(params, batch, head, query, begin, end);
}

// How many blocks of kKeys keys add to the tile of queries that begins at `query` before the block
// of those from `first_key` on, in the order of turns. QueryTiles decides which have a step for it.
template <int kKeys, int kQueries, bool kIsUnmasked, bool kIsApart, bool kMayAlternate = false>
__device__ __forceinline__ int turns_before(const AttentionParams& params, int batch, int head,
                                            int query, int first_key) {
  if (kMayAlternate && params.order_of_turns == OrderOfTurns::kFirstKeysFirst)
    return max(first_key / kKeys - visible_keys(params, query).begin / kKeys, 0);
  const int last_query = min(query + kQueries, params.queries) - 1;
  const int begin = first_key / kKeys + 1;
  const int end = divide_up(visible_keys(params, last_query).end, kKeys);
  if (begin >= end) return 0;
  if (kIsUnmasked || params.block_mask.words == nullptr) return end - begin;
  return kIsApart ? visible_steps_apart<kKeys, kQueries>(params, batch, head, query, begin, end)
                  : visible_steps<kKeys, kQueries>(params, batch, head, query, begin, end);
}

// The counter of a tile of queries, for one of kParts parts of its dQ that are added apart:
// columns, or the rows of a warp.
template <int kQueries, int kParts = 2>
__device__ inline uint32_t* turn_of(const AttentionBackwardParams& params, int batch, int head,
                                    int query, int part) {
  const int tiles = divide_up(params.queries, kQueries);
  return params.turns + ((batch * params.heads + head) * tiles + query / kQueries) * kParts + part;
}

// One thread calls both. The other threads are synchronised with it.
__device__ inline void wait_for_turn(const uint32_t* turn, int number) {
  uint32_t now;
  while (true) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    if (now == static_cast<uint32_t>(number)) return;
    __nanosleep(100);
  }
}
__device__ inline void pass_turn(uint32_t* turn) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turn) : "memory");
}

}  // namespace megasoftmax
