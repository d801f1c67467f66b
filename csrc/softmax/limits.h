#pragma once
// Row regimes of the softmax, forward and backward: the family's only limits. Plain C++, no CUDA,
// no torch.
//
// A row is cut into chunks of 16 bytes. Short rows: each thread of a row's owner holds its chunks
// in registers. Long rows: chunks form units, each of them summed by one warp, which wait in shared
// memory between the pass that sums and the pass that writes, or are read twice. The units of a row
// depend on its length alone, and are added up in one order: a row's bits are the same in one
// block, in a cluster or spread over the whole GPU.

#include <cstdint>

#include "../common/host_device.h"
#include "../common/limits.h"

namespace megasoftmax {

enum class Storage {
  kTile,       // a block's rows together in shared memory, see flat.cuh
  kRegisters,  // one batch of chunks per thread
  kShared,     // units, which wait in shared memory
  kReread,     // units, any number of them, through rings in shared memory; read twice if longer
  kDense,      // units of dense rows, in the registers of a warp each, see dense.cuh
};

// What a kernel is compiled for.
struct KernelShape {
  Storage storage;
  int threads_per_row;  // of a block
  int rows_per_block;
  int chunks_per_thread;  // of a batch: loads in flight per thread
  int blocks_per_sm;      // the compiler's register budget: 65536 / (threads * blocks)
  bool takes_turns;       // a block takes one row after the other, and prefetches
  bool may_share_rows;    // several blocks may own a row

  constexpr int threads() const { return threads_per_row * rows_per_block; }
  // May a warp take two rows that share random numbers of dropout?
  constexpr bool may_hold_pairs() const {
    return storage == Storage::kRegisters && threads_per_row == 16;
  }
  bool operator==(const KernelShape&) const = default;
};

// What a launch asks of its rows; a regime may serve several.
enum Rows : unsigned {
  kPlain = 1,          // no mask, no window, a whole number of chunks, not kDense
  kLimited = 2,        // causal, or with a wide window
  kMasked = 4,         // with a bool mask, a whole number of chunks
  kNarrow = 8,         // of which a window leaves at most half: most of the work is zeros
  kBiasGradient = 16,  // backward, with sums that want registers; a block each
  kTiny = 32,          // plain or uneven ones of a contiguous tensor, of few columns
  kUneven = 64,        // as kPlain, but not a whole number of chunks
  kDropped = 128,      // with dropout, whatever else; backward without a bias gradient
  kDroppedBiasGradient = 256,
  kCostly = 512,        // with a bias, or uneven with a mask: what registers read once
  kDense = 1024,        // of a contiguous tensor, nothing but a scale, a whole number of chunks
  kDenseUneven = 2048,  // as kDense, but not a whole number of chunks
  kCommon = kPlain | kUneven | kLimited | kMasked | kCostly,
  kAnyRows = kCommon | kBiasGradient,
  kSpread = kCommon | kDense,  // may lie over several blocks
};

struct RowRegime {
  char name[16];
  Storage storage;
  int threads_per_row;
  int rows_per_block;
  int chunks_per_thread;
  int blocks_per_sm;
  bool takes_turns;
  int blocks_per_row;  // more than 1: a cluster
  int max_chunks;      // visible chunks of a row
  int min_rows;        // fewer rows are served better by more blocks for each
  unsigned serves;     // Rows

