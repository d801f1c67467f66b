#pragma once
// Which entries dropout drops: a function of seed, head, query and key alone, whatever tiles,
// kernels or splits compute them. Philox 4x32 of Salmon et al.,
// https://doi.org/10.1145/2063384.2063405, with seven rounds, gives a half of a word for each of 2
// x 4 entries that lie 8 queries and 8 keys apart: in products of matrices a lane holds all of
// them.

#include "tensors.h"

namespace megasoftmax {

// All 64 bits, in one instruction: the compiler makes two of the product of 64-bit numbers.
__host__ __device__ inline uint64_t product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

struct RandomWords {
  uint32_t words[4];

  RandomWords() = default;
  // The arguments are the counter of Philox, and its key, the seed.
  __host__ __device__ RandomWords(uint32_t key_block, uint32_t query_block, uint32_t head,
                                  uint32_t place, uint64_t seed)
      : words{key_block, query_block, head, place} {
    auto first = static_cast<uint32_t>(seed), second = static_cast<uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      const uint64_t left = product(words[0], 0xD2511F53), right = product(words[2], 0xCD9E8D57);
      words[0] = static_cast<uint32_t>(right >> 32) ^ words[1] ^ first;
      words[1] = static_cast<uint32_t>(right);
      words[2] = static_cast<uint32_t>(left >> 32) ^ words[3] ^ second;
      words[3] = static_cast<uint32_t>(left);
      first += 0x9E3779B9;
      second += 0xBB67AE85;
    }
  }
};

}  // namespace megasoftmax
