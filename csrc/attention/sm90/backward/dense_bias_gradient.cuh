#pragma once
// The gradient of a dense bias, by the warps that would be idle: sums over batches that share it,
// and zeros where no tile is.

#include "../../../common/vector.cuh"
#include "../../params.h"
#include "../../sm80/tile.cuh"
#include "block.cuh"

namespace megasoftmax {

// The row of the gradient of a bias that the first query of a batch and head has.
__device__ __forceinline__ int64_t row_of_bias_gradient(const AttentionBackwardParams& params,
                                                        int batch, int head) {
  int bias_batch, bias_head;
  params.entry_of_bias(batch, head, bias_batch, bias_head);
  int bias_heads, rest;  // a division of 64 bits would take registers that these warps lack
  params.heads_per_bias.split(static_cast<int>(params.heads), bias_heads, rest);
  return int64_t{bias_batch * bias_heads + bias_head} * params.queries;
}

// Adds a tile of gradients of scores in shared memory to the gradient of a shared bias, from row
// `first_row` on. Each of the warps takes rows of 128 keys.
template <class T, class Memory>
__device__ __forceinline__ void add_to_bias_gradient(const AttentionBackwardParams& params,
                                                     const char* panels, int64_t first_row,
                                                     int rows, int first_key) {
  const int lane = thread_index_anew() % 32, key = first_key + 4 * lane;
  if (key >= params.keys) return;
  const char* const panel = panels + lane / 16 * Memory::kScorePanelBytes + lane % 2 * 8;
#pragma unroll 2
  for (int row = thread_index_anew() / 32 - 1; row < rows; row += Memory::kSummingWarps) {
    const auto four = *reinterpret_cast<const Pack<T, 4>*>(
        panel + Tile<T, Memory::kQueries, 64>::offset(row, lane % 16 / 2));
    add_to_global(
        static_cast<float*>(params.bias_gradient) + (first_row + row) * params.bias_pitch() + key,
        four[0], four[1], four[2], four[3]);
  }
}

// What a lane writes of the gradient of a bias: 8 of the 128 keys of a block, in every second row
// of its warp.
template <class T>
struct PartOfRows {
  static constexpr int kLanes = 16;

  int vector, row;

  __device__ PartOfRows()
      : vector(thread_index_anew() % kLanes), row(thread_index_anew() % 32 / kLanes) {}
  // The place of a lane in a row of the gradient, or null beyond the keys.
  __device__ Pack<T>* in_gradient(const AttentionBackwardParams& params, int64_t number,
                                  int first_key) const {
    const int key = first_key + 8 * vector;
    return key < params.keys ? reinterpret_cast<Pack<T>*>(static_cast<T*>(params.bias_gradient) +
                                                          number * params.bias_pitch() + key)
                             : nullptr;
  }
};

// Clears rows [begin, end) after `first_row` of the gradient of a bias, by warp `warp` of `warps`.
template <class T>
__device__ __forceinline__ void clear_bias_gradient(const AttentionBackwardParams& params,
                                                    int64_t first_row, int begin, int end,
                                                    int first_key, int warp, int warps) {
  const PartOfRows<T> part;
  int row = begin + 2 * warp + part.row;
  if (row >= end) return;
  Pack<T>* to = part.in_gradient(params, first_row + row, first_key);
  if (to == nullptr) return;
#pragma unroll 4
  for (; row < end; row += 2 * warps) {
    *to = {};
    to += int64_t{2 * warps} * (params.bias_pitch() / 8);
  }
}

// Sums gradients of scores over the kBlocks blocks of a cluster, this block's rows of a tile, by
// two warps. A lane has 4 keys of each 64, in every fourth row.
template <class T, int kBlocks, class Memory>
struct SumsOverBlocks {
  static constexpr int kRows = Memory::kQueries / kBlocks, kPartRows = kRows / 2;
  static constexpr int kRowsAtATime = 2 * Memory::kStoringWarps;
  static_assert(kRowsAtATime == 4 && kPartRows % kRowsAtATime == 0);

