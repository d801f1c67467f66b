#pragma once
// The block mask says of each tile of kMaskTile queries and keys of a head whether mask and ranges
// leave a visible pair, and whether they exclude one. Kernels skip tiles without a visible pair,
// and look at pairs only in tiles that have both. Compiles without nvcc.

#include <cstdint>

#include "../common/integers.h"
#include "limits.h"

namespace megasoftmax {

// The words of a head, in this order:
// * a bit for each tile that is seen, in lines of queries, and a bit for each tile that is mixed;
// * the seen bits again, in lines of keys;
// * the bitmask: a bit for each pair that the mask excludes, unless the mask has an entry for each
//   block of pairs;
// * if queries have bits of their own, the bitmask again, tile by tile, with 64 queries of each
//   key: the backward copies it as bytes.
struct BlockMaskLayout {
  int query_tiles = 0, key_tiles = 0;
  int bit_rows = 0;  // one for each query, or one that all share

  BlockMaskLayout() = default;
  __host__ __device__ BlockMaskLayout(int queries, int keys, int bit_rows)
      : query_tiles(divide_up(queries, kMaskTile)),
        key_tiles(divide_up(keys, kMaskTile)),
        bit_rows(bit_rows) {}

  __host__ __device__ int words_of_keys() const { return divide_up(key_tiles, 32); }
  __host__ __device__ int words_of_queries() const { return divide_up(query_tiles, 32); }
  // 16 bytes for each two tiles, which are read at once.
  __host__ __device__ int words_of_bits() const { return divide_up(key_tiles, 2) * 4; }

  // Where each part begins. Seen: some pair is visible. Mixed: but not all of them.
  __host__ __device__ int64_t seen_by_query() const { return 0; }
  __host__ __device__ int64_t mixed_by_query() const {
    return int64_t{query_tiles} * words_of_keys();
  }
  __host__ __device__ int64_t seen_by_key() const { return 2 * mixed_by_query(); }
  // At a multiple of 16 bytes.
  __host__ __device__ int64_t bits() const {
    return divide_up<int64_t>(seen_by_key() + int64_t{key_tiles} * words_of_queries(), 4) * 4;
  }
  // Tiles of the same keys lie side by side. Each tile has 64 bits for each of its keys.
  static constexpr int kWordsOfTile = 2 * kMaskTile;
  __host__ __device__ bool has_bits_by_key() const { return bit_rows > 1; }
  __host__ __device__ int64_t bits_by_key(int key_tile = 0, int query_tile = 0) const {
    return bits() + int64_t{bit_rows} * words_of_bits() +
           (int64_t{key_tile} * query_tiles + query_tile) * kWordsOfTile;
  }
  __host__ __device__ int64_t words() const {
    return bits_by_key(has_bits_by_key() ? key_tiles : 0);
  }
};

// Absent when words is null.
struct BlockMask {
  uint32_t* words = nullptr;
  BlockMaskLayout layout;
  Divider batches;  // batch i reads entry i modulo so many
  int64_t batch_stride = 0, head_stride = 0;

  __host__ __device__ uint32_t* of(int batch, int64_t head) const {
    int round, entry;
    batches.split(batch, round, entry);
    return words + entry * batch_stride + head * head_stride;
  }
};

}  // namespace megasoftmax
