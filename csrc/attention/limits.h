#pragma once
// Tiles of attention: the family's only limits. Plain C++, no CUDA, no torch.

namespace megasoftmax {

// The major number of the first compute capability that has attention: its products of 16 x 16
// matrices, bfloat16 and asynchronous copies.
inline constexpr int kLeastMajor = 8;
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxFloatHeadDim = 128;  // of float32
inline constexpr int kMaxScale = 10000;
// Of queries and keys together: what tiles reach beyond them fits 31 bits too.
inline constexpr int kMaxPositions = 2147000000;
// Of kDropoutSteps entries the most that dropout may drop, so that its bits compare as float16.
inline constexpr int kMaxDropped = 31744;
// Queries, and keys, of a tile that a note of masks and ranges speaks of.
inline constexpr int kNoteTile = 64;
// What a thread may spill, in bytes: bounds and sums that are needed once for a tile, beside its
// products. With more registers for them fewer blocks would run at a time.
inline constexpr int kMaxSpilledBytes = 200;
// What a thread of Hopper's kernels may spill. Warps that copy, fill tables or add up gradients of
// a bias have 24 to 40 registers each, and products do not wait for them. The others keep to 200,
// except for a head dimension of 64 with a bias beside a mask, ranges or dropout.
inline constexpr int kHopperMaxSpilledBytes = 700;
// What a thread may spill in kernels of float32. At a head dimension of 64 the backward pass spills
// a part of its sums while it makes scores.
inline constexpr int kFloatMaxSpilledBytes = 450;
// Shared memory that kernels of notes, and the one that adds up parts of a gradient of a bias,
// declare themselves. They have no other, and no others declare any.
inline constexpr int kAttentionMaxDeclaredBytes = 4096;

// A block of queries against one tile of keys after the other, forward.
struct AttentionTile {
  int head_dim;  // of queries, keys and values; shorter ones are filled up with 0
  int warps;
  int queries_per_warp;   // a multiple of 16
  int keys;               // of a tile
  int blocks_per_sm;      // the compiler's register budget: 65536 / (threads * blocks)
  int element_bytes = 2;  // of queries, keys and values

  constexpr int threads() const { return 32 * warps; }
  constexpr int queries() const { return warps * queries_per_warp; }
};
// The last column: TFLOP/s on an H200, bfloat16. Head dims 64 and 128: [4, 16, 4096, d] with a bias
// [1, h]. 32: [128, 4, 384, d] with a bias [b, h]. 256: [2, 16, 4096, d], causal.
// Of tiles for the same head dimension a GPU takes the first that a block of it has room for.
// clang-format off
inline constexpr AttentionTile kAttentionForwardTiles[] = {
    // head dim, warps, queries/warp, keys, blocks/SM
    {        32,     4,           32,   64,         4},  // 114
    {        64,     4,           32,   64,         3},  // 255
    {       128,     4,           32,   64,         2},  // 318
    {       256,     8,           16,   64,         1},  // 255
    {       256,     4,           16,   32,         1},
    // of float32, with the bytes of an element
    {        32,     4,           32,   64,         3, 4},
    {        64,     4,           32,   64,         2, 4},
    {       128,     4,           32,   32,         2, 4},
    {       128,     4,           16,   32,         2, 4},
};
// clang-format on

// The major number of Hopper's compute capability.
inline constexpr int kHopperMajor = 9;

// A block of Hopper's forward: warpgroups of 64 queries each, and one more that only copies. Both
// have their number of registers a thread.
struct AttentionHopperTile {
  int head_dim, value_dim;  // of queries and keys, and of values
  int warpgroups;
  int keys;
  int copier_registers, registers;
  int bias_stages;   // tiles of the bias in shared memory at a time; 0: no room for one
  int query_stages;  // tiles of queries there; results take the place of theirs

  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int queries() const { return 64 * warpgroups; }
};
// A block has the registers of its launch, the same number for each thread, a multiple of 8. A
// warpgroup that asks for more than the others left would wait for ever.
template <class Tile>
constexpr bool shares_registers(const Tile& tile) {
  const int registers = 65536 / tile.threads() / 8 * 8;
  return 128 * (tile.copier_registers + tile.warpgroups * tile.registers) <=
         tile.threads() * registers;
}
// Where tiles of queries see at most so many tiles of keys, a block takes several, one after the
// other: that hides their beginnings and ends. Else each has a block of its own, which balances
// better. With a mask or ranges, where lengths are not known, blocks count the tiles that they
// take.
inline constexpr int kMaxStepsOfSharedBlocks = 8;
// Heads whose tiles lie side by side in a grid: with more, tiles end no more at once.
inline constexpr int64_t kMaxHeadsOfSection = 128;
// Heads whose tiles lie side by side where blocks of keys take turns at the gradients of queries:
// about as many blocks run at a time.
inline constexpr int64_t kHeadsOfTurns = 512;
// A block waits for one step of each block of the same head that begins with it. It takes turns
// where it has so many times as many steps.
inline constexpr int64_t kStepsOfTurn = 2;
// Where lengths are not known, tiles of at least so many heads lie side by side that each head has
// so many blocks at a time.
inline constexpr int64_t kBlocksOfHead = 8;
// The last column: TFLOP/s of [4, 16, 4096, d], bfloat16, without causality or a bias. For 64 and
// 128 cuDNN has 463 and 680.
// clang-format off
inline constexpr AttentionHopperTile kAttentionHopperTiles[] = {
    // dims (head, value), warpgroups, keys, registers (copier, others), stages of bias, of queries
    {           48,    48,          3,  128,  32, 160,            2,            2},
    {           64,    64,          3,  128,  32, 160,            2,            2},  // 577
    {           80,    80,          2,  128,  40, 232,            1,            2},
    {           96,    96,          2,  128,  40, 232,            1,            2},
    {          128,   128,          2,  128,  40, 232,            1,            2},  // 761
    {          192,   128,          2,  128,  40, 232,            0,            1},
    {          192,   192,          2,   64,  40, 232,            1,            2},
    {          256,   256,          2,   64,  40, 232,            1,            1},
};
// clang-format on

// A block of keys against one tile of queries after the other, backward, where the forward is
// Hopper's too. Two warpgroups have 64 keys each, and a third one copies. A wide tile has 64 keys
// in all. Each of the three makes other products of them; the one that makes gradients of queries
// copies, too.
struct AttentionHopperBackwardTile {
  int head_dim, value_dim;
  int queries;
  int copier_registers, registers;
  static constexpr int warpgroups = 2;