  const Memory& memory;
  int row, key;
  uint32_t offset;

  __device__ explicit SumsOverBlocks(const Memory& memory) : memory(memory) {
    const uint32_t thread = thread_index_anew(), sixteenth = thread % 16;
    row = static_cast<int>(thread / 16) - 2;
    key = sixteenth * 4;
    offset = row * 128 + (sixteenth / 2 ^ row) * 16 + sixteenth % 2 * 8;
  }
  // Stores the sums of a step. This lane's part of the gradient begins at `to`. `rows` and `keys`
  // remain from this block's first on. A part is summed as soon as the other blocks have sent it,
  // always in the same order.
  __device__ __forceinline__ void store(T* to, int64_t pitch, int rows, int keys, int block,
                                        int step) const {
    constexpr int kAtATime = std::min(kBlocks, 4);
#pragma unroll 1
    for (int part = 0; part < Memory::kSentParts; ++part) {
      const int panel_key = part % Memory::kScorePanels * 64;
      const int begin = part / Memory::kScorePanels * kPartRows;
      // 4 rows further the swizzle differs.
      const uint32_t turned = offset ^ begin % 8 * 16;
      const uint32_t own = memory.own_part(step % 2, block, kRows, part);
      const uint32_t sent = memory.sent_part(0, kBlocks - 1, kRows, part);
      memory.sent_is_there(part).wait(step & 1);
#pragma unroll
      for (int i = 0; i < kPartRows; i += kRowsAtATime) {
        float sums[4];
#pragma unroll
        for (int from = 0; from < kBlocks; from += kAtATime) {
          Pack<T, 4> fours[kAtATime];
#pragma unroll
          for (int j = 0; j < kAtATime; ++j)
            load_pair(fours[j].words,
                      (from + j == 0 ? own : sent + (from + j - 1) * kPartRows * 128) +
                          (turned ^ i % 8 * 16) + i * 128);
          keep_loads_together();
#pragma unroll
          for (int j = 0; j < kAtATime; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k)
              sums[k] = from + j == 0 ? fours[j][k] : sums[k] + fours[j][k];
          }
        }
        const Pack<T, 4> rounded = Pack<T, 4>::round(sums);
        if (key < keys - panel_key && row < rows - begin - i)
          *reinterpret_cast<uint2*>(to) = make_uint2(rounded.words[0], rounded.words[1]);
        to += pitch * kRowsAtATime;
      }
      to += part % Memory::kScorePanels == 0 ? 64 - pitch * kPartRows : -64;
      __syncwarp();  // all lanes have read theirs
      const int lane = thread_index_anew() % 32;
      if (lane < kBlocks) memory.sent_is_used(part).arrive_in(lane);
      if (lane < kBlocks && part == Memory::kSentParts - 1)
        memory.scores_are_used(step % 2).arrive_in(lane);
    }
  }
};

