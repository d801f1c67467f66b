#pragma once
// Row regimes: the shapes and thresholds of limits.h joined, what follows from a regime, and which
// regime serves a launch. Plain C++, no CUDA, no torch.

#include <algorithm>
#include <array>
#include <span>

#include "limits.h"

namespace megasoftmax {

// A threshold with its shape. A launch takes the first regime that can serve it.
struct RowRegime : RowShape {
  int shape;  // index in the table of shapes
  int max_vectors;
  int min_rows;
  unsigned serves;

  constexpr bool serves_any(unsigned rows) const { return (serves & rows) != 0; }
};

template <int kShapes, int kThresholds>
consteval std::array<RowRegime, kThresholds> regimes_of(
    const RowShape (&shapes)[kShapes], const RowThreshold (&thresholds)[kThresholds]) {
  std::array<RowRegime, kThresholds> regimes = {};
  for (int i = 0; i < kThresholds; ++i) {
    const auto& [name, max_vectors, min_rows, serves] = thresholds[i];
    int shape = 0;
    while (shapes[shape].name != name) ++shape;  // does not compile if there is none
    regimes[i] = {shapes[shape], shape, max_vectors, min_rows, serves};
  }
  return regimes;
}
inline constexpr auto kForwardRegimes = regimes_of(kForwardShapes, kForwardThresholds);
inline constexpr auto kBackwardRegimes = regimes_of(kBackwardShapes, kBackwardThresholds);
using RowRegimes = std::span<const RowRegime>;

// All kinds of rows that regimes of a shape serve.
constexpr unsigned rows_of_shape(RowRegimes regimes, int shape) {
  unsigned rows = 0;
  for (const RowRegime& regime : regimes)
    if (regime.shape == shape) rows |= regime.serves;
  return rows;
}

// The first shape with the same kernel: nvcc takes no structs as template arguments of kernels.
template <int kCount>
constexpr int kernel_of(const RowShape (&shapes)[kCount], int shape) {
  int first = 0;
  while (shapes[first].kernel() != shapes[shape].kernel()) ++first;
  return first;
}
template <int kKernel>
inline constexpr KernelShape kForwardKernel = kForwardShapes[kKernel].kernel();
template <int kKernel>
inline constexpr KernelShape kBackwardKernel = kBackwardShapes[kKernel].kernel();

// Warp tiles of a segment, and segments of a row. A row of many warp tiles has more of them in a
// segment, so that it has at most kMaxSegments.
constexpr int warp_tiles_per_segment(int64_t vectors) {
  int warp_tiles = kWarpTilesPerSegment;
  while (int64_t{warp_tiles} * kWarpTileVectors * kMaxSegments < vectors) warp_tiles *= 2;
  return warp_tiles;
}
constexpr int segment_count(int64_t vectors) {
  const int64_t segment_vectors = int64_t{warp_tiles_per_segment(vectors)} * kWarpTileVectors;
  return static_cast<int>((vectors + segment_vectors - 1) / segment_vectors);
}

// The fewest warp tiles that a block keeps in shared memory. A vector takes `vector_bytes` there.
constexpr int kept_warp_tiles(const RowRegime& regime, int64_t vectors, int vector_bytes) {
  if (regime.storage == Storage::kReread)
    return regime.rings() * kRingBytes / (kWarpTileVectors * vector_bytes);
  if (regime.storage != Storage::kShared) return 0;
  return (segment_count(vectors) + regime.blocks_per_row - 1) / regime.blocks_per_row *
         kWarpTilesPerSegment;
}
// Results of the segments of two rows, which alternate. Rows that lie over the whole GPU have
// theirs in the workspace.
constexpr int result_bytes(const RowRegime& regime, int64_t vectors) {
  return regime.blocks_per_row == kWholeGpu ? 0 : segment_count(vectors) * 2 * kResultBytes;
}
constexpr int shared_bytes(const RowRegime& regime, int warp_tiles, int64_t vectors,
                           int vector_bytes) {
  return warp_tiles == 0
             ? 0
             : warp_tiles * kWarpTileVectors * vector_bytes + result_bytes(regime, vectors);
}

// Warp tiles that each of `blocks` blocks on a multiprocessor has room for.
constexpr int room_for_warp_tiles(const RowRegime& regime, int blocks, int64_t vectors,
                                  int vector_bytes, const Device& device) {
  const int share = (device.shared_bytes + kReservedSharedBytes) / blocks - kReservedSharedBytes -
                    kMaxDeclaredBytes - result_bytes(regime, vectors);
  return share / (kWarpTileVectors * vector_bytes);
}
// Persistent blocks on a multiprocessor: fewer than the shape allows if rings would be too short.
constexpr int persistent_blocks(const RowRegime& regime, int64_t vectors, int vector_bytes,
                                const Device& device) {
  const int least = kept_warp_tiles(regime, vectors, vector_bytes);
  int blocks = regime.blocks_per_sm;
  while (blocks > 1 && regime.storage == Storage::kReread &&
         room_for_warp_tiles(regime, blocks, vectors, vector_bytes, device) < least)
    --blocks;
  return blocks;
}
// Warp tiles that a block keeps. A persistent block also keeps as much of its next row as it has
// room for.
constexpr int kept_warp_tiles_with_next(const RowRegime& regime, int64_t vectors, int vector_bytes,
                                        const Device& device) {
  const int least = kept_warp_tiles(regime, vectors, vector_bytes);
  if (!regime.is_persistent) return least;
  const int blocks = persistent_blocks(regime, vectors, vector_bytes, device);
  const int room = room_for_warp_tiles(regime, blocks, vectors, vector_bytes, device);
  if (room < least) return least;
  if (regime.storage == Storage::kReread) return room / regime.rings() * regime.rings();
  return room > 2 * least ? 2 * least : room;
}

// Why a regime does not serve a launch, as bits. megasoftmax/explain/softmax.py has their words.
enum Obstacle : unsigned {
  kOtherRows = 1,  // it is not for rows of this kind
  kTooLong = 2,
  kTooFewRows = 4,
  kNoSuchCluster = 8,
  kTooManyBytes = 16,  // of shared memory
};
constexpr unsigned obstacles_of(const RowRegime& regime, int64_t vectors, int64_t rows, Rows kind,
                                int vector_bytes, const Device& device) {
  const bool has_cluster = regime.blocks_per_row <= device.max_cluster &&
                           regime.least_multiprocessors() <= device.multiprocessors;
  const unsigned found =
      (regime.serves_any(kind) ? 0u : kOtherRows) | (vectors > regime.max_vectors ? kTooLong : 0u) |
      (rows < regime.min_rows ? kTooFewRows : 0u) | (has_cluster ? 0u : kNoSuchCluster);
  if (found != 0) return found;
  int warp_tiles = kept_warp_tiles(regime, vectors, vector_bytes);
  // A persistent block that is alone on its multiprocessor needs room for a quarter of the next
  // row, because no other block uses memory meanwhile.
  if (regime.is_persistent && regime.blocks_per_sm == 1) warp_tiles += warp_tiles / 4;
  const int bytes = shared_bytes(regime, warp_tiles, vectors, vector_bytes) + kMaxDeclaredBytes;
  return bytes > device.shared_bytes ? kTooManyBytes : 0u;
}

// The first regime without an obstacle. is_consistent makes sure that there is one.
constexpr int regime_for(RowRegimes regimes, int64_t vectors, int64_t rows, Rows kind,
                         int vector_bytes, const Device& device) {
  const int last = static_cast<int>(regimes.size()) - 1;
  int i = 0;
  while (i < last && obstacles_of(regimes[i], vectors, rows, kind, vector_bytes, device) != 0) ++i;
  return i;
}

// What the tables promise

// One block adds a kContiguousRagged row in an order of its own. So the number of rows must not
// decide whether one block has the row, unless the row has a single segment: then another regime
// adds fewer rows in the same order. Longer rows take regimes that serve kRagged rows too.
constexpr bool keeps_ragged_bits(RowRegimes regimes) {
  const auto has_twin = [&](const RowRegime& regime) {
    return std::any_of(regimes.begin(), regimes.end(), [&](const RowRegime& other) {
      return other.serves_any(kContiguousRagged) && other.max_vectors == regime.max_vectors &&
             other.min_rows == 0 && other.threads_per_row < kMostContiguousThreads;
    });
  };
  bool are_longer = false;
  for (const RowRegime& regime : regimes) {
    if (!regime.serves_any(kContiguousRagged)) continue;
    if (regime.storage != Storage::kContiguous) return false;
    if (regime.blocks_per_row != 1) {
      are_longer = true;
    } else if (are_longer || (regime.min_rows != 0 && !has_twin(regime))) {
      return false;
    }
  }
  return true;
}

// Registers add a row in an order of their own. So the rows that a regime with segments takes
// before regime `index` for registers must not depend on the number of rows.
constexpr bool keeps_bits_of_registers(RowRegimes regimes, int index) {
  const RowRegime& regime = regimes[index];
  for (unsigned kind = 1; kind <= regime.serves; kind *= 2) {
    if (!regime.serves_any(kind)) continue;
    const unsigned alike = kind == kRagged ? kRagged | kContiguousRagged : kind;
    int longest = 0, certain = 0;
    for (const RowRegime& other : regimes.first(index)) {
      const bool has_segments =
          other.storage == Storage::kShared || other.storage == Storage::kContiguous;
      if (!has_segments || !other.serves_any(alike)) continue;
      longest = std::max(longest, other.max_vectors);
      if (other.min_rows == 0 && other.blocks_per_row == 1)
        certain = std::max(certain, other.max_vectors);
    }
    if (longest > certain) return false;
  }
  return true;
}

constexpr bool is_consistent(const RowRegime& regime, int vector_bytes) {
  if (regime.storage == Storage::kTile) return true;  // flat.cuh chooses the shape
  const bool is_register = regime.storage == Storage::kRegisters;
  const bool is_contiguous = regime.storage == Storage::kContiguous;
  const int vectors_per_block = regime.threads_per_row * regime.vectors_per_thread;
  if (is_register && (regime.max_vectors != vectors_per_block || regime.min_rows != 0 ||
                      regime.blocks_per_row != 1))
    return false;
  if (is_contiguous && regime.max_vectors > regime.blocks_per_row * vectors_per_block) return false;
  if (regime.blocks_per_row > kMaxCluster) return false;
  // All regimes have the same segments and join them in one order. They join groups of segments
  // only if all rows of that length are read twice.
  if (!is_register && !is_contiguous && regime.vectors_per_thread * 32 != kWarpTileVectors)
    return false;
  if (!is_register && regime.storage != Storage::kReread &&
      segment_count(regime.max_vectors) > kSegmentsOfWarp)
    return false;
  if (regime.storage == Storage::kReread &&
      kept_warp_tiles(regime, kUnlimited, vector_bytes) < 2 * regime.rings())
    return false;
  if (regime.storage == Storage::kShared) {
    const int warp_tiles = kept_warp_tiles(regime, regime.max_vectors, vector_bytes);
    const int most = regime.blocks_per_sm == 1 ? kMaxSharedBytesAlone : kMaxSharedBytes;
    if (warp_tiles_per_segment(regime.max_vectors) != kWarpTilesPerSegment ||
        shared_bytes(regime, warp_tiles, regime.max_vectors, vector_bytes) > most)
      return false;
  }
  // Sums of a bias gradient belong to one block, whose barrier orders them.
  if (regime.serves_any(kBiasGradient | kDroppedBiasGradient) && !is_register &&
      (regime.threads_per_row <= 32 || regime.blocks_per_row != 1))
    return false;
  const bool may_share_block = regime.threads_per_row <= 32 && (is_register || is_contiguous);
  return regime.kernel().threads() % 32 == 0 && (may_share_block || regime.rows_per_block == 1);
}

// Does some regime serve rows of this kind, however long and on any GPU? Only asked of kinds that
// may be very long.
constexpr bool serves_longest(RowRegimes regimes, Rows kind, int vector_bytes) {
  return std::any_of(regimes.begin(), regimes.end(), [&](const RowRegime& regime) {
    const int warp_tiles = kept_warp_tiles(regime, kUnlimited, vector_bytes);
    return regime.serves_any(kind) && regime.storage == Storage::kReread &&
           regime.max_vectors == kUnlimited && regime.min_rows == 0 && regime.blocks_per_row <= 1 &&
           shared_bytes(regime, warp_tiles, kUnlimited, vector_bytes) + kMaxDeclaredBytes <=
               least_shared_bytes(0);
  });
}

constexpr bool are_consistent(RowRegimes regimes, int vector_bytes) {
  for (int i = 0; i < static_cast<int>(regimes.size()); ++i) {
    if (!is_consistent(regimes[i], vector_bytes) ||
        (regimes[i].storage == Storage::kRegisters && !keeps_bits_of_registers(regimes, i)))
      return false;
  }
  unsigned may_be_long = 0;
  for (const RowRegime& regime : regimes)
    if (regime.storage == Storage::kReread) may_be_long |= regime.serves;
  for (unsigned kind = 1; kind <= may_be_long; kind *= 2) {
    if ((may_be_long & kind) != 0 &&
        !serves_longest(regimes, static_cast<Rows>(kind), vector_bytes))
      return false;
  }
  return keeps_ragged_bits(regimes);
}
static_assert(are_consistent(kForwardRegimes, 16) && are_consistent(kBackwardRegimes, 2 * 16));

// The first vector of a row that nothing is read with begins at a multiple of this many elements.
__host__ __device__ constexpr int grid_elements(int64_t columns, int pack_elements) {
  return columns % pack_elements == 0 || columns < kAlignedVectors * pack_elements
             ? pack_elements
             : kLineVectors * pack_elements;
}

// The most vectors that any row of a launch can need. Rows and windows need not begin where vectors
// do.
constexpr int64_t max_visible_vectors(int64_t columns, int64_t visible_columns, int pack_elements) {
  const int64_t end = pack_elements - 1;
  const int64_t begin = grid_elements(columns, pack_elements) - 1;
  const int64_t whole = columns % pack_elements == 0 ? columns / pack_elements
                                                     : (columns + begin + end) / pack_elements;
  const int64_t visible = (visible_columns + 2 * end) / pack_elements;
  return visible_columns < columns && visible < whole ? visible : whole;
}

}  // namespace megasoftmax
