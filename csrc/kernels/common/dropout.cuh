#pragma once
// Which entries dropout drops: a function of seed, head, query and key alone, whatever tiles,
// kernels or splits compute them. Philox 4x32 of Salmon et al.,
// https://doi.org/10.1145/2063384.2063405, with seven rounds, gives 16 bits for each of 2 x 4
// entries that lie 8 queries and 8 keys apart: in products of matrices a lane holds all of them.

#include "tensors.h"

namespace megasoftmax {

struct RandomWords {
  uint32_t words[4];

  // Of a counter and a key, which is the seed.
  __host__ __device__ RandomWords(uint32_t key_block, uint32_t query_block, uint32_t head,
                                  uint32_t place, uint64_t seed)
      : words{key_block, query_block, head, place} {
    auto first = static_cast<uint32_t>(seed), second = static_cast<uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      const uint64_t left = uint64_t{0xD2511F53} * words[0],
                     right = uint64_t{0xCD9E8D57} * words[2];
      words[0] = static_cast<uint32_t>(right >> 32) ^ words[1] ^ first;
      words[1] = static_cast<uint32_t>(right);
      words[2] = static_cast<uint32_t>(left >> 32) ^ words[3] ^ second;
      words[3] = static_cast<uint32_t>(left);
      first += 0x9E3779B9;
      second += 0xBB67AE85;
    }
  }

  // The 16 bits of the entry `query_step` times 8 queries and `key_step` times 8 keys on.
  __host__ __device__ uint32_t bits(int query_step, int key_step) const {
    const uint32_t word = words[query_step * 2 + key_step / 2];
    return key_step % 2 == 0 ? word & 0xffff : word >> 16;
  }
};

// The words that decide an entry: those of queries and keys that are equal in all but the bits of
// value 8, and of keys also 16.
__host__ __device__ inline RandomWords random_words(uint64_t seed, uint32_t head, int query,
                                                    int key) {
  return RandomWords(static_cast<uint32_t>(key) / 32, static_cast<uint32_t>(query) / 16, head,
                     static_cast<uint32_t>(query % 8 * 8 + key % 8), seed);
}

}  // namespace megasoftmax