template <class T, HopperBias kBias, HopperMask kMask, bool kHasTurns, int kIndex>
__device__ __forceinline__ void
HopperBackward<T, kBias, kMask, kHasTurns, kIndex>::make_dense_bias_gradient(
    const AttentionBackwardParams& params, const Memory& memory,
    const BiasGradientSums<kBias>& bias_sums, const Block& owned) {
  const int first_key = owned.first_key, key_head = owned.key_head, batch = owned.batch;
  auto tiles = owned.tiles;
  extern __shared__ __align__(1024) char shared_memory[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(uniform(threadIdx.x / 32)) - 1;
  if (params.bias_gradient_kind == BiasGradient::kNone) return;
  if (bias_sums.is_added) {
    for (int step = 0; tiles.are_left(); tiles.advance(params, batch, first_key), ++step) {
      const int buffer = step % 2;
      memory.gradients_are_there(buffer).wait(step / 2 & 1);
      add_to_bias_gradient<T, Memory>(
          params, shared_memory + Memory::kScoresAt + buffer * Memory::kScoreBytes,
          row_of_bias_gradient(params, batch, tiles.head) + tiles.query,
          min(kQueries, params.queries - tiles.query), first_key);
      __syncwarp();  // all lanes have read theirs
      if (lane == 0) memory.scores_are_used(buffer).arrive();
    }
    return;
  }
  const int block = block_of_cluster();
  int bias_batch, rest;
  params.batches_per_bias.split(batch, bias_batch, rest);
  if (bias_sums.is_in_cluster && warp == Memory::kStoringWarps) {
    const int rows = kQueries / bias_sums.cluster, bytes = rows * 64;
    int step = 0;
    for (; tiles.are_left(); tiles.advance(params, batch, first_key), ++step) {
      memory.gradients_are_there(step % 2).wait(step / 2 & 1);
#pragma unroll 1
      for (int part = 0; part < Memory::kSentParts; ++part) {
        memory.sent_is_used(part).wait((step & 1) ^ 1);
        const Barrier there = memory.sent_is_there(part);
        if (lane == 0) there.arrive_and_expect((bias_sums.cluster - 1) * bytes);
        // Each block sends to the next one first, so that not all send to one block at a time.
        const int to = (block + 1 + lane) & (bias_sums.cluster - 1);
        if (lane < bias_sums.cluster - 1)
          start_copy_to_block(
              memory.sent_part(block - (block > to ? 1 : 0), bias_sums.cluster - 1, rows, part),
              memory.own_part(step % 2, to, rows, part), bytes, there, to);
        __syncwarp();
      }
    }
    // A block must not end while others arrive at its barriers.
    for (int part = 0; part < Memory::kSentParts; ++part)
      memory.sent_is_used(part).wait((step & 1) ^ 1);
  } else if (bias_sums.is_in_cluster) {
    const auto store = [&]<int kBlocks>() {
      using Sums = SumsOverBlocks<T, kBlocks, Memory>;
      const Sums sums(memory);
      T* const gradient =
          static_cast<T*>(params.bias_gradient) + first_key + sums.key +
          (bias_batch * params.heads * params.queries + sums.row) * params.bias_pitch();
      for (int step = 0; tiles.are_left(); tiles.advance(params, batch, first_key), ++step) {
        const int first = tiles.query + block * Sums::kRows;
        const int64_t first_row = int64_t{tiles.head} * params.queries + first;
        memory.gradients_are_there(step % 2).wait(step / 2 & 1);
        sums.store(gradient + first_row * params.bias_pitch(), params.bias_pitch(),
                   params.queries - first, params.keys - first_key, block, step);
      }
    };
    if (bias_sums.cluster == 2) store.template operator()<2>();
    if (bias_sums.cluster == 4) store.template operator()<4>();
    if (bias_sums.cluster == 8) store.template operator()<8>();
  }
  // Clears rows without a tile. Heads share no gradient here.
  const int heads = static_cast<int>(params.heads_per_key_head.divisor);
  int head = key_head * heads;
  const auto clear = [&](int begin, int end) {
    // The first warps add dQ and clear nothing.
    const int first = has_adding_warps(bias_sums) ? kWarpgroups : 0;
    const int warps = Memory::kSummingWarps - first;
    clear_bias_gradient<T>(params, (bias_batch * params.heads + head) * params.queries, begin, end,
                           first_key, block * warps + warp - first, bias_sums.cluster * warps);
  };
  if (bias_sums.is_in_cluster) {
    for (; head < (key_head + 1) * heads; ++head) {
      clear(0, min(tiles.begin(), params.queries));
      clear(tiles.end(), params.queries);
    }
    return;
  }
  int done = 0;  // queries before are cleared, or have tiles
  for (;; tiles.advance(params, batch, first_key)) {
    for (; head != tiles.head; ++head) {
      clear(done, params.queries);
      done = 0;
    }
    if (!tiles.are_left()) break;
    clear(done, tiles.query);
    done = tiles.query + kQueries;
  }
}

}  // namespace megasoftmax
