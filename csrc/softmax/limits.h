#pragma once
// Row regimes of the softmax, forward and backward: the family's only limits. Plain C++, no CUDA,
// no torch.
//
// A vector is 16 bytes of a row. The threads of a short row hold its vectors in registers. A long
// row consists of segments. One warp sums a segment, which waits in shared memory (or registers)
// between the pass that sums and the pass that writes, or is read twice. The length of a row alone
// decides its segments, and they are added in one order. So a row has the same bits in one block,
// in a cluster and spread over the whole GPU.
//
// A warp tile is kWarpTileVectors vectors: what a warp reads at a time. A segment is one warp tile,
// or several in very long rows.

#include <cstdint>
#include <string_view>

#include "../common/host_device.h"
#include "../common/limits.h"

namespace megasoftmax {

// Where a row waits between the two passes.
enum class Storage {
  kTile,        // in shared memory: consecutive rows form the tile of a block, see flat.cuh
  kRegisters,   // in registers
  kShared,      // in shared memory, as segments
  kReread,      // in rings of shared memory, as segments; what a ring cannot keep is read twice
  kContiguous,  // in registers: a warp for each segment of a contiguous row, see contiguous.cuh
};

// What a kernel is compiled for.
struct KernelShape {
  Storage storage;
  int threads_per_row;  // of one block
  int rows_per_block;
  int vectors_per_thread;  // that a thread loads before it uses the first one
  int blocks_per_sm;       // sets the compiler's register limit: 65536 / (threads * blocks)
  bool is_persistent;      // a block takes several rows, and copies the next one early
  bool may_share_rows;     // several blocks may own a row

  constexpr int threads() const { return threads_per_row * rows_per_block; }
  // May a warp take two rows that share random numbers of dropout?
  constexpr bool may_hold_pairs() const {
    return storage == Storage::kRegisters && threads_per_row == 16;
  }
  bool operator==(const KernelShape&) const = default;
};

// Kinds of rows. A launch has one kind, and a regime may serve several. A ragged row has a length
// that is no multiple of a vector. kContiguous rows have nothing but a scale.
enum Rows : unsigned {
  kUnmasked = 1,       // neither mask, bias, window nor range; not ragged; not kContiguous
  kLimited = 2,        // causal, or with a window or ranges
  kMasked = 4,         // with a bool mask; not ragged
  kWindowed = 8,       // a window leaves at most half of the row: most of the work is writing zeros
  kBiasGradient = 16,  // backward, with sums of a bias gradient; each row belongs to one block
  kTiny = 32,          // kUnmasked or kRagged rows of a contiguous tensor, of few columns
  kRagged = 64,        // kUnmasked rows, but ragged
  kDropped = 128,      // with dropout, and backward what reads scores, but rows capped alone
  kDroppedBiasGradient = 256,
  kBiasOrRaggedMask = 512,  // in instances of a bias, or ragged with a mask
  kContiguous = 1024,       // of a contiguous tensor, with nothing but a scale or a cap; not ragged
  kContiguousRagged = 2048,
  kCommon = kUnmasked | kRagged | kLimited | kMasked | kBiasOrRaggedMask,
  kAnyRows = kCommon | kBiasGradient,
  kSpread = kCommon | kContiguous,  // may lie over several blocks
};

// A kernel and how many blocks of it own a row.
struct RowShape {
  std::string_view name;
  Storage storage;
  int threads_per_row;
  int rows_per_block;
  int vectors_per_thread;
  int blocks_per_sm;
  bool is_persistent;
  int blocks_per_row;  // more than 1: a cluster; kWholeGpu: all blocks share the rows

