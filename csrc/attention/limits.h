#pragma once
// Tiles and thresholds of attention: the family's only limits. Plain C++, no CUDA, no torch.

namespace megasoftmax {

// Attention needs compute capability 8.0, the first with bfloat16 and asynchronous copies.
inline constexpr int kLeastMajor = 8;
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxFloatHeadDim = 128;  // of float32
inline constexpr int kMaxScale = 10000;
// Most queries and keys together. The last tile may end later, and its end fits 31 bits too.
inline constexpr int kMaxPositions = 2147000000;
// Most of kDropoutSteps entries that dropout may drop. Below it the bits compare as float16.
inline constexpr int kMaxDropped = 31744;
// Queries, and keys, of a tile of the block mask.
inline constexpr int kMaskTile = 64;
// What a thread may spill, in bytes: bounds and sums that are needed once for a tile, beside its
// products, and slopes of a softcap. With more registers for them fewer blocks would run at a time.
inline constexpr int kMaxSpilledBytes = 220;
// What a thread of Hopper's kernels may spill. Warps that copy, fill tables or add up gradients of
// a bias have 24 to 72 registers each, and products seldom wait for them. The others keep to 220,
// except for a head dimension of 64 with a softcap, or with a bias beside a mask, ranges or
// dropout.
inline constexpr int kHopperMaxSpilledBytes = 700;
// What a thread may spill in kernels of small heads: sums of the gradient of a bias for 144 keys,
// each of which is read and written once in the time of a head.
inline constexpr int kSmallMaxSpilledBytes = 800;
// What a thread may spill in kernels of float32. At a head dimension of 64 the backward pass spills
// a part of its sums while it makes scores.
inline constexpr int kFloatMaxSpilledBytes = 480;
// Bytes of shared memory that a kernel declares itself. Only the kernels of block masks, the one
// that adds up parts of a gradient of a bias and that of hopper_code.cu do, and they use no other.
inline constexpr int kAttentionMaxDeclaredBytes = 4096;

// A block of the portable forward has queries, and takes one tile of keys after the other.
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
// A GPU takes the first tile for a head dimension that fits into the shared memory of a block.
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

// Whether tiles of Hopper's kernels for these dimensions have kernels for a softcap: not all,
// because each takes time to build. Head dimensions between them take the next.
constexpr bool has_softcap_kernels(int head_dim, int value_dim) {
  return head_dim == value_dim && (head_dim == 64 || head_dim == 128 || head_dim == 256);
}

// Kernels for a bias whose rows begin anywhere, up to this head dimension. If more than
// kMostSharersOfRows batches and heads share an entry, a copy to aligned rows takes less time. Rows
// lie at least kFewestOfPitch entries apart.
inline constexpr int kMostHeadDimOfRows = 128, kMostSharersOfRows = 4, kFewestOfPitch = 16;

// A block of Hopper's forward: warpgroups of 64 queries each, and one more that only copies. Both
// have their number of registers a thread.
struct AttentionHopperTile {
  int head_dim, value_dim;  // of queries and keys, and of values
  int warpgroups;
  int keys;
  int copier_registers, registers;
  int bias_stages;   // tiles of the bias in shared memory at a time; 0: no room for one
  int query_stages;  // tiles of queries there; results take the place of theirs

