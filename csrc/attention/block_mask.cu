// Makes the block mask of mask and ranges, see block_mask.h. With a mask a warp looks at one tile;
// ranges alone need no look at tiles.

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "attention.h"

namespace megasoftmax {
namespace {

constexpr int kBlockMaskThreads = 256;
constexpr int kThreadsOfWord = 1024;  // a warp for each of the 32 tiles of a word

// The bits of a tile's keys, from `first_key` on.
using TileBits = uint64_t;

// The bits below `count`, which may be any number.
__device__ TileBits bits_below(int count) {
  return count <= 0 ? 0 : count >= 64 ? ~TileBits{0} : (TileBits{1} << count) - 1;
}

// A bit for each byte of a word that is not 0, the lowest first.
__device__ uint32_t bits_of_bytes(uint32_t bytes) {
  const uint32_t ones = signs_of_bytes(bytes) >> 7 & 0x01010101;
  return ones * 0x01020408 >> 24;  // each of the four has a place of its own in the product
}

// Whether read_wide_mask may read a tile of a mask, which begins at `tile`.
__device__ bool is_wide(const AttentionParams& params, const bool* tile, int first_key) {
  const Strided& mask = params.mask;
  return mask.column_stride == 1 && first_key + kMaskTile <= params.keys &&
         (reinterpret_cast<uintptr_t>(tile) | mask.query_stride) % sizeof(uint4) == 0;
}
// Where a tile of a mask excludes the keys of query lane and query lane + 32. Four lanes read the
// 64 keys of a query.
__device__ void read_wide_mask(const AttentionParams& params, const bool* tile, int first_query,
                               TileBits (&excluded)[2]) {
  constexpr int kLanes = kMaskTile / sizeof(uint4), kRows = 32 / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint4 bytes[kMaskTile / kRows];
#pragma unroll
  for (int i = 0; i < kMaskTile / kRows; ++i) {
    const int row = i * kRows + lane / kLanes;
    bytes[i] = {0, 0, 0, 0};
    if (first_query + row < params.queries)
      bytes[i] = __ldg(reinterpret_cast<const uint4*>(tile + row * params.mask.query_stride) +
                       lane % kLanes);
  }
#pragma unroll
  for (int i = 0; i < kMaskTile / kRows; ++i) {
    const uint32_t mine = bits_of_bytes(bytes[i].x) | bits_of_bytes(bytes[i].y) << 4 |
                          bits_of_bytes(bytes[i].z) << 8 | bits_of_bytes(bytes[i].w) << 12;
    const uint32_t pair = mine << lane % 2 * 16;
    const uint32_t word = pair | __shfl_xor_sync(~0u, pair, 1);
    const int first = lane % kRows * kLanes;
    const uint32_t left = __shfl_sync(~0u, word, first);
    const uint32_t right = __shfl_sync(~0u, word, first + 2);
    if (lane / kRows == i % (32 / kRows)) excluded[i / (32 / kRows)] = TileBits{right} << 32 | left;
  }
}

// Reads a tile of a mask of any strides and alignment. Lanes read neighbouring entries.
__device__ void read_mask(const AttentionParams& params, int batch, int head, int first_query,
                          int first_key, TileBits (&excluded)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Strided& mask = params.mask;
  if (params.mask_block > 1) {
    const bool* const row = params.mask_row(batch, head, first_query / params.mask_block);
    const bool is_excluded = row[first_key / params.mask_block * mask.column_stride];
    excluded[0] = excluded[1] = is_excluded ? ~TileBits{0} : 0;
    return;
  }
  const bool* const tile =
      params.mask_row(batch, head, first_query) + int64_t{first_key} * mask.column_stride;
  if (mask.query_stride != 0 && is_wide(params, tile, first_key)) {
    read_wide_mask(params, tile, first_query, excluded);
    return;
  }
  const bool* const rows = tile + int64_t{lane} * mask.column_stride;
  const bool has_left = first_key + lane < params.keys;
  const bool has_right = first_key + lane + 32 < params.keys;
  const auto read = [&](int row) -> TileBits {
    const bool* const at = rows + row * mask.query_stride;
    const uint32_t left = __ballot_sync(~0u, has_left && at[0]);
    const uint32_t right = __ballot_sync(~0u, has_right && at[32 * mask.column_stride]);
    return TileBits{right} << 32 | left;
  };
  if (mask.query_stride == 0) {
    excluded[0] = excluded[1] = read(0);
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int count = min(params.queries - first_query - half * 32, 32);
#pragma unroll 8
    for (int row = 0; row < count; ++row) {
      const TileBits bits = read(half * 32 + row);
      if (row == lane) excluded[half] = bits;
    }
  }
}

// Transposes 32 x 32 bits, a row in each lane.
__device__ uint32_t transposed(uint32_t bits) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t mask = 0x0000ffff;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2, mask ^= mask << distance) {
    const uint32_t other = __shfl_xor_sync(~0u, bits, distance);
    bits = (lane & distance) != 0 ? (bits & ~mask) | (other >> distance & mask)
                                  : (bits & mask) | (other & mask) << distance;
  }
  return bits;
}

