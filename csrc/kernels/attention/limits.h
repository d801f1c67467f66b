#pragma once
// Tiles of attention: the family's only limits. Plain C++, no CUDA, no torch.

namespace megasoftmax {

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxScale = 10000;
// Of queries and keys together: what tiles reach beyond them fits 31 bits too.
inline constexpr int kMaxPositions = 2147000000;
// Queries, and keys, of a tile that a note of masks and ranges speaks of.
inline constexpr int kNoteTile = 64;
// What a block must be able to have, 163 KB: compute capability 8.0, 9.0, 10.x, not 8.6, 8.9, 12.x.
inline constexpr int kMinSharedBytes = 166912;

// What a thread may spill: bounds and sums that are needed once for a tile, beside its products.
// With more registers for them fewer blocks would run at a time.
inline constexpr int kMaxSpilledBytes = 200;

// A block of queries against one tile of keys after the other, forward.
struct AttentionTile {
  int head_dim;  // of queries, keys and values; shorter ones are filled up with 0
  int warps;
  int queries_per_warp;  // a multiple of 16
  int keys;              // of a tile
  int blocks_per_sm;     // the compiler's register budget: 65536 / (threads * blocks)

  constexpr int threads() const { return 32 * warps; }
  constexpr int queries() const { return warps * queries_per_warp; }
};
// clang-format off
inline constexpr AttentionTile kAttentionForwardTiles[] = {
    // head dim, warps, queries/warp, keys, blocks/SM
    {        32,     4,           32,   64,         4},
    {        64,     4,           32,   64,         3},
    {       128,     4,           32,   64,         2},
    {       256,     8,           16,   64,         1},
};
// clang-format on

// Few queries of many keys: a warp takes 16 rows, queries of all heads that share keys, and 16 keys
// at a time, of which so many steps are on their way.
inline constexpr int kMaxDecodeQueries = 16, kDecodeKeys = 16;
constexpr int decode_warps(int head_dim) { return head_dim > 128 ? 4 : 8; }
inline constexpr int kDecodeStages = 2;
// Keys are split for one block per multiprocessor if each split gets at least kFewestKeysOfSplit
// keys, and for kMaxDecodeBlocksPerSm blocks if each gets at least kKeysOfSplit.
inline constexpr int kMaxDecodeBlocksPerSm = 8, kFewestKeysOfSplit = 256, kKeysOfSplit = 4096;

// dQ in the same order each time: tiles of a block.
inline constexpr int kInOrderQueries = 64, kInOrderKeys = 64;

// A block of keys against one tile of queries after the other, backward.
struct AttentionBackwardTile {
  int head_dim;
  int warps;  // two have 32 keys and half of the queries each
  int queries;
  int slice;  // the columns of gradients that a block makes
  int blocks_per_sm;

  constexpr int threads() const { return 32 * warps; }
  constexpr int keys() const { return 16 * warps; }
};
// clang-format off
inline constexpr AttentionBackwardTile kAttentionBackwardTiles[] = {
    // head dim, warps, queries, slice, blocks/SM
    {        32,     4,      64,    32,         4},
    {        64,     4,      64,    64,         3},
    {       128,     8,      64,   128,         1},
    {       256,     4,      64,   128,         1},
};
// clang-format on

}  // namespace megasoftmax