  constexpr bool is_wide() const { return head_dim > 128; }
  constexpr bool has_turns() const { return !is_wide(); }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int keys() const { return is_wide() ? 64 : 64 * warpgroups; }
  // With a bias. Warps that sum its gradient take the registers that products leave; of a table
  // more, because they make products too.
  constexpr AttentionHopperBackwardTile with_bias(bool is_table) const {
    AttentionHopperBackwardTile tile = *this;
    if (head_dim < 128 || is_table) {
      tile.copier_registers = 40;
      tile.registers = 232;
    }
    return tile;
  }
};
// So many batches at most that share a bias sum its gradient in a cluster of blocks. The number of
// them is a power of 2, for equal parts of a tile.
inline constexpr int kMaxBiasCluster = 8;
// The last column: TFLOP/s of forward and backward together, of the same; cuDNN has 457 and 605.
// clang-format off
inline constexpr AttentionHopperBackwardTile kAttentionHopperBackwardTiles[] = {
    // dims (head, value), queries, registers (that copies, others)
    {           48,    48,     128,  24, 240},
    {           64,    64,     128,  24, 240},  // 475
    {           80,    80,      64,  24, 240},
    {           96,    96,      64,  24, 240},
    {          128,   128,      64,  24, 240},  // 590
    {          192,   128,      64,  72, 216},
    {          192,   192,      64,  72, 216},
    {          256,   256,      64,  72, 216},
};
// clang-format on

// Few queries of many keys: a warp takes 16 rows, queries of all heads that share keys, and 16 keys
// at a time, through a ring of kDecodeStages steps. Blocks have 96 KB of rings at most, which every
// GPU has room for.
inline constexpr int kMaxDecodeQueries = 16, kDecodeKeys = 16, kDecodeStages = 2;
constexpr int decode_warps(int head_dim) { return head_dim > 128 ? 3 : head_dim > 64 ? 6 : 8; }
// The compiler's register budget; shared memory may have room for one block alone. While one block
// begins or ends, the other one reads, and blocks of a cluster find room.
inline constexpr int kDecodeBlocksPerSm = 2;
// No part has fewer keys than the warps of a block take at a time.
constexpr int fewest_keys_of_decode_split(int head_dim) {
  return decode_warps(head_dim) * kDecodeKeys;
}
// Each 16 rows read all keys. Of more queries than these, heads that share keys take Hopper's
// kernels, where a block reads keys once for several heads.
inline constexpr int kMostQueriesOfSharedRows = 8;

// Head dimensions beyond kMaxHeadDim, forward: the largest of queries and keys, and of values; the
// rows of a block, queries of heads that share keys; the keys of a step. Blocks need the shared
// memory of GPUs of these major numbers.
inline constexpr int kMaxWideHeadDim = 576, kMaxWideValueDim = 512;
inline constexpr int kWideRows = 64, kWideKeys = 32, kWideThreads = 256;
inline constexpr int kFirstWideMajor = 9, kLastWideMajor = 10;

// Where blocks are too few for a GPU, several have the same queries, and each takes a part of the
// keys, of at least kFewestKeysOfSplit. The parts are as many as make whole waves of blocks, up to
// so many waves. How many waves, the time tells, in keys that a block takes. A wave takes the keys
// of a block, kKeysOfStart, and for each row kKeysOfPart for writing and reading a part, which has
// as many bytes as a key. Blocks do not end at once: one of kImbalance of a wave is lost. Adding
// parts up is a launch of kKeysOfLaunch.
inline constexpr int kFewestKeysOfSplit = 256, kMaxWavesOfSplits = 8;
inline constexpr int kKeysOfStart = 128, kKeysOfPart = 2, kKeysOfLaunch = 256, kImbalance = 16;

// Of few queries, blocks with the same queries are a cluster of up to kMaxClusterOfSplits, which
// adds up parts in shared memory, where so many clusters have at least half as many blocks as would
// run without. kDecodeWarpsOfSm warps of a multiprocessor are enough. Clusters must fit in parts of
// the GPU: they do not take more than three of four blocks that have room. Other blocks wait for
// each other before they add up parts: one for each multiprocessor, or more up to kMaxPartsBeside
// parts.
inline constexpr int kMaxClusterOfSplits = 8, kDecodeWarpsOfSm = 9;
inline constexpr int64_t kMaxPartsBeside = 32;

// A warp adds up at least four parts of a row where there are as many.
inline constexpr int kCombineThreads = 256;
constexpr int combine_warps(int splits) {
  return splits > 16 ? 8 : splits > 8 ? 4 : splits > 4 ? 2 : 1;
}

// The gradient of a bias in the same order each time: a block of warps beside each other, each with
// `side` keys and as many queries. A GPU takes the first tile that holds the head dimensions and
// that a block of it has room for. So many steps at most are in shared memory at a time.
struct AttentionBiasGradientTile {
  int head_dim;
  int key_warps, query_warps, side;
  int blocks_per_sm;
  int element_bytes = 2;