// Writes the bits of a tile again, with the queries of each key together.
__device__ void write_by_key(uint32_t* tile, const TileBits (&excluded)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto of_keys = [&](TileBits bits) {
      return transposed(static_cast<uint32_t>(bits >> half * 32));
    };
    reinterpret_cast<uint2*>(tile)[half * 32 + threadIdx.x % 32] =
        make_uint2(of_keys(excluded[0]), of_keys(excluded[1]));
  }
}

// The bits of tiles must be 0.
template <bool kIsForBackward>
__global__ void __launch_bounds__(kBlockMaskThreads)
    attention_block_mask_kernel(const __grid_constant__ AttentionParams params, int batches,
                                int heads) {
  if (!kIsAmpere) return;
  const BlockMaskLayout& layout = params.block_mask.layout;
  const int64_t of_head = int64_t{layout.query_tiles} * layout.key_tiles;
  const int64_t index = (int64_t{blockIdx.x} * kBlockMaskThreads + threadIdx.x) / 32;
  if (index >= of_head * heads * batches) return;
  const int entry = static_cast<int>(index / of_head);
  const int64_t tile = index - entry * of_head;
  const int batch = entry / heads, head = entry % heads;
  const int query_tile = static_cast<int>(tile / layout.key_tiles);
  const int key_tile = static_cast<int>(tile - int64_t{query_tile} * layout.key_tiles);
  const int first_query = query_tile * kMaskTile, first_key = key_tile * kMaskTile;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  TileBits excluded[2] = {0, 0};
  read_mask(params, batch, head, first_query, first_key, excluded);
  uint32_t* const words = params.block_mask.of(batch, head);
  if (kIsForBackward && layout.has_bits_by_key())
    write_by_key(words + layout.bits_by_key(key_tile, query_tile), excluded);
  const TileBits inside = bits_below(params.keys - first_key);
  bool is_seen = false, is_mixed = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first_query + half * 32 + lane;
    if (query >= params.queries) continue;
    if (query < layout.bit_rows)
      reinterpret_cast<TileBits*>(
          words + layout.bits())[int64_t{query} * (layout.words_of_bits() / 2) + key_tile] =
          excluded[half];
    TileBits visible = inside & ~excluded[half];
    const auto& [first, end] = params.visible;
    if (first.data != nullptr)
      visible &= ~bits_below(max(first.at(batch, head, query), 0) - first_key);
    if (end.data != nullptr) visible &= bits_below(max(end.at(batch, head, query), 0) - first_key);
    is_seen |= visible != 0;
    is_mixed |= visible != inside;
  }
  is_seen = __any_sync(~0u, is_seen);
  is_mixed = __any_sync(~0u, is_mixed);
  if (lane != 0 || !is_seen) return;
  const int64_t by_query = int64_t{query_tile} * layout.words_of_keys() + key_tile / 32;
  const int64_t by_key = int64_t{key_tile} * layout.words_of_queries() + query_tile / 32;
  atomicOr(words + layout.seen_by_query() + by_query, 1u << key_tile % 32);
  atomicOr(words + layout.seen_by_key() + by_key, 1u << query_tile % 32);
  if (is_mixed) atomicOr(words + layout.mixed_by_query() + by_query, 1u << key_tile % 32);
}