  constexpr KernelShape kernel() const {
    return {storage,
            threads_per_row,
            rows_per_block,
            vectors_per_thread,
            blocks_per_sm,
            is_persistent,
            storage == Storage::kReread ? is_persistent : blocks_per_row != 1};
  }
  constexpr int rings() const { return threads_per_row / 32; }  // of a block: one for each warp
  // All blocks of a cluster lie in one of the GPU's groups of multiprocessors, at most 8 groups. If
  // a multiprocessor has room for one block only, this many multiprocessors ensure that some group
  // has room for the cluster.
  constexpr int least_multiprocessors() const {
    return blocks_per_sm == 1 && blocks_per_row > 1 ? 8 * blocks_per_row : 0;
  }
};

// Which rows a shape is chosen for.
struct RowThreshold {
  std::string_view name;  // of a RowShape
  int max_vectors;        // visible vectors of a row
  int min_rows;           // of the launch; fewer rows take a later regime, with more blocks a row
  unsigned serves;        // Rows
};

inline constexpr int kUnlimited = INT32_MAX;
inline constexpr int kWholeGpu = 0;  // blocks per row: all blocks that run at a time share the rows
inline constexpr int kWarpTileVectors = 4 * 32;  // that a warp reads at a time
inline constexpr int kWarpTilesPerSegment = 1;  // more in rows of more than kMaxSegments warp tiles
inline constexpr int kMaxSegments = 2048;
inline constexpr int kSegmentsOfWarp = 512;  // results of a row that one warp joins, if read twice
inline constexpr int kMostContiguousThreads = 1024;  // of a block with a warp for each segment
inline constexpr int kRingBytes = 8 * 1024;          // of each warp's ring, at least
inline constexpr int kResultBytes = 8;               // of a segment: its maximum and sum
// Shared memory of a block: two blocks fit a multiprocessor, or one that has it alone.
inline constexpr int kMaxSharedBytes = 110 * 1024, kMaxSharedBytesAlone = 220 * 1024;
// Shared memory that kernels declare themselves. Kernels of windowed rows declare kZeroBytes more.
// Kernels of contiguous rows may declare more, because they need little else.
inline constexpr int kMaxDeclaredBytes = 192;
inline constexpr int kContiguousMaxDeclaredBytes = 1024;
// Bytes of registers that kernels of ragged contiguous rows may spill, and kernels that hold rows
// of float32 in registers and may have ragged ones. No other kernel spills.
inline constexpr int kContiguousMaxSpilledBytes = 8;
inline constexpr int kFloatRowMaxSpilledBytes = 56;
// From this many rows on, at least two lie over the whole GPU at a time, even if its shared memory
// cannot keep both.
inline constexpr int64_t kManyRows = 32;
// A windowed row has at least kLongRow vectors and at most kWindowedRow visible ones.
inline constexpr int64_t kLongRow = 128, kWindowedRow = 256;
// The visible part of a row begins at a multiple of this many vectors, 128 bytes of a 2-byte type.
// So zeros ahead of it end where a cache line ends, and no line is written in two parts.
inline constexpr int kLineVectors = 8;
// Ragged rows of at least this many vectors begin with a vector at a cache line, if nothing is read
// with them.
inline constexpr int kAlignedVectors = 32;
// Tiny rows have fewer than kTinyColumns columns, or at most kTinyRaggedColumns if they are ragged,
// because other regimes need more registers for those.
inline constexpr int64_t kTinyColumns = 128, kTinyRaggedColumns = 512;
// Forward, a row of more than kTinyVectors vectors is kContiguous instead of kTiny if it may be,
// and if all rows begin at a sector of the caches: 32 bytes, kSectorVectors. Otherwise lanes would
// load and store parts of sectors.
inline constexpr int64_t kTinyVectors = 4, kSectorVectors = 2;
// Owners of bias rows that keep a large GPU busy. If there are fewer, several share a bias row.
inline constexpr int64_t kEnoughOwners = 2048;
// Rows that a cap alone changes have logits in units of exp2, and -inf means excluded there. Their
// exponentials need no maximum: a sum of 2^31 of those of the largest cap is finite. And scale /
// cap lets the largest float16 reach the cap, 2^63 be multiplied by it, and its 9th power be a
// normal number with the cap and coefficients. Other rows take the instances of a bias.
inline constexpr float kLeastCapAlone = 0.01f, kLargestCapAlone = 64.f;
inline constexpr float kLeastInner = 2e-4f, kLargestInner = 1000.f;
// Kernels count batches * heads, queries, columns and the bounds of a window in 32 bits. Loops run
// past the end by a segment.
inline constexpr int64_t kMaxIndex = INT32_MAX - 4194304;

// Names say where a row waits, the threads of a block that own it and the vectors of each
// ("lanes_16x4"), or the threads and blocks ("cluster_256x4").
// clang-format off
inline constexpr RowShape kForwardShapes[] = {
    // name                      storage               threads  rows  vectors  blocks/SM  persistent  blocks/row
    {"tile",                  Storage::kTile,             0,    0,       0,         0,      false,          1},
    {"contiguous_8x1",        Storage::kContiguous,       4,   16,       2,        24,      false,          1},
    {"contiguous_4x4",        Storage::kContiguous,       4,   16,       4,        18,      false,          1},
    {"contiguous_8x4",        Storage::kContiguous,       8,    8,       4,        18,      false,          1},
    {"contiguous_16x4",       Storage::kContiguous,      16,    4,       4,        18,      false,          1},
    {"contiguous_32x4",       Storage::kContiguous,      32,    2,       4,        18,      false,          1},
    {"contiguous_128x1",      Storage::kContiguous,     128,    1,       1,        16,      false,          1},
    {"contiguous_block",      Storage::kContiguous,    1024,    1,       4,         1,      false,          1},
    {"lanes_4x1",             Storage::kRegisters,        4,   16,       1,        16,      false,          1},
    {"lanes_4x4",             Storage::kRegisters,        4,   16,       4,        16,      false,          1},
    {"lanes_8x4",             Storage::kRegisters,        8,    8,       4,        16,      false,          1},
    {"lanes_16x4",            Storage::kRegisters,       16,    4,       4,        16,      false,          1},
    {"lanes_16x5",            Storage::kRegisters,       16,    4,       5,        14,      false,          1},
    {"lanes_16x8",            Storage::kRegisters,       16,    4,       8,        14,      false,          1},
    {"lanes_64x1",            Storage::kRegisters,       64,    1,       1,        18,      false,          1},
    {"lanes_32x4",            Storage::kRegisters,       32,    2,       4,        16,      false,          1},
    {"lanes_32x5",            Storage::kRegisters,       32,    2,       5,        14,      false,          1},
    {"lanes_128x2",           Storage::kRegisters,      128,    1,       2,        10,      false,          1},
    {"lanes_64x4",            Storage::kRegisters,       64,    1,       4,        18,      false,          1},
    {"lanes_64x5",            Storage::kRegisters,       64,    1,       5,        16,      false,          1},
    {"lanes_128x4",           Storage::kRegisters,      128,    1,       4,         9,      false,          1},
    {"lanes_128x5",           Storage::kRegisters,      128,    1,       5,         8,      false,          1},
    {"lanes_256x4",           Storage::kRegisters,      256,    1,       4,         4,      false,          1},
    {"shared_32",             Storage::kShared,          32,    1,       4,        32,      false,          1},
    {"shared_64",             Storage::kShared,          64,    1,       4,        16,      false,          1},
    {"shared_128",            Storage::kShared,         128,    1,       4,         6,      false,          1},
    {"shared_256",            Storage::kShared,         256,    1,       4,         4,      false,          1},
    {"shared_512",            Storage::kShared,         512,    1,       4,         2,      false,          1},
    {"contiguous_cluster_8",  Storage::kContiguous,    1024,    1,       4,         1,      false,          8},
    {"cluster_256x4",         Storage::kShared,         256,    1,       4,         4,      false,          4},
    {"cluster_256x8",         Storage::kShared,         256,    1,       4,         4,      false,          8},
    {"contiguous_cluster_16", Storage::kContiguous,    1024,    1,       4,         1,      false,         16},
    {"cluster_256x16",        Storage::kShared,         256,    1,       4,         4,      false,         16},
    {"whole_gpu_256",         Storage::kReread,         256,    1,       4,         2,       true,  kWholeGpu},
    {"whole_gpu_512",         Storage::kReread,         512,    1,       4,         1,       true,  kWholeGpu},
    {"whole_gpu_64",          Storage::kReread,          64,    1,       4,         6,       true,  kWholeGpu},
};

inline constexpr RowShape kBackwardShapes[] = {
    // name                    storage               threads  rows  vectors  blocks/SM  persistent  blocks/row
    {"tile",                  Storage::kTile,             0,    0,       0,         0,      false,          1},
    {"contiguous_8x4",        Storage::kContiguous,       8,    8,       4,        16,      false,          1},
    {"contiguous_16x4",       Storage::kContiguous,      16,    4,       4,        16,      false,          1},
    {"contiguous_128x1",      Storage::kContiguous,     128,    1,       1,        16,      false,          1},
    {"contiguous_block",      Storage::kContiguous,    1024,    1,       4,         1,      false,          1},
    {"lanes_4x1",             Storage::kRegisters,        4,   16,       1,        14,      false,          1},
    {"lanes_4x4",             Storage::kRegisters,        4,   16,       4,        12,      false,          1},
    {"lanes_8x4",             Storage::kRegisters,        8,    8,       4,        12,      false,          1},
    {"lanes_16x4",            Storage::kRegisters,       16,    4,       4,        12,      false,          1},
    {"lanes_16x8",            Storage::kRegisters,       16,    4,       8,        10,      false,          1},
    {"lanes_64x1",            Storage::kRegisters,       64,    1,       1,        18,      false,          1},
    {"lanes_32x4",            Storage::kRegisters,       32,    2,       4,        12,      false,          1},
    {"lanes_32x5",            Storage::kRegisters,       32,    2,       5,        10,      false,          1},
    {"lanes_64x4",            Storage::kRegisters,       64,    1,       4,        14,      false,          1},
    {"lanes_128x2",           Storage::kRegisters,      128,    1,       2,         8,      false,          1},
    {"lanes_64x5",            Storage::kRegisters,       64,    1,       5,        12,      false,          1},
    {"shared_32",             Storage::kShared,          32,    1,       4,        32,      false,          1},
    {"lanes_128x4",           Storage::kRegisters,      128,    1,       4,         7,      false,          1},
    {"lanes_128x5",           Storage::kRegisters,      128,    1,       5,         6,      false,          1},
    {"shared_64",             Storage::kShared,          64,    1,       4,        14,      false,          1},
    {"shared_128",            Storage::kShared,         128,    1,       4,         6,      false,          1},
    {"shared_256",            Storage::kShared,         256,    1,       4,         3,      false,          1},
    {"persistent_256x2",      Storage::kShared,         256,    1,       4,         3,       true,          2},
    {"persistent_512x2",      Storage::kShared,         512,    1,       4,         1,       true,          2},
    {"contiguous_cluster_8",  Storage::kContiguous,    1024,    1,       4,         1,      false,          8},
    {"contiguous_cluster_16", Storage::kContiguous,    1024,    1,       4,         1,      false,         16},
    {"persistent_256x8",      Storage::kShared,         256,    1,       4,         3,       true,          8},
    {"persistent_512x4",      Storage::kShared,         512,    1,       4,         1,       true,          4},
    {"persistent_512x8",      Storage::kShared,         512,    1,       4,         1,       true,          8},
    {"persistent_256x16",     Storage::kShared,         256,    1,       4,         3,       true,         16},
    {"persistent_512x16",     Storage::kShared,         512,    1,       4,         1,       true,         16},
    {"reread_512x16",         Storage::kReread,         512,    1,       4,         1,       true,         16},
    {"whole_gpu_256",         Storage::kReread,         256,    1,       4,         2,       true,  kWholeGpu},
    {"whole_gpu_512",         Storage::kReread,         512,    1,       4,         1,       true,  kWholeGpu},
    {"reread_256",            Storage::kReread,         256,    1,       4,         3,      false,          1},
    {"whole_gpu_64",          Storage::kReread,          64,    1,       4,         6,       true,  kWholeGpu},
    {"reread_64",             Storage::kReread,          64,    1,       4,         8,      false,          1},
};
// clang-format on

// A comment beside a threshold names the best other regime where the difference is largest, how
// much longer that one takes on an H200, and the columns of bfloat16, by tune_softmax.py. The rows
// are unmasked and have 64 MiB unless the comment says otherwise. Thresholds without such a comment
// have no stored figure, or the other regime is as fast.
//
// The last rows of each table are for GPUs of compute capability 7.5, whose blocks have no room for
// the rings of 8 warps. With dropout all GPUs take them, because such long rows are rare and these
// kernels take the longest to compile.
// clang-format off
inline constexpr RowThreshold kForwardThresholds[] = {
    // name                     max vectors  min rows  serves
    {"tile",                          136,        0, kTiny},
    {"contiguous_8x1",                  8,        0, kContiguous},  // contiguous_4x4 5%, 64
    {"contiguous_4x4",                 16,        0, kContiguous},  // contiguous_8x4 11%, 96
    {"contiguous_8x4",                 32,        0, kContiguous},  // contiguous_16x4 10%, 192
    {"contiguous_16x4",                64,        0, kContiguous | kContiguousRagged},  // contiguous_32x4 9%, 384
    {"contiguous_32x4",               128,     2100, kContiguous | kContiguousRagged},  // contiguous_block 5%, ragged 767
    {"contiguous_128x1",              128,        0, kContiguous | kContiguousRagged},
    {"contiguous_block",              512,        0, kContiguous | kContiguousRagged},  // shared_128 61%, 1536
    {"contiguous_block",             1024,        0, kContiguous},  // shared_256 18%, 256 rows of 6144
    {"lanes_4x1",                       4,        0, kAnyRows},
    {"lanes_4x4",                      16,        0, kAnyRows},  // lanes_8x4 65%, causal 64
    {"lanes_8x4",                      32,        0, kAnyRows},  // lanes_16x4 47%, masked 192
    {"lanes_16x4",                     64,        0, kAnyRows | kDropped},  // lanes_16x5 9%, causal 384
    {"lanes_16x5",                     80,        0, kAnyRows},
    {"lanes_16x8",                    128,        0, kDropped},
    {"lanes_64x1",                     64,        0, kWindowed},
    {"lanes_32x4",                    128,        0, kAnyRows | kWindowed},  // lanes_32x5 8%, causal 768
    {"lanes_32x5",                    160,        0, kAnyRows},
    {"lanes_128x2",                   256,        0, kWindowed},
    {"lanes_64x4",                    256,        0, kRagged | kLimited | kMasked | kBiasOrRaggedMask},  // lanes_64x5 5%, masked 1536
    {"lanes_64x5",                    320,        0, kRagged | kMasked | kBiasOrRaggedMask},
    {"lanes_128x4",                   512,        0, kBiasOrRaggedMask},
    {"lanes_128x5",                   640,        0, kRagged | kBiasOrRaggedMask},
    {"lanes_256x4",                  1024,        0, kBiasOrRaggedMask},
    {"shared_32",                     400,     2000, kUnmasked | kLimited | kMasked},  // shared_64 8%, causal 3072
    {"shared_64",                     800,     1000, kUnmasked | kRagged | kLimited | kMasked | kDropped},  // shared_128 8%, causal 4096
    {"shared_128",                   1540,      500, kSpread},  // shared_256 20%, ragged 8191
    {"shared_256",                   4480,       40, kUnmasked | kLimited | kMasked | kBiasOrRaggedMask | kDropped},
    {"shared_256",                   4480,       80, kRagged},  // shared_512 34%, ragged 12287
    {"shared_256",                   4480,      132, kContiguous},  // shared_512 9%, 20480
    {"shared_512",                   6656,       80, kCommon},  // whole_gpu_256 31%, ragged 256 rows of 50257
    {"shared_512",                   6656,      132, kContiguous},  // contiguous_cluster_8 13%, 256 rows of 49152
    {"cluster_256x4",                8960,      132, kContiguous},
    {"contiguous_cluster_8",         8192,       17, kContiguous},  // cluster_256x4 25%, 64 rows of 24576
    {"contiguous_cluster_8",         8192,        0, kContiguousRagged},
    {"shared_256",                   4480,       40, kContiguous | kRagged},  // without clusters, or kRagged rows from 40 to 79
    {"shared_512",                   6656,       60, kContiguous | kCommon},  // without clusters, or kCommon rows from 60 to 79
    {"cluster_256x4",               13600,       40, kUnmasked | kRagged | kLimited | kMasked},  // cluster_256x8 11%, ragged 98303
    {"cluster_256x4",               17408,       40, kBiasOrRaggedMask | kDropped},  // registers leave room for three blocks at most
    {"cluster_256x4",               13600,       66, kContiguous},
    {"cluster_256x8",               17408,       66, kContiguous},
    {"contiguous_cluster_8",         4096,        0, kContiguous},  // cluster_256x4 23%, 16 rows of 10240
    {"contiguous_cluster_16",       17408,        0, kContiguous},  // cluster_256x16 20%, 4 rows of 98304
    {"shared_256",                   1100,        0, kSpread | kDropped},
    {"shared_512",                   2050,        0, kSpread},
    {"cluster_256x8",               26600,       17, kSpread | kDropped},  // cluster_256x16 26%, ragged 151935
    {"cluster_256x8",               33792,      100, kSpread | kDropped},  // cluster_256x16 5%, 256 rows of 262144
    {"cluster_256x16",              32768,       17, kContiguous},  // cluster_256x8 2%, 64 rows of 262144
    {"contiguous_cluster_16",       32768,        0, kContiguous},  // cluster_256x8 24%, 1 row of 151936
    {"cluster_256x8",               10000,        0, kSpread | kDropped},
    {"cluster_256x16",              32768,        0, kSpread | kDropped},
    {"cluster_256x16",              65536,        4, kSpread | kDropped},  // whole_gpu_256 24%, 256 rows of 393216
    {"cluster_256x8",               33792,       17, kSpread | kDropped},  // without clusters of 16
    {"whole_gpu_256",              262144,        0, kSpread},  // whole_gpu_512 9%, 1 row of 393216
    {"whole_gpu_512",          kUnlimited,        0, kUnmasked | kContiguous | kRagged},
    {"whole_gpu_256",          kUnlimited,        0, kSpread},
    {"whole_gpu_64",           kUnlimited,        0, kSpread | kDropped},
};

inline constexpr RowThreshold kBackwardThresholds[] = {
    // name                   max vectors  min rows  serves
    {"tile",                          136,        0, kTiny},
    {"contiguous_8x4",                 32,        0, kContiguous},  // contiguous_16x4 15%, 128
    {"contiguous_16x4",                64,        0, kContiguous | kContiguousRagged},  // contiguous_block 12%, 384
    {"contiguous_block",              128,     2100, kContiguous | kContiguousRagged},
    {"contiguous_128x1",              128,        0, kContiguous | kContiguousRagged},
    {"contiguous_block",              322,        0, kContiguous | kContiguousRagged},
    {"contiguous_block",             1024,        0, kContiguous},  // shared_256 37%, 4 rows of 6144
    {"contiguous_block",             2176,      200, kContiguous},  // shared_256 27%, 256 rows of 10240
    {"lanes_4x1",                       4,        0, kAnyRows},
    {"lanes_4x4",                      16,        0, kAnyRows},  // lanes_8x4 48%, causal 64
    {"lanes_8x4",                      32,        0, kAnyRows},  // lanes_16x4 35%, causal 192
    {"lanes_16x4",                     64,        0, kAnyRows | kDropped | kDroppedBiasGradient},  // lanes_32x4 38%, causal 384
    {"lanes_16x8",                    128,        0, kDropped},
    {"lanes_64x1",                     64,        0, kWindowed},
    {"lanes_32x4",                    128,        0, kWindowed | kRagged | kLimited | kBiasGradient | kDroppedBiasGradient},  // lanes_32x5 8%, causal 768
    {"lanes_32x5",                    160,        0, kRagged | kLimited | kBiasGradient},
    {"lanes_64x4",                    256,        0, kRagged | kBiasGradient},
    {"lanes_128x2",                   256,        0, kWindowed},
    {"lanes_64x5",                    320,        0, kRagged | kBiasGradient},
    {"shared_32",                     322,        0, kUnmasked | kLimited},  // shared_64 31%, causal 1536
    {"lanes_128x4",                   512,        0, kBiasGradient},
    {"lanes_128x5",                   640,        0, kBiasGradient},
    {"shared_64",                     640,     1000, kCommon | kDropped},  // shared_128 15%, causal 3072
    {"shared_128",                   1032,      500, kAnyRows},
    {"shared_256",                   2176,       60, kAnyRows | kDropped | kDroppedBiasGradient},
    {"persistent_256x2",             4352,       60, kCommon | kDropped},
    {"persistent_512x2",            10240,      250, kRagged},
    {"persistent_512x2",             8704,       30, kCommon},
    {"contiguous_cluster_8",         8192,       17, kContiguous},  // contiguous_cluster_16 21%, 64 rows of 32768
    {"contiguous_cluster_8",         8192,        0, kContiguousRagged},
    {"contiguous_cluster_8",         4096,        0, kContiguous},  // contiguous_block 18%, 16 rows of 12288
    {"contiguous_cluster_16",       32768,        0, kContiguous},  // persistent_512x16 40%, 1 row of 131072
    {"shared_256",                   2176,       60, kContiguous},  // without clusters
    {"contiguous_block",             4096,      200, kContiguous},  // without clusters
    {"shared_256",                   1100,        0, kAnyRows | kDropped | kDroppedBiasGradient},
    {"persistent_256x8",            17408,       30, kSpread | kDropped},  // persistent_512x4 8%, ragged 98303
    {"persistent_512x4",            20480,      125, kUnmasked | kContiguous | kRagged},
    {"persistent_512x8",            40960,      100, kUnmasked | kContiguous | kRagged},
    {"persistent_256x8",             9000,        0, kSpread | kDropped},
    {"persistent_256x16",           32768,        0, kSpread | kDropped},
    {"persistent_512x16",           65536,       40, kUnmasked | kContiguous | kRagged},  // reread_512x16 13%, 393216
    {"reread_512x16",               98304,       30, kUnmasked | kContiguous | kRagged},  // whole_gpu_256 13%, 786432
    {"whole_gpu_256",              262144,        0, kSpread},  // whole_gpu_512 12%, 1 row of 393216
    {"whole_gpu_512",          kUnlimited,        0, kUnmasked | kContiguous | kRagged},
    {"whole_gpu_256",          kUnlimited,        0, kSpread},
    {"reread_256",             kUnlimited,        0, kBiasGradient},
    {"whole_gpu_64",           kUnlimited,        0, kSpread | kDropped},
    {"reread_64",              kUnlimited,        0, kBiasGradient | kDroppedBiasGradient},
};
// clang-format on

}  // namespace megasoftmax
