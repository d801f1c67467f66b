#pragma once
// Regimes of softmax_topk: the family's only limits. Plain C++, no CUDA, no torch.
//
// A vector is 16 bytes of a row. A segment is the vectors that a block loads at a time, a few for
// each thread. The segments of a block form groups: a group is one segment, or several if the block
// has more than kMaxGroups. Each thread keeps the largest of its logits in each group.

#include <string_view>

#include "../softmax/limits.h"

namespace megasoftmax {

inline constexpr int kMaxK = 256;
inline constexpr int kMaxGroups = 32;
// Logits that may wait for their rank: k, and those that a threshold allows beyond them.
inline constexpr int kMaxCandidates = 512;
// The scales of rows, see SCALES of megasoftmax/reference/topk.py. Others make NaN of a row.
inline constexpr float kTiniestRowScale = 1.17549435e-38f;
inline constexpr float kLargestRowScale = static_cast<float>(0.69 * 3.4028234663852886e38);
// Shared memory that kernels declare themselves, besides what the plan gives a block.
inline constexpr int kTopkMaxDeclaredBytes = 16384;
// What a thread of a router may spill: with more registers fewer blocks of them would run.
inline constexpr int kTopkMaxSpilledBytes = 16;

// Short rows of a contiguous tensor, without mask and bias, form a tile in shared memory, see
// tile.cuh. Rows of kRankingLanes lanes or more rank their candidates, others sort them by
// networks.
inline constexpr int kTileThreads = 128, kMaxTileVectors = 8, kTileMaxK = 16;
inline constexpr int kTileMaxVectors = 32 * kMaxTileVectors, kRankingLanes = 4;
// Rows that are chosen by a sigmoid or with a bias, see router.cuh. A lane of a row has so many
// elements: with half of them twice as many lanes would merge thresholds.
inline constexpr int kRouterElements = 64, kRouterMaxColumns = 1024;
static_assert(kRouterMaxColumns <= 32 * kRouterElements);

// Other rows, forward
struct TopkRegime {
  std::string_view name;
  int threads;
  int blocks_per_sm;       // sets the compiler's register limit: 65536 / (threads * blocks). With a
                           // mask, a bias or another stride than 1 there are half as many blocks
  int vectors_per_thread;  // of a segment: that a thread loads before it uses the first one
  int blocks_per_row;      // more than 1: a cluster; kWholeGpu: all blocks share the rows
  int max_vectors;         // of a row
  int min_rows;            // of the launch; fewer rows take a later regime

  // Larger blocks would not have registers for a mask, a bias or another stride than 1.
  constexpr bool takes_any_row() const { return threads <= 256; }
};

// The first regime that can serve a launch does.
// clang-format off
inline constexpr TopkRegime kTopkRegimes[] = {
    // name,      threads, blocks/SM, vectors, blocks/row, max vectors, min rows
    {"block_32",       32,        30,      4,          1,        512,      100},
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

// Can the last regime serve any launch?
constexpr bool is_complete(const TopkRegime& last) {
  return last.max_vectors == kUnlimited && last.min_rows == 0 && last.threads >= kMaxK &&
         last.blocks_per_row == 1 && last.takes_any_row();
}
static_assert(is_complete(kTopkRegimes[sizeof(kTopkRegimes) / sizeof(TopkRegime) - 1]));

// Shared memory of the largest logits of a block's groups.
constexpr int groups_bytes(int segments, int segments_per_group, int threads) {
  return (segments + segments_per_group - 1) / segments_per_group * threads *
         static_cast<int>(sizeof(uint32_t));
}
// What a block of a row that several blocks share hands on: a sum and k keys.
constexpr int64_t partial_bytes(int k) { return 8 * (1 + int64_t{k}); }

// Blocks of the whole GPU that a multiprocessor certainly runs at a time: one if rows need more
// registers, or if two might lack shared memory.
constexpr int topk_blocks_per_sm_of_whole_gpu(bool has_unit_stride, int shared_bytes) {
  const int of_block = groups_bytes(kMaxGroups, 1, 256) + kTopkMaxDeclaredBytes;
  return has_unit_stride && 2 * of_block <= shared_bytes ? 2 : 1;
}

// The first regime with the same kernel. Regimes with different clusters may have one kernel.
constexpr int topk_kernel_of(int index) {
  const auto is_same = [](const TopkRegime& a, const TopkRegime& b) {
    return a.threads == b.threads && a.blocks_per_sm == b.blocks_per_sm &&
           a.vectors_per_thread == b.vectors_per_thread &&
           (a.blocks_per_row == 1) == (b.blocks_per_row == 1);
  };
  int first = 0;
  while (!is_same(kTopkRegimes[first], kTopkRegimes[index])) ++first;
  return first;
}

// Backward
inline constexpr int kTopkBackwardStages = 3;  // segments that are loaded at a time
struct TopkBackwardRegime {
  std::string_view name;
  int threads_per_row;
  int rows_per_block;
  int blocks_per_sm;       // see TopkRegime
  int vectors_per_thread;  // see TopkRegime
  int segments;            // of a block at most; the blocks of a row follow each other
  int max_vectors;

  constexpr int threads() const { return threads_per_row * rows_per_block; }
  constexpr int ring_bytes() const {
    return segments == 1 ? 0 : kTopkBackwardStages * vectors_per_thread * threads() * 16;
  }
};
// clang-format off
inline constexpr TopkBackwardRegime kTopkBackwardRegimes[] = {
    // name,      threads/row, rows/block, blocks/SM, vectors, segments, max vectors
    {"lanes_8x1",           8,         16,         8,      1,     1,          8},
    {"lanes_8x4",           8,         16,         5,      4,     1,         32},
    {"lanes_32x4",         32,          4,         7,      4,     8,       1024},
    {"block_256",         256,          1,         4,      4,     8, kUnlimited},
};
// clang-format on

}  // namespace megasoftmax
