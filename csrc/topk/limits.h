#pragma once
// Regimes of softmax_topk: the family's only limits. Plain C++, no CUDA, no torch.
//
// A row is cut into chunks of 16 bytes, and those into units of a block: a few for each of its
// threads. A thread keeps the largest logit of each of its groups, which are one unit each, or
// more where the row has more than kMaxGroups units.

#include "../softmax/limits.h"

namespace megasoftmax {

inline constexpr int kMaxK = 256;
inline constexpr int kMaxGroups = 32;
// Logits that may wait for their rank; more than k and the excess that a threshold allows.
inline constexpr int kMaxCandidates = 512;
// Of shared memory, which kernels declare themselves, beside what the plan gives a block.
inline constexpr int kTopkMaxDeclaredBytes = 16384;

// Short rows of a contiguous tensor, without mask and bias: a tile of them in shared memory, and
// sorting networks, see tile.cuh.
inline constexpr int kTileThreads = 128, kMaxTileChunks = 8, kTileMaxK = 16;
inline constexpr int kTileMaxChunks = 32 * kMaxTileChunks;

// Other rows, forward.
struct TopkRegime {
  char name[16];
  int threads;
  int blocks_per_sm;  // the compiler's register budget: 65536 / (threads * blocks); half as many
                      // blocks with a mask, a bias or another stride than 1
  int chunks_per_thread;  // of a unit: loads in flight
  int blocks_per_row;     // more than 1: a cluster
  int max_chunks;         // of a row
  int min_rows;           // fewer rows are served better by more blocks for each

  // Larger blocks would not have registers for a mask, a bias or another stride than 1.
  constexpr bool takes_any_row() const { return threads <= 256; }
};

// The first that fits serves.
// clang-format off
inline constexpr TopkRegime kTopkRegimes[] = {
    // name,      threads, blocks/SM, chunks, blocks/row, max chunks, min rows
    {"warp",           32,        30,      4,          1,        512,      100},
    {"block_128",     128,         8,      4,          1,      14000,      400},
    {"block_256",     256,         4,      4,          1, kUnlimited,      200},
    {"block_128",     128,         8,      4,          1,       1024,        0},
    {"block_512",     512,         2,      4,          1,      40000,       80},
    {"block_512",     512,         2,      4,          1,      20000,       56},
    {"block_512",     512,         2,      4,          1,       8192,        0},
    {"cluster_2",     256,         3,      4,          2, kUnlimited,       67},
    {"cluster_4",     256,         3,      4,          4, kUnlimited,       34},
    {"cluster_8",     256,         3,      4,          8,      65536,        8},
    {"cluster_16",    256,         3,      4,         16,      65536,        0},
    {"whole_gpu",     256,         3,      4,  kWholeGpu, kUnlimited,        0},
    {"block_256",     256,         4,      4,          1, kUnlimited,        0},
};
// clang-format on

// So that one of them serves, whatever k and the number of rows.
constexpr bool is_complete(const TopkRegime& last) {
  return last.max_chunks == kUnlimited && last.min_rows == 0 && last.threads >= kMaxK &&
         last.blocks_per_row == 1 && last.takes_any_row();
}
static_assert(is_complete(kTopkRegimes[sizeof(kTopkRegimes) / sizeof(TopkRegime) - 1]));

// Of shared memory: the largest logits of a block's groups.
constexpr int groups_bytes(int units, int units_per_group, int threads) {
  return (units + units_per_group - 1) / units_per_group * threads *
         static_cast<int>(sizeof(uint32_t));
}
// What a block of a row spread over several hands on.
constexpr int64_t partial_bytes(int k) { return 8 * (1 + int64_t{k}); }

// Of the whole GPU: so many blocks a multiprocessor certainly runs at a time. One where rows need
// more registers, or where two could lack shared memory.
constexpr int topk_blocks_per_sm_of_whole_gpu(bool has_unit_stride, int shared_bytes) {
  const int of_block = groups_bytes(kMaxGroups, 1, 256) + kTopkMaxDeclaredBytes;
  return has_unit_stride && 2 * of_block <= shared_bytes ? 2 : 1;
}

// The first regime with the same kernel: clusters differ by their launch alone.
constexpr int topk_kernel_of(int index) {
  const auto is_same = [](const TopkRegime& a, const TopkRegime& b) {
    return a.threads == b.threads && a.blocks_per_sm == b.blocks_per_sm &&
           a.chunks_per_thread == b.chunks_per_thread &&
           (a.blocks_per_row == 1) == (b.blocks_per_row == 1);
  };
  int first = 0;
  while (!is_same(kTopkRegimes[first], kTopkRegimes[index])) ++first;
  return first;
}

// Backward.
inline constexpr int kTopkBackwardStages = 3;  // units in flight at a time
struct TopkBackwardRegime {
  char name[16];
  int threads_per_row;
  int rows_per_block;
  int blocks_per_sm;      // as above
  int chunks_per_thread;  // of a unit: loads in flight per thread
  int units;              // of a block, at most; the blocks of a row follow each other
  int max_chunks;

  constexpr int threads() const { return threads_per_row * rows_per_block; }
  constexpr int ring_bytes() const {
    return units == 1 ? 0 : kTopkBackwardStages * chunks_per_thread * threads() * 16;
  }
};
// clang-format off
inline constexpr TopkBackwardRegime kTopkBackwardRegimes[] = {
    // name,      threads/row, rows/block, blocks/SM, chunks, units, max chunks
    {"lanes_8",             8,         16,         8,      1,     1,          8},
    {"lanes_8x4",           8,         16,         5,      4,     1,         32},
    {"warp",               32,          4,         7,      4,     8,       1024},
    {"block_256",         256,          1,         4,      4,     8, kUnlimited},
};
// clang-format on

}  // namespace megasoftmax