  // In registers.
  constexpr bool holds_bias() const { return head_dim == 64 && element_bytes == 2; }
  constexpr int threads() const { return 32 * key_warps * query_warps; }
  constexpr int keys() const { return key_warps * side; }
  constexpr int queries() const { return query_warps * side; }
};
inline constexpr int kMostBiasGradientStages = 4;
// Windows of so many queries and keys have gradients of a bias in order in any case.
inline constexpr int kMostOfSmallWindow = 64;
// Into how many parts those that share an entry are cut, the time tells, in clocks. A
// multiprocessor makes so many scores times the head dimension in one, and the GPU writes and adds
// up so many entries of parts. Parts take so many bytes at most, and so many waves of blocks.
inline constexpr int kWorkOfClock = 256, kPartEntriesOfClock = 256, kClocksOfAddingParts = 4000;
inline constexpr int64_t kMostBiasPartBytes = 256 << 20, kMostWavesOfBiasParts = 12;
// clang-format off
inline constexpr AttentionBiasGradientTile kAttentionBiasGradientTiles[] = {
    // head dim, warps of keys, of queries, side, blocks/SM
    {        32,             2,          2,   32,         4},
    {        64,             2,          2,   32,         3},
    {       128,             4,          2,   32,         1},
    {       128,             2,          2,   32,         1},
    {       256,             2,          2,   32,         1},
    {       256,             2,          2,   16,         1},
    // of float32, with the bytes of an element
    {        32,             2,          2,   32,         2, 4},
    {        64,             2,          2,   32,         1, 4},
    {       128,             2,          2,   16,         2, 4},
};
// clang-format on

// dQ in the same order each time: the queries of a block.
inline constexpr int kInOrderQueries = 64;

// A block of keys against one tile of queries after the other, backward.
struct AttentionBackwardTile {
  int head_dim;
  int warps;
  int queries;  // 64 or 32
  int slice;    // the columns of gradients that a block makes
  int blocks_per_sm;
  int element_bytes = 2;

  constexpr int threads() const { return 32 * warps; }
  // Of a warp: so many queries, and as many keys. Two warps have the same keys.
  constexpr int side() const { return queries / 2; }
  constexpr int keys() const { return side() * warps / 2; }
  // Whether some instances of the kernel sum gradients of queries in turns, or whole. They are
  // instances of their own, since others would lose time.
  constexpr bool has_turns() const { return element_bytes == 2 && head_dim <= 64; }
  // Of a step for dQ in order.
  constexpr int in_order_keys() const { return queries; }
};
// The last column: TFLOP/s of forward and backward together, of the cases of
// kAttentionForwardTiles, without a gradient of the bias. A GPU takes the first tile for a head
// dimension that fits.
// clang-format off
inline constexpr AttentionBackwardTile kAttentionBackwardTiles[] = {
    // head dim, warps, queries, slice, blocks/SM
    {        32,     4,      64,    32,         4},  // 102
    {        64,     4,      64,    64,         3},  // 214
    {       128,     8,      64,   128,         1},  // 255
    {       128,     4,      64,   128,         1},
    {       256,     4,      64,   128,         1},  // 168
    {       256,     4,      32,   256,         1},
    // of float32, with the bytes of an element
    {        32,     4,      64,    32,         2, 4},
    {        64,     8,      64,    64,         1, 4},
    {        64,     4,      32,    64,         3, 4},
    {       128,     4,      32,   128,         2, 4},
};
// clang-format on

}  // namespace megasoftmax
