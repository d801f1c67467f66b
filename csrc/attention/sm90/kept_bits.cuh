#pragma once
// What dropout keeps of a tile, as bits in shared memory. A call of Philox gives bits for 32 keys,
// and a warp of Hopper's backward has 16. So two warps exchange bits.

#include "../dropping.cuh"
#include "ptx.cuh"

namespace megasoftmax {

// The bits of a warpgroup: 64 keys in rows, and 128 queries. Each of its four warps makes the bits
// of even or odd queries and of 32 keys.
struct KeptBits {
  static constexpr int kQueries = 128;
  // A lane has a word for even and a word for odd queries.
  static constexpr int kBytesOfWarp = 2 * 128, kBytes = 4 * kBytesOfWarp;

  uint32_t address;

  // Makes this warp's part. Others read it after a barrier of the warpgroup.
  __device__ __forceinline__ void make(const Dropping<true>& dropping, int first_query,
                                       int first_key, int warp) const {
    const int pair = warp / 2, right = warp % 2;
    uint32_t kept[2] = {};
#pragma unroll
    for (int call = 0; call < kQueries / 16; ++call) {
      const RandomWords random =
          dropping.words(first_query + 16 * call, first_key + 32 * pair, right);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        kept[i % 2] |= halves_from(random.words[i], dropping.least) & 0x10001u
                                                                          << (2 * call + i / 2);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) store_word(of_lane(2 * pair + i) + right * 128, kept[i]);
  }

  struct OfLane {
    uint32_t words[2];

    // Calls body(n, i, is_kept) for element i of each eight of queries, byte by byte of the bits:
    // one instruction makes predicates of several bits of a byte.
    template <class Body>
    __device__ __forceinline__ void for_each(Body&& body) const {
#pragma unroll
      for (int byte = 0; byte < 8; ++byte) {
        const int half = byte % 2, right = byte / 2 % 2, first = byte / 4 * 8;
#pragma unroll
        for (int n = first; n < first + 8; ++n)
          body(n, 2 * half + right, (words[right] & 1u << (16 * half + n)) != 0);
      }
    }
  };
  // The bits of a lane of this warp.
  __device__ __forceinline__ OfLane load(int warp) const {
    return {{load_word(of_lane(warp)), load_word(of_lane(warp) + 128)}};
  }

 private:
  __device__ uint32_t of_lane(int warp) const {
    return address + warp * kBytesOfWarp + thread_index_anew() % 32 * 4;
  }
};

}  // namespace megasoftmax