// For a mask of keys, which all queries share. A block takes 32 tiles of keys, a word of each line
// of queries; each warp reads a tile. A block has no more warps than the row has tiles, so that
// more blocks run at a time.
__global__ void __launch_bounds__(kThreadsOfWord)
    attention_block_mask_of_keys_kernel(const __grid_constant__ AttentionParams params,
                                        int words_of_keys, int heads) {
  if (!kIsAmpere) return;
  const BlockMaskLayout& layout = params.block_mask.layout;
  const int entry = static_cast<int>(blockIdx.x) / words_of_keys;
  const int word = static_cast<int>(blockIdx.x) % words_of_keys;
  const int batch = entry / heads, head = entry % heads;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int key_tile = 32 * word + warp;
  uint32_t* const words = params.block_mask.of(batch, head);
  __shared__ bool is_seen[32], is_mixed[32];
  bool sees = false, mixes = false;
  if (key_tile < layout.key_tiles) {
    TileBits excluded[2];
    read_mask(params, batch, head, 0, key_tile * kMaskTile, excluded);
    if (lane == 0) reinterpret_cast<TileBits*>(words + layout.bits())[key_tile] = excluded[0];
    const TileBits inside = bits_below(params.keys - key_tile * kMaskTile);
    sees = (inside & ~excluded[0]) != 0;
    mixes = sees && (inside & excluded[0]) != 0;
    for (int i = lane; i < layout.words_of_queries(); i += 32)
      words[layout.seen_by_key() + int64_t{key_tile} * layout.words_of_queries() + i] =
          sees ? static_cast<uint32_t>(bits_below(min(layout.query_tiles - 32 * i, 32))) : 0;
  }
  if (lane == 0) {
    is_seen[warp] = sees;
    is_mixed[warp] = mixes;
  }
  __syncthreads();
  const int threads = static_cast<int>(blockDim.x);
  const bool has_warp = lane < threads / 32;
  const uint32_t seen = __ballot_sync(~0u, has_warp && is_seen[lane]);
  const uint32_t mixed = __ballot_sync(~0u, has_warp && is_mixed[lane]);
  for (int i = static_cast<int>(threadIdx.x); i < layout.query_tiles; i += threads) {
    uint32_t* const line = words + int64_t{i} * words_of_keys + word;
    line[layout.seen_by_query()] = seen;
    line[layout.mixed_by_query()] = mixed;
  }
}

// The bits [begin, end) of a word whose first bit is number `first`.
__device__ uint32_t bits_between(int begin, int end, int first) {
  const auto below = [&](int number) -> uint32_t {
    const int count = number - first;
    return count <= 0 ? 0 : count >= 32 ? ~0u : (1u << count) - 1;
  };
  return below(end) & ~below(begin);
}

// The tiles of keys that a tile of queries sees, and those that it sees whole, as ranges [first,
// last).
struct SeenTiles {
  int begin, end, whole_begin, whole_end;
};

// A warp finds them. Tiles between two ranges count as seen and as mixed.
__device__ SeenTiles seen_tiles(const AttentionParams& params, int batch, int head,
                                int first_query) {
  int least_first = INT32_MAX, most_first = 0, least_end = params.keys, most_end = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first_query + half * 32 + static_cast<int>(threadIdx.x) % 32;
    if (query >= params.queries) continue;
    const auto& visible = params.visible;
    int first = 0, end = params.keys;
    if (visible.first.data != nullptr) first = max(visible.first.at(batch, head, query), 0);
    if (visible.end.data != nullptr) end = min(visible.end.at(batch, head, query), params.keys);
    if (first < end) {
      least_first = min(least_first, first);
      most_end = max(most_end, end);
    } else {
      first = INT32_MAX;  // nothing is seen whole
    }
    most_first = max(most_first, first);
    least_end = min(least_end, end);
  }
  least_first = smallest_of_lanes(least_first);
  most_first = largest_of_lanes(most_first);
  least_end = smallest_of_lanes(least_end);
  most_end = largest_of_lanes(most_end);
  const auto tiles_up_to = [](int key) { return key / kMaskTile + (key % kMaskTile > 0); };
  return {least_first / kMaskTile, tiles_up_to(most_end), tiles_up_to(most_first),
          least_end == params.keys ? tiles_up_to(params.keys) : least_end / kMaskTile};
}

