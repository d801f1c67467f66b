// Makes the note of mask and ranges, see note.h: a warp looks at one tile.

#include "../common/launch.cuh"
#include "attention.h"

namespace megasoftmax {
namespace {

constexpr int kNoteThreads = 256;

// Bits of the keys of a tile, the first of them `first_key`.
using TileBits = uint64_t;

// Those below `count`, which may be any number.
__device__ TileBits bits_below(int count) {
  return count <= 0 ? 0 : count >= 64 ? ~TileBits{0} : (TileBits{1} << count) - 1;
}

// Where the mask excludes the keys of query lane and query lane + 32 of a tile. Lanes read
// neighbours, whatever strides and alignment are.
__device__ void read_mask(const AttentionParams& params, int batch, int head, int first_query,
                          int first_key, TileBits (&excluded)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Strided& mask = params.mask;
  if (params.mask_block > 1) {
    const bool* const row = mask.row<const bool>(batch, head, first_query / params.mask_block);
    const bool is_excluded = row[first_key / params.mask_block * mask.column_stride];
    excluded[0] = excluded[1] = is_excluded ? ~TileBits{0} : 0;
    return;
  }
  const bool* const rows = mask.row<const bool>(batch, head, first_query) +
                           int64_t{first_key + lane} * mask.column_stride;
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

// The bits of tiles must be 0.
__global__ void __launch_bounds__(kNoteThreads)
    attention_note_kernel(const __grid_constant__ AttentionParams params, int batches, int heads) {
  const NoteLayout& layout = params.note.layout;
  const int64_t of_head = int64_t{layout.query_tiles} * layout.key_tiles;
  const int64_t index = (int64_t{blockIdx.x} * kNoteThreads + threadIdx.x) / 32;
  if (index >= of_head * heads * batches) return;
  const int entry = static_cast<int>(index / of_head);
  const int64_t tile = index - entry * of_head;
  const int batch = entry / heads, head = entry % heads;
  const int query_tile = static_cast<int>(tile / layout.key_tiles);
  const int key_tile = static_cast<int>(tile - int64_t{query_tile} * layout.key_tiles);
  const int first_query = query_tile * kNoteTile, first_key = key_tile * kNoteTile;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  TileBits excluded[2] = {0, 0};
  if (params.mask.data != nullptr) read_mask(params, batch, head, first_query, first_key, excluded);
  uint32_t* const words = params.note.of(batch, head);
  const TileBits inside = bits_below(params.keys - first_key);
  bool is_seen = false, is_mixed = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first_query + half * 32 + lane;
    if (query >= params.queries) continue;
    if (query < layout.bit_rows)
      reinterpret_cast<TileBits*>(
          words + layout.bits())[int64_t{query} * layout.key_tiles + key_tile] = excluded[half];
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

}  // namespace

cudaError_t attention_note(const AttentionParams& params, int batches, int heads,
                           cudaStream_t stream) {
  const Note& note = params.note;
  const int64_t entries = int64_t{batches} * heads;
  const int64_t tiles = entries * note.layout.query_tiles * note.layout.key_tiles;
  if (tiles == 0) return cudaSuccess;
  const int64_t blocks = divide_up<int64_t>(tiles, kNoteThreads / 32);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t pitch = note.layout.words() * sizeof(uint32_t);
  const int64_t width = note.layout.bits() * sizeof(uint32_t);
  if (pitch <= INT32_MAX) {
    MEGASOFTMAX_RETURN_IF_ERROR(cudaMemset2DAsync(note.words, pitch, 0, width, entries, stream));
  } else {
    for (int64_t entry = 0; entry < entries; ++entry)
      MEGASOFTMAX_RETURN_IF_ERROR(
          cudaMemsetAsync(note.words + entry * note.layout.words(), 0, width, stream));
  }
  return launch(attention_note_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kNoteThreads), 0,
                Together::kNot, 1, stream, params, batches, heads);
}

}  // namespace megasoftmax
