#pragma once
// Row regimes of the softmax, forward and backward: the family's only limits. Plain C++, no CUDA,
// no torch.
//
// A row is cut into chunks of 16 bytes. A regime says how many threads own a row, how many chunks
// each of them takes at a time, and where the row waits between the pass that sums and the pass
// that writes.

#include <cstdint>

namespace megasoftmax {

enum class Storage {
  kRegisters,  // one batch of chunks per thread, exponentials stay in registers
  kShared,     // any number of batches, the packed row waits in shared memory
  kReread,     // any number of batches, the row is read a second time
};

// What a launch asks of its rows; a regime may serve several.
enum Rows : unsigned {
  kPlain = 1,
  kLimited = 2,        // causal, or with a wide window
  kMasked = 4,         // with a bool mask
  kNarrow = 8,         // long ones of which a window leaves at most half: most of the work is zeros
  kBiasGradient = 16,  // backward, with sums that want registers
  kAnyRows = kPlain | kLimited | kMasked | kBiasGradient,
};

struct RowRegime {
  char name[16];  // by value, so that a row can be a template argument
  Storage storage;
  int threads_per_row;
  int rows_per_block;
  int chunks_per_thread;  // loads in flight per thread
  int max_chunks;         // visible chunks of a row
  int blocks_per_sm;      // the compiler's register budget: 65536 / (threads * blocks)
  unsigned serves;        // Rows

  constexpr int threads() const { return threads_per_row * rows_per_block; }
};

inline constexpr int kUnlimited = INT32_MAX;
// Chunks in all, and visible ones, of rows that count as narrow.
inline constexpr int64_t kLongRow = 512, kNarrowRow = 256;

// clang-format off
inline constexpr RowRegime kForwardRegimes[] = {
    // name            storage              threads  rows  chunks   max chunks  blocks  serves
    {"lanes_4x1",      Storage::kRegisters,     4,   16,      1,           4,     16, kAnyRows},
    {"lanes_4x4",      Storage::kRegisters,     4,   16,      4,          16,     16, kAnyRows},
    {"lanes_8x4",      Storage::kRegisters,     8,    8,      4,          32,     16, kAnyRows},
    {"lanes_16x4",     Storage::kRegisters,    16,    4,      4,          64,     16, kAnyRows},
    {"lanes_16x5",     Storage::kRegisters,    16,    4,      5,          80,     14, kAnyRows},
    {"warp_32x4",      Storage::kRegisters,    32,    2,      4,         128,     16, kAnyRows},
    {"warp_32x5",      Storage::kRegisters,    32,    2,      5,         160,     14, kAnyRows},
    {"block_64x4",     Storage::kRegisters,    64,    1,      4,         256,     18, kAnyRows},
    {"narrow_256x1",   Storage::kRegisters,   256,    1,      1,         256,      6, kNarrow},
    {"block_64x5",     Storage::kRegisters,    64,    1,      5,         320,     16, kAnyRows},
    {"block_128x4",    Storage::kRegisters,   128,    1,      4,         512,      9, kLimited | kMasked},
    {"shared_64",      Storage::kShared,       64,    1,      2,         512,     18, kPlain},
    {"block_128x5",    Storage::kRegisters,   128,    1,      5,         640,      8, kAnyRows},
    {"block_256x4",    Storage::kRegisters,   256,    1,      4,        1024,      4, kMasked},
    {"shared_64_long", Storage::kShared,       64,    1,      2,        1026,     18, kAnyRows},
    {"shared_256",     Storage::kShared,      256,    1,      2,        4098,      4, kAnyRows},
    {"reread_512",     Storage::kReread,      512,    1,      2,  kUnlimited,      1, kAnyRows},
};
inline constexpr RowRegime kBackwardRegimes[] = {
    {"lanes_4x1",      Storage::kRegisters,     4,   16,      1,           4,     14, kAnyRows},
    {"lanes_4x4",      Storage::kRegisters,     4,   16,      4,          16,     12, kAnyRows},
    {"lanes_8x4",      Storage::kRegisters,     8,    8,      4,          32,     12, kAnyRows},
    {"lanes_16x4",     Storage::kRegisters,    16,    4,      4,          64,     12, kAnyRows},
    {"warp_32x4",      Storage::kRegisters,    32,    2,      4,         128,     12, kBiasGradient},
    {"warp_32x5",      Storage::kRegisters,    32,    2,      5,         160,     10, kBiasGradient},
    {"block_64x4",     Storage::kRegisters,    64,    1,      4,         256,     14, kBiasGradient},
    {"narrow_256x1",   Storage::kRegisters,   256,    1,      1,         256,      5, kNarrow},
    {"block_64x5",     Storage::kRegisters,    64,    1,      5,         320,     12, kBiasGradient},
    {"shared_32",      Storage::kShared,       32,    1,      2,         322,     32, kPlain | kLimited},
    {"block_128x4",    Storage::kRegisters,   128,    1,      4,         512,      7, kBiasGradient},
    {"block_128x5",    Storage::kRegisters,   128,    1,      5,         640,      6, kBiasGradient},
    {"shared_64",      Storage::kShared,       64,    1,      2,        1026,     16, kAnyRows},
    {"shared_256",     Storage::kShared,      256,    1,      2,        3072,      4, kAnyRows},
    {"reread_512",     Storage::kReread,      512,    1,      2,  kUnlimited,      1, kAnyRows},
};
// clang-format on

inline constexpr int kNumForwardRegimes = sizeof(kForwardRegimes) / sizeof(RowRegime);
inline constexpr int kNumBackwardRegimes = sizeof(kBackwardRegimes) / sizeof(RowRegime);

// The first regime that serves such rows and is long enough.
template <int kCount>
constexpr int regime_for(const RowRegime (&table)[kCount], int64_t chunks, Rows rows) {
  for (int i = 0; i < kCount; ++i) {
    if (chunks <= table[i].max_chunks && (table[i].serves & rows) != 0) return i;
  }
  return kCount - 1;
}

template <int kCount>
constexpr bool is_consistent(const RowRegime (&table)[kCount]) {
  for (int i = 0; i < kCount; ++i) {
    const RowRegime& regime = table[i];
    if (i > 0 && regime.max_chunks < table[i - 1].max_chunks) return false;
    if (regime.storage == Storage::kRegisters &&
        regime.max_chunks != regime.threads_per_row * regime.chunks_per_thread)
      return false;
    // Sums in global memory pass between threads, which only a block's barrier orders.
    if ((regime.serves & kBiasGradient) != 0 && regime.storage != Storage::kRegisters &&
        regime.threads_per_row <= 32)
      return false;
    if (regime.threads() % 32 != 0 ||
        ((regime.threads_per_row > 32 || regime.storage != Storage::kRegisters) &&
         regime.rows_per_block != 1))
      return false;
  }
  return table[kCount - 1].max_chunks == kUnlimited;
}
static_assert(is_consistent(kForwardRegimes) && is_consistent(kBackwardRegimes));

// The most chunks that any row can need: a row need not start on a 16-byte boundary, a window need
// not either.
constexpr int64_t max_visible_chunks(int64_t columns, int64_t visible_columns, int pack_elements) {
  const int64_t straddling = 2 * (pack_elements - 1);
  const int64_t whole = columns % pack_elements == 0 ? columns / pack_elements
                                                     : (columns + straddling) / pack_elements;
  const int64_t visible = (visible_columns + straddling) / pack_elements;
  return visible_columns < columns && visible < whole ? visible : whole;
}

}  // namespace megasoftmax