// A block writes 32 tiles of queries, a word of each line of keys.
__global__ void __launch_bounds__(kThreadsOfWord)
    attention_block_mask_of_ranges_kernel(const __grid_constant__ AttentionParams params,
                                          int groups, int heads) {
  if (!kIsAmpere) return;
  const BlockMaskLayout& layout = params.block_mask.layout;
  const int entry = static_cast<int>(blockIdx.x) / groups;
  const int group = static_cast<int>(blockIdx.x) % groups;
  const int batch = entry / heads, head = entry % heads;
  constexpr int kWarps = kThreadsOfWord / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  __shared__ SeenTiles seen_of[32];
  static_assert(kWarps == 32);
  const SeenTiles seen_by_warp = seen_tiles(params, batch, head, (group * 32 + warp) * kMaskTile);
  if (lane == 0) seen_of[warp] = seen_by_warp;
  __syncthreads();
  const SeenTiles tiles = seen_of[lane];
  const int query_tile = group * 32 + lane;
  uint32_t* const words = params.block_mask.of(batch, head);
  for (int word = warp; word < layout.words_of_keys(); word += kWarps) {
    const uint32_t seen = bits_between(tiles.begin, tiles.end, word * 32);
    if (query_tile < layout.query_tiles) {
      uint32_t* const line = words + int64_t{query_tile} * layout.words_of_keys() + word;
      line[layout.seen_by_query()] = seen;
      line[layout.mixed_by_query()] =
          seen & ~bits_between(tiles.whole_begin, tiles.whole_end, word * 32);
    }
    uint32_t seen_by_key = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const uint32_t of_tile = __ballot_sync(~0u, (seen >> i & 1) != 0);
      if (lane == i) seen_by_key = of_tile;
    }
    const int key_tile = word * 32 + lane;
    if (key_tile < layout.key_tiles)
      words[layout.seen_by_key() + int64_t{key_tile} * layout.words_of_queries() + group] =
          seen_by_key;
  }
}

}  // namespace

cudaError_t attention_block_mask(const AttentionParams& params, int batches, int heads,
                                 bool is_for_backward, cudaStream_t stream) {
  const BlockMask& block_mask = params.block_mask;
  const int64_t entries = int64_t{batches} * heads;
  const int64_t tiles = entries * block_mask.layout.query_tiles * block_mask.layout.key_tiles;
  if (tiles == 0) return cudaSuccess;
  const auto start = [&](void (*kernel)(AttentionParams, int, int), int64_t blocks, int threads,
                         int divisor) {
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                  0, Together::kNot, 1, stream, params, divisor, heads);
  };
  if (params.mask.data == nullptr) {
    const int groups = block_mask.layout.words_of_queries();
    return start(attention_block_mask_of_ranges_kernel, entries * groups, kThreadsOfWord, groups);
  }
  if (block_mask.layout.bit_rows == 1 && !params.visible.are_given()) {
    const int words = block_mask.layout.words_of_keys();
    return start(attention_block_mask_of_keys_kernel, entries * words,
                 std::min(kThreadsOfWord, 32 * block_mask.layout.key_tiles), words);
  }
  const int64_t pitch = block_mask.layout.words() * sizeof(uint32_t);
  const int64_t width = block_mask.layout.bits() * sizeof(uint32_t);
  if (pitch <= INT32_MAX) {
    MEGASOFTMAX_RETURN_IF_ERROR(
        cudaMemset2DAsync(block_mask.words, pitch, 0, width, entries, stream));
  } else {
    for (int64_t entry = 0; entry < entries; ++entry)
      MEGASOFTMAX_RETURN_IF_ERROR(
          cudaMemsetAsync(block_mask.words + entry * block_mask.layout.words(), 0, width, stream));
  }
  return start(
      is_for_backward ? attention_block_mask_kernel<true> : attention_block_mask_kernel<false>,
      divide_up<int64_t>(tiles, kBlockMaskThreads / 32), kBlockMaskThreads, batches);
}

}  // namespace megasoftmax