  constexpr bool takes_softcap() const { return has_softcap_kernels(head_dim, value_dim); }
  constexpr bool takes_rows_anywhere() const { return head_dim <= kMostHeadDimOfRows; }
  // Their rows are wider in shared memory. Above a head dimension of 64 there is room for one tile
  // of queries beside them.
  constexpr AttentionHopperTile with_rows_anywhere() const {
    AttentionHopperTile tile = *this;
    if (head_dim > 64) tile.query_stages = 1;
    return tile;
  }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int queries() const { return 64 * warpgroups; }
};
// A launch gives each thread the same number of registers, a multiple of 8. A warpgroup that asks
// for more than the others gave back would wait for ever.
template <class Tile>
constexpr bool shares_registers(const Tile& tile) {
  const int registers = 65536 / tile.threads() / 8 * 8;
  return 128 * (tile.copier_registers + tile.warpgroups * tile.registers) <=
         tile.threads() * registers;
}
// Up to kSmallHeadDim the portable kernels are faster where a launch fills less than kFilledPercent
// of Hopper's tiles.
inline constexpr int kSmallHeadDim = 32, kFilledPercent = 75;
// Blocks are persistent if a tile of queries sees at most this many tiles of keys: a block takes
// several tiles, and the next one starts while the last one ends. With longer tiles one block a
// tile balances better. With a mask of pairs or ranges the lengths are not known. Then persistent
// blocks take their next tile from a counter.
inline constexpr int kMaxStepsOfPersistentBlocks = 8;
// Up to this many keys, or this much work, Hopper's forward reads a mask of keys itself. Work is
// pairs of queries and keys times the head dimension. A launch that makes a block mask would take 2
// to 3 us, longer than the tiles that it lets forward skip.
inline constexpr int kMostKeysWithoutBlockMask = 512;
inline constexpr int64_t kMostWorkWithoutBlockMask = int64_t{64} * (20 << 20);
// Most heads whose tiles lie side by side in a grid. With more, the last tiles do not end together.
inline constexpr int64_t kMaxHeadsOfSection = 128;
// Most heads whose tiles lie side by side where blocks of keys take turns at the gradients of
// queries. Of the portable kernels about as many blocks run at a time. On Hopper sums of few heads
// stay in the L2 cache: see heads_of_turns.
inline constexpr int64_t kHeadsOfTurns = 512, kHopperHeadsOfTurns = 16;
// On Hopper, each block of keys has sums of dQ of its own, without turns or a launch for dQ, if
// these take at most so many bytes. With 33 MB a call of 120 us gained, and one of 60 us lost.
inline constexpr int64_t kMostQuerySumBytes = 16 << 20;
// Up to this many blocks of keys also have sums of their own in deterministic mode, whatever their
// bytes, if they can write them and need no zeros. In any mode a single block does.
inline constexpr int kMostWrittenKeyTiles = 2;
// Hopper's backward has row workers (sm90/backward/row_worker.cuh) if a row sees so many keys times
// columns. With fewer, products end before they do.
inline constexpr int kRowsOfWorkerPiece = 32;
inline constexpr int64_t kFewestWorkOfRow = 48 << 10;
// If lengths are not known, enough heads lie side by side that each has about this many blocks at a
// time.
inline constexpr int64_t kBlocksOfHead = 8;
// The last column: TFLOP/s of [4, 16, 4096, d], bfloat16, without causality or a bias. For 64 and
// 128 cuDNN has 463 and 680.
// clang-format off
inline constexpr AttentionHopperTile kAttentionHopperTiles[] = {
    // dims (head, value), warpgroups, keys, registers (copier, others), stages of bias, of queries
    {           32,    32,          3,  128,  32, 160,            2,            2},
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

// A block of Hopper's backward has keys, and takes one tile of queries after the other. Two
// warpgroups have 64 keys each, and a third one copies. A wide tile has 64 keys in all: one
// warpgroup sums dV, one dK, and the third computes dQ and copies.
struct AttentionHopperBackwardTile {
  int head_dim, value_dim;
  int queries;
  int copier_registers, registers;
  // How many steps of 16 columns of keys and of values registers hold, so that products do not read
  // them from shared memory.
  int held_key_steps, held_value_steps;
  static constexpr int warpgroups = 2;

  constexpr bool takes_softcap() const { return has_softcap_kernels(head_dim, value_dim); }
  constexpr bool takes_rows_anywhere() const { return head_dim <= kMostHeadDimOfRows; }
  constexpr bool is_wide() const { return head_dim > 128; }
  constexpr bool has_turns() const { return true; }
  static constexpr int kStepsOfTurn = 1;
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int keys() const { return is_wide() ? 64 : 64 * warpgroups; }
  // With a bias, warps that sum its gradient need more registers, and those for a table more than
  // others, because they make products too.
  constexpr AttentionHopperBackwardTile with_bias(bool is_table) const {
    AttentionHopperBackwardTile tile = *this;
    if (head_dim < 128 || is_table) {
      tile.copier_registers = 40;
      tile.registers = 232;
    }
    // Registers are few beside a bias.
    tile.held_key_steps = 0;
    if (head_dim == 64 || is_table) tile.held_value_steps = 0;
    return tile;
  }
  // Warps of the copying warpgroup bring rows that begin anywhere to their tile, and need more.
  constexpr AttentionHopperBackwardTile with_rows_anywhere() const {
    AttentionHopperBackwardTile tile = *this;
    tile.copier_registers = head_dim > 64 ? 40 : 56;
    tile.registers = head_dim > 64 ? 232 : 224;
    tile.held_key_steps = tile.held_value_steps = 0;
    return tile;
  }
};
// Most batches that share a bias and sum its gradient in a cluster of blocks. Their number is a
// power of 2, so that the parts of a tile are equal.
inline constexpr int kMaxBiasCluster = 8;
// The last column: TFLOP/s of forward and backward together, [4, 16, 4096, d], bfloat16. For 64 and
// 128 cuDNN has 456 and 598.
// clang-format off
inline constexpr AttentionHopperBackwardTile kAttentionHopperBackwardTiles[] = {
    // dims (head, value), queries, registers (that copies, others), held steps (of keys, of values)
    {           32,    32,     128,  24, 240,                               0,      0},
    {           48,    48,     128,  24, 240,                               3,      3},
    {           64,    64,     128,  24, 240,                               0,      4},  // 538
    {           80,    80,      64,  24, 240,                               2,      5},
    {           96,    96,      64,  24, 240,                               2,      6},
    {          128,   128,      64,  24, 240,                               0,      0},  // 637
    {          192,   128,      64,  72, 216,                               0,      0},
    {          192,   192,      64,  72, 216,                               0,      0},
    {          256,   256,      64,  72, 216,                               0,      0},
};
// clang-format on

// A block of Hopper's backward that takes whole heads: each warpgroup has 128 of their keys.
struct AttentionHopperHeadsTile {
  int warpgroups, registers;
  static constexpr int head_dim = 32, kQueries = 64, kCopierRegisters = 24;

  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int keys() const { return 128 * warpgroups; }
};
// clang-format off
inline constexpr AttentionHopperHeadsTile kAttentionHopperHeadsTiles[] = {
    // warpgroups, registers
    {           2,  240},
    {           3,  160},
};
// clang-format on
// A unit of keys of a head takes the time of kKeysOfUnit keys more than its keys. Whole heads are
// taken where a launch fills enough of their rounds, units and tiles of queries:
// kFilledPercentOfHeads if Hopper's other kernels would run, kFilledPercentOfHeadsAlone if the
// portable ones would.
inline constexpr int kKeysOfUnit = 256;
inline constexpr int kFilledPercentOfHeads = 70, kFilledPercentOfHeadsAlone = 50;

// A block of Hopper's forward that keeps the bias of its queries and takes the heads that share it:
// two warpgroups of 64 queries, all keys in steps. Registers keep the bias, or, up to many keys,
// registers and shared memory a half each. A stage holds a whole head, or kCopyKeys keys if the
// bias is halved.
struct AttentionHopperHeadsForwardTile {
  int head_dim, keys, step_keys, stages, filled_percent;
  bool halves_bias;
  static constexpr int warpgroups = 2, copier_registers = 24, registers = 240;
  static constexpr int kCopyKeys = 128;

  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int queries() const { return 64 * warpgroups; }
  constexpr int stage_keys() const { return halves_bias ? kCopyKeys : keys; }
};
// clang-format off
inline constexpr AttentionHopperHeadsForwardTile kAttentionHopperHeadsForwardTiles[] = {
    // head dim, keys, of a step, stages, filled percent, halves the bias
    {        32,  256,        64,      4,             45, false},
    {        32,  384,        64,      3,             45, false},
    {        32,  512,        32,      2,             45, false},
    {        32,  640,        64,      5,             45, true},
    {        32,  768,        64,      5,             45, true},
    {        32,  896,        32,      4,             45, true},
    {        32, 1024,        32,      3,             45, true},
    {        64,  256,        64,      2,             52, false},
};
// clang-format on
// A tile is taken where a launch fills filled_percent of its rounds and tiles, and a block has
// enough heads after it has loaded the bias. With fewer heads, kernels that copy tiles of the bias
// are faster than those that halve it.
inline constexpr int kFewestMembersOfBias = 4, kFewestMembersOfHalvedBias = 96;

// dB of a shared bias, summed in order on Hopper: each warpgroup has 64 queries and all keys.
struct AttentionHopperBiasGradientTile {
  int head_dim, warpgroups, tile_keys, registers;
  int stages;   // members in shared memory at a time
  int percent;  // measured time of an entry, of what kWorkOfClock says
  // Blocks take several tiles. Up to a head dimension of 32 that makes the launch 2 to 12% slower.
  constexpr bool is_persistent() const { return head_dim > 32; }
  // Registers of a thread of the copying warpgroup: what the others leave of a launch.
  constexpr int copier_registers() const {
    return 65536 / threads() / 8 * 8 * (warpgroups + 1) - warpgroups * registers;
  }
  // What a part takes to load the bias and to store sums, measured without persistent blocks.
  static constexpr int kStepsOfStart = 6;

  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int queries() const { return 64 * warpgroups; }
  constexpr int keys() const { return tile_keys; }
  // Whether there is a kernel for HopperMask::kAny. Bits of masks and of dropout come in words of
  // 32 keys, and three warpgroups lack registers for them. A copying thread has one query.
  constexpr bool takes_any_mask() const { return warpgroups == 2 && tile_keys == 128; }
};
// clang-format off
inline constexpr AttentionHopperBiasGradientTile kAttentionHopperBiasGradientTiles[] = {
    // head dim, warpgroups, keys, registers, stages, percent
    {        32,          2,  128,       232,      4,     100},
    {        32,          3,  128,       160,      4,      95},
    {        64,          2,  128,       216,      2,     100},
    {        64,          3,  128,       152,      2,      80},
    {        64,          2,  112,       224,      3,     100},
};
// clang-format on

// Decoding, up to 16 queries: a warp takes 16 rows, the queries of all heads that share keys, and
// 16 keys at a time through a ring of kDecodeStages stages. The rings of a block take at most 96
// KB, which every GPU has.
inline constexpr int kMaxDecodeQueries = 16, kDecodeKeys = 16, kDecodeStages = 2;
constexpr int decode_warps(int head_dim) { return head_dim > 128 ? 3 : head_dim > 64 ? 6 : 8; }
// Sets the register budget. Shared memory may have room for one block only. With two, one block
// reads while the other begins or ends, and clusters find room.
inline constexpr int kDecodeBlocksPerSm = 2;
// Fewest keys of a split: what the warps of a block take at a time.
constexpr int fewest_keys_of_decode_split(int head_dim) {
  return decode_warps(head_dim) * kDecodeKeys;
}
// Decoding reads all keys for each 16 rows. With more queries than this, heads that share keys take
// Hopper's kernels, whose blocks read keys once for several heads.
inline constexpr int kMostQueriesOfSharedRows = 8;

// Head dimensions above kMaxHeadDim, forward only: the largest one of queries and keys, and of
// values. A block has kWideRows rows, which are queries of heads that share keys, and takes
// kWideKeys keys a step. Only GPUs of these major numbers have enough shared memory for a block.
inline constexpr int kMaxWideHeadDim = 576, kMaxWideValueDim = 512;
inline constexpr int kWideRows = 64, kWideKeys = 32, kWideThreads = 256;
inline constexpr int kFirstWideMajor = 9, kLastWideMajor = 10;

// If a launch has too few blocks for a GPU, keys are split: several blocks have the same queries,
// and each takes a part of the keys, at least kFewestKeysOfSplit. The number of splits fills whole
// waves of blocks, at most kMaxWavesOfSplits. splits_for takes the number with the least estimated
// time. Its unit is the time of a key in a block. A wave takes the keys of a block plus
// kKeysOfStart, and kKeysOfPart for each row, to write and read a part. Blocks do not end together:
// 1 / kImbalance of a wave is lost. The launch that adds up parts takes kKeysOfLaunch.
inline constexpr int kFewestKeysOfSplit = 256, kMaxWavesOfSplits = 8;
inline constexpr int kKeysOfStart = 128, kKeysOfPart = 2, kKeysOfLaunch = 256, kImbalance = 16;

// Decoding splits keys in one of two ways. Clusters of up to kMaxClusterOfSplits blocks with the
// same queries add up parts in shared memory. They are used if they keep at least half as many
// blocks busy as the other way would. kDecodeWarpsOfSm warps saturate a multiprocessor, and
// clusters fill at most three quarters of the blocks that have room. The other way: all blocks of a
// cooperative launch wait for each other, then add up parts from the workspace. It has one block
// per multiprocessor, or more with up to kMaxPartsBeside parts.
inline constexpr int kMaxClusterOfSplits = 8, kDecodeWarpsOfSm = 9;
inline constexpr int64_t kMaxPartsBeside = 32;

// A warp adds up at least four parts of a row, if there are four.
inline constexpr int kCombineThreads = 256;
constexpr int combine_warps(int splits) {
  return splits > 16 ? 8 : splits > 8 ? 4 : splits > 4 ? 2 : 1;
}

// A block of the deterministic gradient of a bias. Each warp has `side` keys and `side` queries. A
// GPU takes the first tile for a head dimension that fits into the shared memory of a block.
struct AttentionBiasGradientTile {
  int head_dim;
  int key_warps, query_warps, side;
  int blocks_per_sm;
  int element_bytes = 2;
  static constexpr int percent = 100, kStepsOfStart = 0;  // as in the table above

  // Whether the tile of the bias stays in registers.
  constexpr bool holds_bias() const { return head_dim == 64 && element_bytes == 2; }
  constexpr int threads() const { return 32 * key_warps * query_warps; }
  constexpr int keys() const { return key_warps * side; }
  constexpr int queries() const { return query_warps * side; }
};
// Most steps in shared memory at a time.
inline constexpr int kMostBiasGradientStages = 4;
// Up to this many queries and keys, the gradient of a shared bias is always summed in order.
inline constexpr int kMostOfSmallWindow = 64;
// The batches and heads that share an entry are cut into the number of parts with the least
// estimated time, in clocks. In a clock a multiprocessor makes kWorkOfClock scores times the head
// dimension, and the GPU writes and adds up kPartEntriesOfClock entries of parts. Parts take at
// most kMostBiasPartBytes, and kMostWavesOfBiasParts waves of blocks.
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

// Queries of a block of the kernel that sums dQ in order.
inline constexpr int kInOrderQueries = 64;

// A block of the portable backward has keys, and takes one tile of queries after the other.
struct AttentionBackwardTile {
  int head_dim;
  int warps;
  int queries;  // 64 or 32
  int slice;    // the columns of gradients that a block makes
  int blocks_per_sm;
  int element_bytes = 2;

  constexpr int threads() const { return 32 * warps; }
  // Queries of a warp, and keys. Two warps have the same keys.
  constexpr int side() const { return queries / 2; }
  constexpr int keys() const { return side() * warps / 2; }
  // Whether the kernel has instances that sum gradients of queries in turns, or whole. Other
  // instances would lose time if they could do both.
  constexpr bool has_turns() const { return element_bytes == 2 && head_dim <= 64; }
  // A block must have so many steps for each that it waits for where it takes turns.
  static constexpr int kStepsOfTurn = 2;
  // Keys of a step of the kernel that sums dQ in order.
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

// Small heads, of few queries and keys, that share a bias or have none: a block takes the batches
// and heads that share it one after the other. A warp has 16 queries. With up to 64 keys registers
// hold the bias, in float32. With more it is in shared memory, and must be of the queries' type.
// The kernels are for 16-bit elements without dropout. Backward, up to so many keys, sum(dO O) of a
// row is taken from its weights and gradients of these: no output is read.
inline constexpr int kMostKeysWithoutOutput = 64;
struct AttentionSmallTile {
  int head_dim;
  int side;                             // queries, and keys
  int forward_blocks, backward_blocks;  // of a multiprocessor: the compiler's register budget

  constexpr int threads() const { return 2 * side; }
  constexpr bool holds_bias() const { return side <= kMostKeysWithoutOutput; }
};
// clang-format off
inline constexpr AttentionSmallTile kAttentionSmallTiles[] = {
    // head dim, side, blocks/SM (forward, backward)
    {        32,   64,       4,       3},
    {        64,   64,       3,       2},
    {        32,  144,       2,       1},
};
// clang-format on
inline constexpr int kSmallStages = 2;  // members in shared memory at a time
// Fewest batches and heads that share an entry of the bias, and fewest heads of all batches without
// a bias. With fewer, other kernels begin sooner.
inline constexpr int kFewestSmallMembers = 4, kFewestSmallHeads = 1024;
// Where a block takes the heads that share a bias: to begin and to end takes the time of
// kMembersOfStart heads. Blocks are as many as run at a time, or up to kMostWavesOfMembers times as
// many.
inline constexpr int kMembersOfStart = 2, kMostWavesOfMembers = 4;

}  // namespace megasoftmax