  constexpr KernelShape shape() const {
    return {storage,
            threads_per_row,
            rows_per_block,
            chunks_per_thread,
            blocks_per_sm,
            takes_turns,
            storage == Storage::kReread ? takes_turns : blocks_per_row != 1};
  }
  constexpr int rings() const { return threads_per_row / 32; }  // of a block, one for each warp
  // The blocks of a cluster lie in one of a GPU's groups of multiprocessors, of which there are at
  // most 8. With so many multiprocessors, one of the groups has room where each block is alone.
  constexpr int least_multiprocessors() const {
    return blocks_per_sm == 1 && blocks_per_row > 1 ? 8 * blocks_per_row : 0;
  }
};

inline constexpr int kUnlimited = INT32_MAX;
inline constexpr int kChunksPerBatch = 4 * 32;  // that a warp sums at a time, of long rows
inline constexpr int kUnitBatches = 1, kMaxUnits = 2048;
inline constexpr int kUnitsOfWarp = 512;        // that each warp joins, of a row that is read twice
inline constexpr int kMostDenseThreads = 1024;  // of a block with a warp for each unit
inline constexpr int kRingBytes = 8 * 1024;     // for each warp of rows read twice, at least
inline constexpr int kResultBytes = 8;          // of a unit
// Of a block: two of them fit a multiprocessor, or one that has it alone.
inline constexpr int kMaxSharedBytes = 110 * 1024, kMaxSharedBytesAlone = 220 * 1024;
// Of a block, which kernels declare themselves; narrow rows have kZeroBytes too. Dense rows need
// nothing else to speak of.
inline constexpr int kMaxDeclaredBytes = 192;
inline constexpr int kDenseMaxDeclaredBytes = 1024;
// Of registers, in those of uneven rows, and in rows of float32 in registers that may be uneven. No
// other kernel spills any.
inline constexpr int kDenseMaxSpilledBytes = 8;
inline constexpr int kFloatRowMaxSpilledBytes = 56;
inline constexpr int kWholeGpu = 0;  // blocks per row: as many as run at a time, over all rows
// Of so many rows the whole GPU takes two at a time, even if its shared memory does not keep them.
inline constexpr int64_t kManyRows = 32;
// A narrow row has at least kLongRow chunks in all and at most kNarrowRow visible ones.
inline constexpr int64_t kLongRow = 128, kNarrowRow = 256;
// What a row shows begins at a multiple of so many chunks, 128 bytes of a 2-byte type: zeros ahead
// of it end where a line of the caches ends, and no line is written in two parts.
inline constexpr int kLineChunks = 8;
// Uneven rows of at least so many chunks are cut where lines begin, if nothing is read with them.
inline constexpr int kAlignedChunks = 32;
// Tiny rows have fewer than kTinyColumns; uneven ones, which cost registers more, up to so many.
inline constexpr int64_t kTinyColumns = 128, kTinyUnevenColumns = 512;
// Forward, rows of more chunks are dense ones instead, where they may be and all begin at a sector
// of the caches, 32 bytes: else lanes load and store parts of sectors.
inline constexpr int64_t kTinyChunks = 4, kSectorChunks = 2;
// Kernels count batches * heads, queries and columns in 32 bits, and a window's borders with them;
// loops run past the end by a unit.
inline constexpr int64_t kMaxIndex = INT32_MAX - 4194304;

// Beside a regime: another that could serve in its place, how much longer that takes on an H200,
// and for how many columns of bfloat16, by tune_softmax.py: where the difference is largest. The
// columns are those of plain rows of 64 MiB unless it says otherwise. Other regimes have no stored
// figure.
// The last rows of each table are for blocks that have no room for the rings of 8 warps, on
// compute capability 7.5: those of 2 warps fit several times. With dropout all GPUs take them: so
// long rows are rare there, and these kernels take the longest to compile.
// clang-format off
inline constexpr RowRegime kForwardRegimes[] = {
    // name          storage              threads rows chunks blocks/SM  turns blocks/row max chunks min rows serves
    {"tile",         Storage::kTile,          0,   0,     0,        0,  false,         1,        136,       0, kTiny},
    {"across_8",     Storage::kDense,         4,  16,     2,       24,  false,         1,          8,       0, kDense},  // dense_4 5%, 64
    {"dense_4",      Storage::kDense,         4,  16,     4,       18,  false,         1,         16,       0, kDense},  // dense_8 11%, 96
    {"dense_8",      Storage::kDense,         8,   8,     4,       18,  false,         1,         32,       0, kDense},  // dense_16 10%, 192
    {"dense_16",     Storage::kDense,        16,   4,     4,       18,  false,         1,         64,       0, kDense | kDenseUneven},  // dense_32 9%, 384
    {"dense_32",     Storage::kDense,        32,   2,     4,       18,  false,         1,        128,    2100, kDense | kDenseUneven},  // dense_1024 5%, uneven 767
    {"dense_128",    Storage::kDense,       128,   1,     1,       16,  false,         1,        128,       0, kDense | kDenseUneven},
    {"dense_1024",   Storage::kDense,      1024,   1,     4,        1,  false,         1,        512,       0, kDense | kDenseUneven},  // shared_128 61%, 1536
    {"dense_1024",   Storage::kDense,      1024,   1,     4,        1,  false,         1,       1024,       0, kDense},  // shared_256 18%, 256 rows of 6144
    {"lanes_4x1",    Storage::kRegisters,     4,  16,     1,       16,  false,         1,          4,       0, kAnyRows},
    {"lanes_4x4",    Storage::kRegisters,     4,  16,     4,       16,  false,         1,         16,       0, kAnyRows},  // lanes_8x4 65%, causal 64
    {"lanes_8x4",    Storage::kRegisters,     8,   8,     4,       16,  false,         1,         32,       0, kAnyRows},  // lanes_16x4 47%, masked 192
    {"lanes_16x4",   Storage::kRegisters,    16,   4,     4,       16,  false,         1,         64,       0, kAnyRows | kDropped},  // lanes_16x5 9%, causal 384
    {"lanes_16x5",   Storage::kRegisters,    16,   4,     5,       14,  false,         1,         80,       0, kAnyRows},
    {"lanes_16x8",   Storage::kRegisters,    16,   4,     8,       14,  false,         1,        128,       0, kDropped},
    {"narrow_64x1",  Storage::kRegisters,    64,   1,     1,       18,  false,         1,         64,       0, kNarrow},
    {"warp_32x4",    Storage::kRegisters,    32,   2,     4,       16,  false,         1,        128,       0, kAnyRows | kNarrow},  // warp_32x5 8%, causal 768
    {"warp_32x5",    Storage::kRegisters,    32,   2,     5,       14,  false,         1,        160,       0, kAnyRows},
    {"narrow_128x2", Storage::kRegisters,   128,   1,     2,       10,  false,         1,        256,       0, kNarrow},
    {"block_64x4",   Storage::kRegisters,    64,   1,     4,       18,  false,         1,        256,       0, kUneven | kLimited | kMasked | kCostly},  // block_64x5 5%, masked 1536
    {"block_64x5",   Storage::kRegisters,    64,   1,     5,       16,  false,         1,        320,       0, kUneven | kMasked | kCostly},
    {"block_128x4",  Storage::kRegisters,   128,   1,     4,        9,  false,         1,        512,       0, kCostly},
    {"block_128x5",  Storage::kRegisters,   128,   1,     5,        8,  false,         1,        640,       0, kUneven | kCostly},
    {"block_256x4",  Storage::kRegisters,   256,   1,     4,        4,  false,         1,       1024,       0, kCostly},
    {"shared_32",    Storage::kShared,       32,   1,     4,       32,  false,         1,        400,    2000, kPlain | kLimited | kMasked},  // shared_64 8%, causal 3072
    {"shared_64",    Storage::kShared,       64,   1,     4,       16,  false,         1,        800,    1000, kPlain | kUneven | kLimited | kMasked | kDropped},  // shared_128 8%, causal 4096
    {"shared_128",   Storage::kShared,      128,   1,     4,        6,  false,         1,       1540,     500, kSpread},  // shared_256 20%, uneven 8191
    {"shared_256",   Storage::kShared,      256,   1,     4,        4,  false,         1,       4480,      40, kPlain | kLimited | kMasked | kCostly | kDropped},
    {"shared_256",   Storage::kShared,      256,   1,     4,        4,  false,         1,       4480,      80, kUneven},  // shared_512 34%, uneven 12287
    {"shared_256",   Storage::kShared,      256,   1,     4,        4,  false,         1,       3400,     132, kDense},  // shared_512 9%, 20480
    {"cluster_2",    Storage::kShared,      256,   1,     4,        4,  false,         2,       8960,     500, kDense},  // shared_512 3%, 50256
    {"shared_256",   Storage::kShared,      256,   1,     4,        4,  false,         1,       4480,     132, kDense},
    {"cluster_2",    Storage::kShared,      256,   1,     4,        4,  false,         2,       8960,    2000, kUneven},
    {"shared_512",   Storage::kShared,      512,   1,     4,        2,  false,         1,       6656,      80, kCommon},  // cluster_2 17%, uneven 256 rows of 50257
    {"shared_512",   Storage::kShared,      512,   1,     4,        2,  false,         1,       6656,     132, kDense},  // dense_x8 13%, 256 rows of 49152
    {"cluster_2",    Storage::kShared,      256,   1,     4,        4,  false,         2,       8960,     100, kCommon | kDropped},
    {"cluster_2",    Storage::kShared,      256,   1,     4,        4,  false,         2,       8960,     132, kDense},  // cluster_128x8 2%, 256 rows of 65536
    {"dense_x8",     Storage::kDense,      1024,   1,     4,        1,  false,         8,       8192,      17, kDense},  // cluster_2 22%, 64 rows of 24576
    {"dense_x8",     Storage::kDense,      1024,   1,     4,        1,  false,         8,       8192,       0, kDenseUneven},
    {"shared_256",   Storage::kShared,      256,   1,     4,        4,  false,         1,       4480,      40, kDense | kUneven},  // without clusters; and uneven rows that are not dense
    {"shared_512",   Storage::kShared,      512,   1,     4,        2,  false,         1,       6656,      60, kDense | kCommon},  // without clusters; and others of 60 to 79 rows
    {"cluster_4",    Storage::kShared,      256,   1,     4,        4,  false,         4,      13600,      40, kPlain | kUneven | kLimited | kMasked},  // cluster_128x8 3%, uneven 98303
    {"cluster_4",    Storage::kShared,      256,   1,     4,        4,  false,         4,      17408,      40, kCostly | kDropped},  // their registers leave room for three blocks at most
    {"cluster_4",    Storage::kShared,      256,   1,     4,        4,  false,         4,      13600,      66, kDense},
    {"cluster_128x8", Storage::kShared,     128,   1,     4,        6,  false,         8,      17408,     130, kSpread},  // cluster_8 3%, 256 rows of 131072
    {"cluster_8",    Storage::kShared,      256,   1,     4,        4,  false,         8,      17408,      66, kDense},
    {"dense_x8",     Storage::kDense,      1024,   1,     4,        1,  false,         8,       4096,       0, kDense},  // cluster_4 23%, 16 rows of 10240
    {"dense_x16",    Storage::kDense,      1024,   1,     4,        1,  false,        16,      17408,       0, kDense},  // cluster_16 20%, 4 rows of 98304
    {"shared_256",   Storage::kShared,      256,   1,     4,        4,  false,         1,       1100,       0, kSpread | kDropped},
    {"shared_512",   Storage::kShared,      512,   1,     4,        2,  false,         1,       2050,       0, kSpread},
    {"cluster_8",    Storage::kShared,      256,   1,     4,        4,  false,         8,      26600,      17, kSpread | kDropped},  // cluster_16 26%, uneven 151935
    {"cluster_8",    Storage::kShared,      256,   1,     4,        4,  false,         8,      33792,     100, kSpread | kDropped},  // cluster_16 5%, 256 rows of 262144
    {"cluster_16",   Storage::kShared,      256,   1,     4,        4,  false,        16,      32768,      17, kDense},  // cluster_8 2%, 64 rows of 262144
    {"dense_x16",    Storage::kDense,      1024,   1,     4,        1,  false,        16,      32768,       0, kDense},  // cluster_8 24%, 1 row of 151936
    {"cluster_8",    Storage::kShared,      256,   1,     4,        4,  false,         8,      10000,       0, kSpread | kDropped},
    {"cluster_16",   Storage::kShared,      256,   1,     4,        4,  false,        16,      32768,       0, kSpread | kDropped},
    {"cluster_16",   Storage::kShared,      256,   1,     4,        4,  false,        16,      65536,       4, kSpread | kDropped},  // whole_gpu 24%, 256 rows of 393216
    {"cluster_8",    Storage::kShared,      256,   1,     4,        4,  false,         8,      33792,      17, kSpread | kDropped},  // without clusters of 16
    {"whole_gpu",    Storage::kReread,      256,   1,     4,        2,   true, kWholeGpu,     262144,       0, kSpread},  // whole_gpu_512 9%, 1 row of 393216
    {"whole_gpu_512", Storage::kReread,     512,   1,     4,        1,   true, kWholeGpu, kUnlimited,       0, kPlain | kDense | kUneven},
    {"whole_gpu",    Storage::kReread,      256,   1,     4,        2,   true, kWholeGpu, kUnlimited,       0, kSpread},
    {"whole_gpu_64", Storage::kReread,       64,   1,     4,        6,   true, kWholeGpu, kUnlimited,       0, kSpread | kDropped},
};
inline constexpr RowRegime kBackwardRegimes[] = {
    {"tile",         Storage::kTile,          0,   0,     0,        0,  false,         1,        136,       0, kTiny},
    {"dense_8",      Storage::kDense,         8,   8,     4,       16,  false,         1,         32,       0, kDense},  // dense_16 15%, 128
    {"dense_16",     Storage::kDense,        16,   4,     4,       16,  false,         1,         64,       0, kDense | kDenseUneven},  // dense_32 4%, 384
    {"dense_32",     Storage::kDense,        32,   2,     4,       16,  false,         1,        128,    2100, kDense | kDenseUneven},
    {"dense_128",    Storage::kDense,       128,   1,     1,       16,  false,         1,        128,       0, kDense | kDenseUneven},
    {"dense_1024",   Storage::kDense,      1024,   1,     4,        1,  false,         1,        322,       0, kDense | kDenseUneven},
    {"dense_1024",   Storage::kDense,      1024,   1,     4,        1,  false,         1,       1024,       0, kDense},  // shared_256 37%, 4 rows of 6144
    {"dense_1024",   Storage::kDense,      1024,   1,     4,        1,  false,         1,       2176,     200, kDense},  // shared_256 27%, 256 rows of 10240
    {"lanes_4x1",    Storage::kRegisters,     4,  16,     1,       14,  false,         1,          4,       0, kAnyRows},
    {"lanes_4x4",    Storage::kRegisters,     4,  16,     4,       12,  false,         1,         16,       0, kAnyRows},  // lanes_8x4 48%, causal 64
    {"lanes_8x4",    Storage::kRegisters,     8,   8,     4,       12,  false,         1,         32,       0, kAnyRows},  // lanes_16x4 35%, causal 192
    {"lanes_16x4",   Storage::kRegisters,    16,   4,     4,       12,  false,         1,         64,       0, kAnyRows | kDropped | kDroppedBiasGradient},  // warp_32x4 38%, causal 384
    {"lanes_16x8",   Storage::kRegisters,    16,   4,     8,       10,  false,         1,        128,       0, kDropped},
    {"narrow_64x1",  Storage::kRegisters,    64,   1,     1,       18,  false,         1,         64,       0, kNarrow},
    {"warp_32x4",    Storage::kRegisters,    32,   2,     4,       12,  false,         1,        128,       0, kNarrow | kUneven | kLimited | kBiasGradient | kDroppedBiasGradient},  // warp_32x5 8%, causal 768
    {"warp_32x5",    Storage::kRegisters,    32,   2,     5,       10,  false,         1,        160,       0, kUneven | kLimited | kBiasGradient},
    {"block_64x4",   Storage::kRegisters,    64,   1,     4,       14,  false,         1,        256,       0, kUneven | kBiasGradient},
    {"narrow_128x2", Storage::kRegisters,   128,   1,     2,        8,  false,         1,        256,       0, kNarrow},
    {"block_64x5",   Storage::kRegisters,    64,   1,     5,       12,  false,         1,        320,       0, kUneven | kBiasGradient},
    {"shared_32",    Storage::kShared,       32,   1,     4,       32,  false,         1,        322,       0, kPlain | kLimited},  // shared_64 31%, causal 1536
    {"block_128x4",  Storage::kRegisters,   128,   1,     4,        7,  false,         1,        512,       0, kBiasGradient},
    {"block_128x5",  Storage::kRegisters,   128,   1,     5,        6,  false,         1,        640,       0, kBiasGradient},
    {"shared_64",    Storage::kShared,       64,   1,     4,       14,  false,         1,        640,    1000, kCommon | kDropped},  // shared_128 15%, causal 3072
    {"shared_128",   Storage::kShared,      128,   1,     4,        6,  false,         1,       1032,     500, kAnyRows},
    {"shared_256",   Storage::kShared,      256,   1,     4,        3,  false,         1,       2176,      60, kAnyRows | kDropped | kDroppedBiasGradient},
    {"cluster_2",    Storage::kShared,      256,   1,     4,        3,   true,         2,       4352,      60, kCommon | kDropped},
    {"turns_512x2",  Storage::kShared,      512,   1,     4,        1,   true,         2,      10240,     250, kUneven},
    {"cluster_4",    Storage::kShared,      256,   1,     4,        3,   true,         4,       8704,      30, kCommon | kDropped},
    {"dense_x8",     Storage::kDense,      1024,   1,     4,        1,  false,         8,       8192,      17, kDense},  // dense_x16 21%, 64 rows of 32768
    {"dense_x8",     Storage::kDense,      1024,   1,     4,        1,  false,         8,       8192,       0, kDenseUneven},
    {"dense_x8",     Storage::kDense,      1024,   1,     4,        1,  false,         8,       4096,       0, kDense},  // dense_1024 18%, 16 rows of 12288
    {"dense_x16",    Storage::kDense,      1024,   1,     4,        1,  false,        16,      32768,       0, kDense},  // turns_512x16 40%, 1 row of 131072
    {"shared_256",   Storage::kShared,      256,   1,     4,        3,  false,         1,       2176,      60, kDense},  // without clusters
    {"dense_1024",   Storage::kDense,      1024,   1,     4,        1,  false,         1,       4096,     200, kDense},  // likewise
    {"shared_256",   Storage::kShared,      256,   1,     4,        3,  false,         1,       1100,       0, kAnyRows | kDropped | kDroppedBiasGradient},
    {"cluster_8",    Storage::kShared,      256,   1,     4,        3,   true,         8,      17408,      30, kSpread | kDropped},  // turns_512x4 8%, uneven 98303
    {"turns_512x4",  Storage::kShared,      512,   1,     4,        1,   true,         4,      20480,     125, kPlain | kDense | kUneven},
    {"turns_512x8",  Storage::kShared,      512,   1,     4,        1,   true,         8,      40960,     100, kPlain | kDense | kUneven},
    {"cluster_8",    Storage::kShared,      256,   1,     4,        3,   true,         8,       9000,       0, kSpread | kDropped},
    {"cluster_16",   Storage::kShared,      256,   1,     4,        3,   true,        16,      32768,       0, kSpread | kDropped},
    {"turns_512x16", Storage::kShared,      512,   1,     4,        1,   true,        16,      65536,      40, kPlain | kDense | kUneven},  // reread_16 13%, 393216
    {"reread_16",    Storage::kReread,      512,   1,     4,        1,   true,        16,      98304,      30, kPlain | kDense | kUneven},  // whole_gpu 13%, 786432
    {"whole_gpu",    Storage::kReread,      256,   1,     4,        2,   true, kWholeGpu,     262144,       0, kSpread},  // whole_gpu_512 12%, 1 row of 393216
    {"whole_gpu_512", Storage::kReread,     512,   1,     4,        1,   true, kWholeGpu, kUnlimited,       0, kPlain | kDense | kUneven},
    {"whole_gpu",    Storage::kReread,      256,   1,     4,        2,   true, kWholeGpu, kUnlimited,       0, kSpread},
    {"reread_1",     Storage::kReread,      256,   1,     4,        3,  false,         1, kUnlimited,       0, kBiasGradient},
    {"whole_gpu_64", Storage::kReread,       64,   1,     4,        6,   true, kWholeGpu, kUnlimited,       0, kSpread | kDropped},
    {"reread_64",    Storage::kReread,       64,   1,     4,        8,  false,         1, kUnlimited,       0, kBiasGradient | kDroppedBiasGradient},
};
// clang-format on

// The first regime with the same kernel: nvcc takes no structs as template arguments of kernels.
template <int kCount>
constexpr int kernel_of(const RowRegime (&table)[kCount], int index) {
  int first = 0;
  while (table[first].shape() != table[index].shape()) ++first;
  return first;
}

// Units of rows of so many chunks, and batches of a unit: more where a row would have more than
// kMaxUnits.
constexpr int unit_batches(int64_t chunks) {
  int batches = kUnitBatches;
  while (int64_t{batches} * kChunksPerBatch * kMaxUnits < chunks) batches *= 2;
  return batches;
}
constexpr int unit_count(int64_t chunks) {
  const int64_t unit_chunks = int64_t{unit_batches(chunks)} * kChunksPerBatch;
  return static_cast<int>((chunks + unit_chunks - 1) / unit_chunks);
}

// Batches that a block keeps in shared memory at least, `chunk_bytes` for each chunk, and the bytes
// of all of them with the results of the units of two rows, which alternate. Those of rows over the
// whole GPU are elsewhere.
constexpr int kept_batches(const RowRegime& regime, int64_t chunks, int chunk_bytes) {
  if (regime.storage == Storage::kReread)
    return regime.rings() * kRingBytes / (kChunksPerBatch * chunk_bytes);
  if (regime.storage != Storage::kShared) return 0;
  return (unit_count(chunks) + regime.blocks_per_row - 1) / regime.blocks_per_row * kUnitBatches;
}
constexpr int result_bytes(const RowRegime& regime, int64_t chunks) {
  return regime.blocks_per_row == kWholeGpu ? 0 : unit_count(chunks) * 2 * kResultBytes;
}
constexpr int shared_bytes(const RowRegime& regime, int batches, int64_t chunks, int chunk_bytes) {
  return batches == 0 ? 0 : batches * kChunksPerBatch * chunk_bytes + result_bytes(regime, chunks);
}

// Batches that a block has room for, of so many on a multiprocessor.
constexpr int room_for_batches(const RowRegime& regime, int blocks, int64_t chunks, int chunk_bytes,
                               const Device& device) {
  const int share = (device.shared_bytes + kReservedSharedBytes) / blocks - kReservedSharedBytes -
                    kMaxDeclaredBytes - result_bytes(regime, chunks);
  return share / (kChunksPerBatch * chunk_bytes);
}
// Blocks that take turns on a multiprocessor: fewer where rings would be too short.
constexpr int blocks_in_turns(const RowRegime& regime, int64_t chunks, int chunk_bytes,
                              const Device& device) {
  const int least = kept_batches(regime, chunks, chunk_bytes);
  int blocks = regime.blocks_per_sm;
  while (blocks > 1 && regime.storage == Storage::kReread &&
         room_for_batches(regime, blocks, chunks, chunk_bytes, device) < least)
    --blocks;
  return blocks;
}
// Batches that a block keeps if it has part of its next row too: as many as it has room for.
constexpr int kept_batches_with_next(const RowRegime& regime, int64_t chunks, int chunk_bytes,
                                     const Device& device) {
  const int least = kept_batches(regime, chunks, chunk_bytes);
  if (!regime.takes_turns) return least;
  const int blocks = blocks_in_turns(regime, chunks, chunk_bytes, device);
  const int room = room_for_batches(regime, blocks, chunks, chunk_bytes, device);
  if (room < least) return least;
  if (regime.storage == Storage::kReread) return room / regime.rings() * regime.rings();
  return room > 2 * least ? 2 * least : room;
}

// Why a regime does not serve rows: bits, named in explain.py too.
enum Obstacle : unsigned {
  kOtherRows = 1,  // it is not for rows of this kind
  kTooLong = 2,
  kTooFewRows = 4,
  kNoSuchCluster = 8,
  kTooManyBytes = 16,  // of shared memory
};
constexpr unsigned obstacles_of(const RowRegime& regime, int64_t chunks, int64_t rows, Rows kind,
                                int chunk_bytes, const Device& device) {
  const unsigned found = ((regime.serves & kind) == 0 ? kOtherRows : 0u) |
                         (chunks > regime.max_chunks ? kTooLong : 0u) |
                         (rows < regime.min_rows ? kTooFewRows : 0u) |
                         (regime.blocks_per_row > device.max_cluster ||
                                  regime.least_multiprocessors() > device.multiprocessors
                              ? kNoSuchCluster
                              : 0u);
  if (found != 0) return found;
  int batches = kept_batches(regime, chunks, chunk_bytes);
  // No other block keeps the multiprocessor busy: there must be room for a quarter of the next row.
  if (regime.takes_turns && regime.blocks_per_sm == 1) batches += batches / 4;
  const int bytes = shared_bytes(regime, batches, chunks, chunk_bytes) + kMaxDeclaredBytes;
  return bytes > device.shared_bytes ? kTooManyBytes : 0u;
}

// The first regime without an obstacle: is_consistent makes sure that there is one.
template <int kCount>
constexpr int regime_for(const RowRegime (&table)[kCount], int64_t chunks, int64_t rows, Rows kind,
                         int chunk_bytes, const Device& device) {
  int i = 0;
  while (i < kCount - 1 && obstacles_of(table[i], chunks, rows, kind, chunk_bytes, device) != 0)
    ++i;
  return i;
}

// Uneven dense rows that one block holds have an order of sums of their own. Whether it does must
// not depend on the number of rows, unless they have one unit. Longer ones take what serves either
// kind.
template <int kCount>
constexpr bool keeps_uneven_bits(const RowRegime (&table)[kCount]) {
  // For fewer of the same rows: with the same sums, which blocks of most threads do not have.
  const auto has_twin = [&](const RowRegime& regime) {
    for (const RowRegime& other : table) {
      if ((other.serves & kDenseUneven) != 0 && other.max_chunks == regime.max_chunks &&
          other.min_rows == 0 && other.threads_per_row < kMostDenseThreads)
        return true;
    }
    return false;
  };
  bool are_longer = false;
  for (const RowRegime& regime : table) {
    if ((regime.serves & kDenseUneven) == 0) continue;
    if (regime.storage != Storage::kDense) return false;
    if (regime.blocks_per_row != 1) {
      are_longer = true;
    } else if (are_longer || (regime.min_rows != 0 && !has_twin(regime))) {
      return false;
    }
  }
  return true;
}

template <int kCount>
constexpr bool is_consistent(const RowRegime (&table)[kCount], int chunk_bytes) {
  for (int i = 0; i < kCount; ++i) {
    const RowRegime& regime = table[i];
    if (regime.storage == Storage::kTile) continue;  // flat.cuh chooses
    const bool is_register = regime.storage == Storage::kRegisters;
    const bool is_dense = regime.storage == Storage::kDense;
    // Registers hold rows in their own order of sums, so the number of rows must not decide.
    if (is_register && (regime.max_chunks != regime.threads_per_row * regime.chunks_per_thread ||
                        regime.min_rows != 0 || regime.blocks_per_row != 1))
      return false;
    if (regime.blocks_per_row > kMaxCluster) return false;
    // So what units take of such rows before they must take whatever the number of rows.
    for (unsigned kind = 1; is_register && kind <= regime.serves; kind *= 2) {
      int longest = 0, certain = 0;
      for (int before = 0; before < i; ++before) {
        const RowRegime& other = table[before];
        const bool is_units = other.storage == Storage::kShared || other.storage == Storage::kDense;
        const unsigned alike = kind == kUneven ? kUneven | kDenseUneven : kind;
        if (!is_units || (regime.serves & kind) == 0 || (other.serves & alike) == 0) continue;
        longest = other.max_chunks > longest ? other.max_chunks : longest;
        if (other.min_rows == 0 && other.blocks_per_row == 1 && other.max_chunks > certain)
          certain = other.max_chunks;
      }
      if (longest > certain) return false;
    }
    if (is_dense && regime.max_chunks >
                        regime.blocks_per_row * regime.threads_per_row * regime.chunks_per_thread)
      return false;
    // Units are the same in all regimes, and join in one order: in groups only if all rows of the
    // length are read twice.
    if (!is_register && !is_dense && regime.chunks_per_thread * 32 != kChunksPerBatch) return false;
    if (!is_register && regime.storage != Storage::kReread &&
        unit_count(regime.max_chunks) > kUnitsOfWarp)
      return false;
    if (regime.storage == Storage::kReread &&
        kept_batches(regime, kUnlimited, chunk_bytes) < 2 * regime.rings())
      return false;
    if (regime.storage == Storage::kShared &&
        (unit_batches(regime.max_chunks) != kUnitBatches ||
         shared_bytes(regime, kept_batches(regime, regime.max_chunks, chunk_bytes),
                      regime.max_chunks, chunk_bytes) >
             (regime.blocks_per_sm == 1 ? kMaxSharedBytesAlone : kMaxSharedBytes)))
      return false;
    // Sums of a bias gradient belong to one block, whose barrier orders them.
    if ((regime.serves & (kBiasGradient | kDroppedBiasGradient)) != 0 && !is_register &&
        (regime.threads_per_row <= 32 || regime.blocks_per_row != 1))
      return false;
    if (regime.shape().threads() % 32 != 0 ||
        ((regime.threads_per_row > 32 || (!is_register && !is_dense)) &&
         regime.rows_per_block != 1))
      return false;
  }
  if (!keeps_uneven_bits(table)) return false;
  // Of the kinds of rows that may be very long, some regime serves all, whatever the GPU.
  for (unsigned kind = 1; kind <= kDense; kind *= 2) {
    bool may_be_long = false, is_served = false;
    for (const RowRegime& regime : table) {
      if ((regime.serves & kind) == 0 || regime.storage != Storage::kReread) continue;
      may_be_long = true;
      const int batches = kept_batches(regime, kUnlimited, chunk_bytes);
      if (regime.max_chunks == kUnlimited && regime.min_rows == 0 && regime.blocks_per_row <= 1 &&
          shared_bytes(regime, batches, kUnlimited, chunk_bytes) + kMaxDeclaredBytes <=
              least_shared_bytes(0))
        is_served = true;
    }
    if (may_be_long && !is_served) return false;
  }
  return true;
}
static_assert(is_consistent(kForwardRegimes, 16) && is_consistent(kBackwardRegimes, 2 * 16));

// The first chunk of a row that nothing is read with begins at a multiple of so many elements.
__host__ __device__ constexpr int grid_elements(int64_t columns, int pack_elements) {
  return columns % pack_elements == 0 || columns < kAlignedChunks * pack_elements
             ? pack_elements
             : kLineChunks * pack_elements;
}

// The most chunks that any row can need: a row need not start where chunks do, a window need not
// either.
constexpr int64_t max_visible_chunks(int64_t columns, int64_t visible_columns, int pack_elements) {
  const int64_t end = pack_elements - 1;
  const int64_t begin = grid_elements(columns, pack_elements) - 1;
  const int64_t whole = columns % pack_elements == 0 ? columns / pack_elements
                                                     : (columns + begin + end) / pack_elements;
  const int64_t visible = (visible_columns + 2 * end) / pack_elements;
  return visible_columns < columns && visible < whole ? visible : whole;
}

}  // namespace megasoftmax
