#pragma once
// The same as sm80/backward.cuh on Hopper, by products of warpgroups and tensor copies.
//
// Of a block one warp only copies. Two warpgroups have 64 keys each. Scores are transposed, so that
// weights and gradients of scores multiply gradients of outputs and queries from registers. For dQ
// the gradients of scores lie in shared memory, too. Each warpgroup makes 64 x 64 elements of dQ
// from all keys, and a tensor copy adds them to the sums in global memory.
//
// Gradients of scores lie as the bias does, queries in rows, and take its place there: a warp
// writes where it alone has read. So the tile is that of the bias's gradient, too.
//
// The warps of the copying warpgroup that would be idle take part in the gradient of a dense bias.
// They clear it where no tile is. Where batches share it, and a cluster of blocks has one of them
// each, each block sums some rows of a tile, part by part as the others send it theirs. Else they
// add to it.
//
// With a relative bias another warp of the copying warpgroup fills in its entries for a tile. All
// four of them sum the gradients of scores along diagonals, while the next tile runs.
//
// With dropout and 128 queries in a tile, a warpgroup makes bits of what is kept of the next tile
// while the products for dQ and dK run, which it would wait for.

#include "../../common/limits.h"
#include "../../common/math.cuh"
#include "../bias.cuh"
#include "../dropping.cuh"
#include "../exclusion.cuh"
#include "../limits.h"
#include "../sm80/tile.cuh"
#include "../turns.cuh"
#include "kept_bits.cuh"
#include "ptx.cuh"

namespace megasoftmax {

// Boxes of 64 columns: of the queries of a tile, and of the keys. Of sums 64 rows and 32 columns.
// Of the bias and its dense gradient the queries of a tile and 64 keys.
struct BackwardTensorMaps {
  CUtensorMap query, key, value, output_gradient, query_gradient_sum, bias, bias_gradient;
};

// Sums along diagonals of tiles of gradients of scores, which lie as products read them, by the
// warps of a warpgroup. First blocks of 8 x 8 gradients that lie diagonally behind each other are
// added up, by products with ones; then the diagonals of these sums.
template <int kKeys, int kQueries>
struct SumsOfDiagonals {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kKeyBlocks = kKeys / 8, kQueryBlocks = kQueries / 8;
  // Sums are followed and led by a block of zeros. Of a block 8 rows, and space: so a thread each
  // for neighbouring diagonals reads another bank.
  static constexpr int kBlocks = kKeyBlocks + kQueryBlocks + 1, kPitch = 72;
  static constexpr int kBytes = kBlocks * kPitch * 4;
  static constexpr int kPanelBytes = kQueries * 128;
  static_assert(kKeyBlocks == 16 && kQueryBlocks % 4 == 0 && kQueryBlocks <= kKeyBlocks);

  float* sums;

  __device__ static int thread() { return thread_index_anew() % kThreads; }
  // For all warps, when they have met.
  __device__ void clear() const {
    const int thread = this->thread();
    if (thread < kPitch) sums[thread] = sums[(kBlocks - 1) * kPitch + thread] = 0.f;
  }
  // The diagonals of a tile of keys and all queries. A thread clears those that it adds to, so that
  // nothing else orders the two.
  __device__ static void clear(float* diagonals, int queries) {
    for (int i = (thread() + queries + kThreads - kQueries) % kThreads; i < kKeys - 1 + queries;
         i += kThreads)
      diagonals[i] = 0.f;
  }
  // Four blocks at a time. Behind the last key comes the first one again: up to there the keys of a
  // block are `first` eights after its queries, then 16 less.
  template <class T>
  __device__ __forceinline__ void add_blocks(uint32_t scores) const {
    constexpr int kFours = kQueryBlocks / 4;
    const uint32_t thread = this->thread(), row = thread % 8, block = thread / 8 % 4;
    const FirstElement mine(thread);
    const uint32_t ones = round_pair<T>(mine.row == mine.column, mine.row == mine.column + 1);
    const uint32_t zeros = shared_address(sums + (kBlocks - 1) * kPitch);
    const uint32_t first_of_row = scores + (block * 8 + row) * 128;
    float* const place = sums + mine.row * 8 + mine.column;
    const uint32_t i = thread / 32;
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const auto add = [&](int begin, int end, int distance, bool is_behind) {
        uint32_t loaded[kFours][4];
#pragma unroll
        for (int j = begin; j < end; ++j) {
          const uint32_t chunk = (4 * (four + j) + i + block) % 16;
          uint32_t from =
              first_of_row + j * 4096 + chunk / 8 * kPanelBytes + (chunk % 8 ^ row) * 16;
          // The keys end among these blocks.
          if (four + j == 3 && (i + block >= 4) != is_behind) from = zeros;
          load_matrices(loaded[j], from);
        }
        float sum[4] = {};
#pragma unroll
        for (int j = begin; j < end; ++j) multiply_add<T>(sum, loaded[j], ones, ones);
        *reinterpret_cast<float2*>(place + (distance + kQueryBlocks) * kPitch) =
            make_float2(sum[0] + sum[2], sum[1] + sum[3]);
      };
      const int first = 4 * four + i;
      add(0, std::min(kFours, 4 - four), first, false);
      if (4 - four <= kFours) add(3 - four, kFours, first - 16, true);
    }
  }
  // Adds them to `diagonals`, of which that of the tile's first query and key is number
  // `queries - 1 - query`. Each of those always gets its sums from the same thread, and so in the
  // same order.
  template <class T>
  __device__ __forceinline__ void add_to(float* diagonals, int queries, int query,
                                         uint32_t scores) const {
    constexpr int kCount = kKeys + kQueries - 1;
#pragma unroll 1
    for (int i = (thread() + query) % kThreads; i < kCount; i += kThreads) {
      const int distance = i - (kQueries - 1), number = queries - 1 - query + distance;
      if (number < 0) continue;
      const int offset = (i + 1) % 8;
      const float* const block = sums + (i + 1) / 8 * kPitch + offset;
      const float* const next_block = block + kPitch - 8;
      float sum = 0.f;
#pragma unroll
      for (int row = 0; row < 8; ++row) sum += (row + offset < 8 ? block : next_block)[row * 9];
      // Products spread what is not finite to neighbours in its row.
      if (!(fabsf(sum) < INFINITY)) sum = sum_of<T>(scores, distance);
      add_to_global(diagonals + number, sum);
    }
  }

 private:
  // Of one diagonal, gradient by gradient.
  template <class T>
  __device__ static float sum_of(uint32_t scores, int distance) {
    float sum = 0.f;
    const int end = min(kQueries, kKeys - distance);
#pragma unroll 1
    for (int query = max(-distance, 0); query < end; ++query) {
      const int key = query + distance;
      Pack<T, 2> pair;
      pair.words[0] = load_word(scores + key / 64 * kPanelBytes +
                                Tile<T, kQueries, 64>::place(query, key % 64 / 2 * 2));
      sum += key % 2 == 0 ? pair[0] : pair[1];
    }
    return sum;
  }
};

template <HopperBias kBias, int kIndex>
struct HopperBackwardMemory {
  static constexpr AttentionHopperBackwardTile kTile =
      kBias == HopperBias::kNone
          ? kAttentionHopperBackwardTiles[kIndex]
          : kAttentionHopperBackwardTiles[kIndex].with_bias(kBias == HopperBias::kTable);
  static constexpr int kDim = kTile.head_dim, kValueDim = kTile.value_dim;
  static constexpr int kKeys = kTile.keys(), kQueries = kTile.queries;
  static constexpr int kWarpgroups = kTile.warpgroups, kThreads = kTile.threads();
  static constexpr int kPanels = divide_up(kDim, 64), kValuePanels = divide_up(kValueDim, 64);
  static constexpr int kQueryPanels = kQueries / 64, kStages = 2;
  static_assert(kDim % 16 == 0 && kValueDim % 16 == 0);
  static_assert(kQueries % kNoteTile == 0 && kKeys % kNoteTile == 0);
  static_assert(takes_bias(kTile, kBias));
  // What follows the kernel finds one length of diagonals.
  static_assert(kBias != HopperBias::kTable || kKeys == kAttentionHopperBackwardTiles[0].keys());
  static_assert(shares_registers(kTile));
  static_assert(kPanels * kQueryPanels == kWarpgroups);  // 64 x 64 elements of dQ for each

  // Keys; values; queries and gradients of outputs of each stage; the bias, then gradients of
  // scores, of two steps, in panels of 64 keys; sums of each warpgroup; rows of each stage; what
  // the mask excludes, and what queries see by range, of each stage; what a table gives each stage,
  // and sums for its gradient; bits of each warpgroup for dropout; barriers. Clusters have no mask:
  // what a tile of the bias has from other blocks lies in its place. At the end results of each
  // warpgroup lie where its sums did.
  static constexpr int kKeyPanelBytes = kKeys * 128, kQueryPanelBytes = kQueries * 128;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kValueBytes = kValuePanels * kKeyPanelBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kGradientBytes = kValuePanels * kQueryPanelBytes;
  static constexpr int kStageBytes = kQueryBytes + kGradientBytes;
  static constexpr int kScorePanelBytes = kQueries * 128;
  static constexpr int kScorePanels = kWarpgroups;
  static constexpr int kScoreBytes = kScorePanels * kScorePanelBytes;
  static constexpr int kSumPanelBytes = 64 * 128, kSumBytes = 2 * kSumPanelBytes;
  static constexpr int kRowBytes = kQueries * static_cast<int>(sizeof(RowOfBackward));
  static constexpr int kValuesAt = kKeyBytes, kStagesAt = kKeyBytes + kValueBytes;
  static constexpr int kScoresAt = kStagesAt + kStages * kStageBytes;
  static constexpr int kSumsAt = kScoresAt + 2 * kScoreBytes;
  static_assert(kValuePanels <= kPanels && kPanels * 64 * 128 <= kSumBytes);
  static constexpr int kRowsAt = kSumsAt + kWarpgroups * kSumBytes;
  using Diagonals = DiagonalTile<true, kKeys, kQueries>;
  using DiagonalSums = SumsOfDiagonals<kKeys, kQueries>;
  static constexpr int kMaskedAt = kRowsAt + kStages * kRowBytes;
  static constexpr int kMaskedTileBytes = NoteLayout::kWordsOfTile * 4;
  static constexpr int kMaskedPanelBytes = kQueryPanels * kMaskedTileBytes;  // of 64 keys
  static constexpr int kMaskedBytes = kWarpgroups * kMaskedPanelBytes;
  // Of each panel of queries the range that all see, then that of each query.
  static constexpr int kRangesAt = kMaskedAt + kStages * kMaskedBytes;
  static constexpr int kRangesBytes = (2 + kQueries) * 8;
  static constexpr int kDiagonalsAt = kRangesAt + kStages * kRangesBytes;
  static constexpr int kDiagonalSumsAt = kDiagonalsAt + kStages * Diagonals::kBytes;
  static constexpr int kSentAt = kMaskedAt;
  static constexpr int kSentBytes = kScoreBytes / kMaxBiasCluster * (kMaxBiasCluster - 1);
  static_assert(kSentBytes >= kDiagonalsAt - kMaskedAt && kQueryPanels <= 2);
  static_assert(kQueries % (8 * kMaxBiasCluster) == 0);  // swizzled alike
  // Parts of what blocks send each other: 64 keys of half of the rows that a block sums. The next
  // step's part is sent as soon as all have summed this one, while they sum the others.
  static constexpr int kSentParts = kBias == HopperBias::kTile ? 2 * kScorePanels : 0;
  // In a tile of 64 queries bits would be ready after the products: each warp makes those of its
  // own weights.
  static constexpr bool kExchangesBits = kQueries == KeptBits::kQueries;
  static constexpr int kBitsAt = kBias == HopperBias::kTable
                                     ? kDiagonalSumsAt + DiagonalSums::kBytes
                                 : kBias == HopperBias::kTile ? kSentAt + kSentBytes
                                                              : kDiagonalsAt;
  static constexpr int kBarriersAt =
      kBitsAt + (kExchangesBits ? kWarpgroups * KeptBits::kBytes : 0);
  static constexpr int kBiasBarrier = 1 + 2 * kStages;
  static constexpr int kBytes =
      kBarriersAt + 8 * (kBiasBarrier + (kBias == HopperBias::kNone ? 0 : 6 + 2 * kSentParts));
  static_assert(kBytes <= least_shared_bytes(kHopperMajor, kHopperMajor));
  // Those of the gradient of a bias.
  static constexpr int kSummingWarps = kBias == HopperBias::kTable ? DiagonalSums::kWarps : 3;
  // In a cluster one of them sends what others sum.
  static constexpr int kStoringWarps = 2;

  uint32_t address;

  __device__ static Diagonals diagonals(char* memory, int stage) {
    return {reinterpret_cast<float*>(memory + kDiagonalsAt + stage * Diagonals::kBytes)};
  }
  // Pairs of the first key and the one after the last.
  __device__ static int2* ranges_of_panels(char* memory, int stage) {
    return reinterpret_cast<int2*>(memory + kRangesAt + stage * kRangesBytes);
  }
  __device__ static int2* ranges(char* memory, int stage) {
    return ranges_of_panels(memory, stage) + 2;
  }
  // The bits of 64 queries of each of 64 keys.
  __device__ static uint2* masked(char* memory, int stage, int warpgroup, int panel) {
    return reinterpret_cast<uint2*>(memory + kMaskedAt + stage * kMaskedBytes +
                                    warpgroup * kMaskedPanelBytes + panel * kMaskedTileBytes);
  }
  __device__ uint32_t keys() const { return address; }
  __device__ uint32_t values() const { return address + kValuesAt; }
  __device__ uint32_t queries(int stage) const { return address + kStagesAt + stage * kStageBytes; }
  __device__ uint32_t gradients(int stage) const { return queries(stage) + kQueryBytes; }
  __device__ uint32_t scores(int buffer) const {
    return address + kScoresAt + buffer * kScoreBytes;
  }
  __device__ uint32_t sums(int warpgroup) const {
    return address + kSumsAt + warpgroup * kSumBytes;
  }
  // Of a block that sums `rows` rows: a part of its own gradients of scores, and what this number
  // of the other blocks sends of it.
  __device__ uint32_t own_part(int buffer, int block, int rows, int part) const {
    return scores(buffer) + part % kScorePanels * kScorePanelBytes +
           (block * rows + part / kScorePanels * rows / 2) * 128;
  }
  __device__ uint32_t sent_part(int other, int others, int rows, int part) const {
    return address + kSentAt + (part * others + other) * rows * 64;
  }
  __device__ uint32_t rows(int stage) const { return address + kRowsAt + stage * kRowBytes; }
  __device__ uint32_t masked(int stage, int warpgroup) const {
    return address + kMaskedAt + stage * kMaskedBytes + warpgroup * kMaskedPanelBytes;
  }
  __device__ KeptBits bits(int warpgroup) const {
    return {address + kBitsAt + warpgroup * KeptBits::kBytes};
  }
  __device__ Barrier barrier(int index) const { return {address + kBarriersAt + 8 * index}; }
  __device__ Barrier keys_are_there() const { return barrier(0); }
  __device__ Barrier stage_is_there(int stage) const { return barrier(1 + stage); }
  __device__ Barrier stage_is_used(int stage) const { return barrier(1 + kStages + stage); }
  __device__ Barrier bias_is_there(int buffer) const { return barrier(kBiasBarrier + buffer); }
  __device__ Barrier scores_are_used(int buffer) const {
    return barrier(kBiasBarrier + 2 + buffer);
  }
  __device__ Barrier gradients_are_there(int buffer) const {
    return barrier(kBiasBarrier + 4 + buffer);
  }
  __device__ Barrier sent_is_there(int part) const { return barrier(kBiasBarrier + 6 + part); }
  __device__ Barrier sent_is_used(int part) const {
    return barrier(kBiasBarrier + 6 + kSentParts + part);
  }
};

// Writes the left or right half of 64 x 64 results of a warpgroup to a panel of 32 columns,
// swizzled as tensor copies read it.
__device__ __forceinline__ void store_sums(char* panel, const float (&results)[8][4], int side) {
  const FirstElement mine;
  const int warp = thread_index_anew() / 32 % 4;
  // Every second row has columns 16 further, or before, at a time: else two rows would meet in one
  // bank.
  const bool is_odd = mine.row % 2 != 0;
  const int chunk = (is_odd ? 4 : 0) ^ mine.column / 4 ^ mine.row;
  const int first = (warp * 16 + mine.row) * 128 + chunk * 16 + mine.column % 4 * 4;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto result = [&](int i) {
        return is_odd ? results[4 * side + (n ^ 2)][2 * half + i]
                      : results[4 * side + n][2 * half + i];
      };
      *reinterpret_cast<float2*>(panel + (first ^ n * 32) + half * 1024) =
          make_float2(result(0), result(1));
    }
  }
}

// Which row of the gradient of a bias the first query of a batch and head has.
__device__ __forceinline__ int64_t row_of_bias_gradient(const AttentionBackwardParams& params,
                                                        int batch, int head) {
  int bias_batch, bias_head;
  params.entry_of_bias(batch, head, bias_batch, bias_head);
  int bias_heads, rest;  // a division of 64 bits would take registers that these warps lack
  params.heads_per_bias.split(static_cast<int>(params.heads), bias_heads, rest);
  return int64_t{bias_batch * bias_heads + bias_head} * params.queries;
}

// Adds gradients of scores, a tile in shared memory, to those of a bias that several share, from
// row `first_row` on, by the warps that would be idle: each takes rows of 128 keys.
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
    add_to_global(static_cast<float*>(params.bias_gradient) + (first_row + row) * params.keys + key,
                  four[0], four[1], four[2], four[3]);
  }
}

// The part of a lane in the gradient of a bias: 8 of the 128 keys of a block, in every second row
// of its warp.
template <class T>
struct PartOfRows {
  static constexpr int kLanes = 16;

  int chunk, row;

  __device__ PartOfRows()
      : chunk(thread_index_anew() % kLanes), row(thread_index_anew() % 32 / kLanes) {}
  // In the row of the gradient with this number; null beyond the keys.
  __device__ Pack<T>* in_gradient(const AttentionBackwardParams& params, int64_t number,
                                  int first_key) const {
    const int key = first_key + 8 * chunk;
    return key < params.keys ? reinterpret_cast<Pack<T>*>(static_cast<T*>(params.bias_gradient) +
                                                          number * params.keys + key)
                             : nullptr;
  }
};

// Clears rows of the gradient of a bias, from `begin` to `end` after `first_row`, by warp number
// `warp` of so many.
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
    to += int64_t{2 * warps} * (params.keys / 8);
  }
}

// Sums over the kBlocks blocks of a cluster of gradients of scores, this block's rows of a tile, by
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
  // Stores those of a step to the gradient, of which this lane's part begins at `to`, and which has
  // so many rows and keys from this block's first on. A part is summed as soon as the others have
  // sent it, always in the same order.
  __device__ __forceinline__ void store(T* to, int64_t pitch, int rows, int keys, int block,
                                        int step) const {
    constexpr int kAtATime = std::min(kBlocks, 4);
#pragma unroll 1
    for (int part = 0; part < Memory::kSentParts; ++part) {
      const int panel_key = part % Memory::kScorePanels * 64;
      const int begin = part / Memory::kScorePanels * kPartRows;
      // 4 rows further chunks are swapped.
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

// By one thread: starts to copy the keys and values of a block.
template <class Memory>
__device__ __forceinline__ void start_copy_of_keys(const Memory& memory,
                                                   const BackwardTensorMaps& maps, int first_key,
                                                   int key_head, int batch) {
  const Barrier there = memory.keys_are_there();
  there.arrive_and_expect(Memory::kKeyBytes + Memory::kValueBytes);
  start_copy_of_panels<Memory::kPanels>(memory.keys(), maps.key, there, Memory::kKeys, first_key,
                                        key_head, batch);
  start_copy_of_panels<Memory::kValuePanels>(memory.values(), maps.value, there, Memory::kKeys,
                                             first_key, key_head, batch);
}

// Of a weight, which is negative where dropout drops it, and of its gradient.
template <bool kMayDrop>
__device__ __forceinline__ float score_gradient(float gradient, float weight, float delta,
                                                float dropout_factor) {
  if constexpr (!kMayDrop) return (gradient - delta) * weight;
  return fmaf(weight < 0.f ? 0.f : gradient, dropout_factor, -delta) * fabsf(weight);
}
// Calls body.operator()<does a launch drop weights?>().
template <bool kIsPlain, class Body>
__device__ __forceinline__ void with_dropout(const AttentionParams& params, Body&& body) {
  if (!kIsPlain && params.dropout.seed != nullptr) {
    body.template operator()<!kIsPlain>();
  } else {
    body.template operator()<false>();
  }
}

template <class T, HopperBias kBias, bool kIsPlain, bool kHasTurns, int kIndex>
__global__ void __launch_bounds__(HopperBackwardMemory<kBias, kIndex>::kThreads, 1)
    attention_hopper_backward_kernel(const __grid_constant__ AttentionBackwardParams params,
                                     const __grid_constant__ BackwardTensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Memory = HopperBackwardMemory<kBias, kIndex>;
  constexpr bool kHasTile = kBias == HopperBias::kTile, kHasTable = kBias == HopperBias::kTable;
  constexpr int kDim = Memory::kDim, kKeys = Memory::kKeys, kQueries = Memory::kQueries;
  constexpr int kStages = Memory::kStages, kWarpgroups = Memory::kWarpgroups;
  constexpr int kN = kQueries / 8, kSteps = kQueries / 16;
  extern __shared__ __align__(1024) char shared_memory[];
  const Memory memory{shared_address(shared_memory)};
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128)) - 1;

  const bool is_added = kHasTile && params.bias_gradient_kind == BiasGradient::kShared;
  const bool is_in_cluster = kHasTile && params.bias_gradient_kind == BiasGradient::kInClusters;
  const int cluster = is_in_cluster ? static_cast<int>(params.batches_per_bias.divisor) : 1;
  const bool has_diagonals = kHasTable && params.bias_gradient_kind == BiasGradient::kDiagonals;

  if (threadIdx.x == 0) {
    memory.keys_are_there().init(1);
    for (int stage = 0; stage < kStages; ++stage) {
      memory.stage_is_there(stage).init(kHasTable ? 2 : 1);
      memory.stage_is_used(stage).init(4 * kWarpgroups);
    }
    for (int buffer = 0; buffer < (kBias == HopperBias::kNone ? 0 : 2); ++buffer) {
      memory.bias_is_there(buffer).init(1);
      memory.scores_are_used(buffer).init((kHasTile ? 1 : 0) +
                                          (is_added || has_diagonals ? Memory::kSummingWarps : 0) +
                                          (is_in_cluster ? Memory::kStoringWarps * cluster : 0));
      memory.gradients_are_there(buffer).init(1);
    }
    for (int part = 0; part < Memory::kSentParts; ++part) {
      memory.sent_is_there(part).init(1);
      memory.sent_is_used(part).init(Memory::kStoringWarps * cluster);
    }
    publish_barriers();
  }
  __syncthreads();
  if (is_in_cluster) {  // others arrive at its barriers
    arrive_at_cluster();
    wait_for_cluster();
  }
  int first_key, key_head, batch;
  params.order.place(static_cast<int>(blockIdx.x), first_key, key_head, batch);
  first_key *= kKeys;
  QueryTiles<kKeys, kQueries, kIsPlain> tiles(params, batch, key_head, first_key);

  if (warpgroup < 0) {
    give_registers<Memory::kTile.copier_registers>();
    constexpr int kPanels = Memory::kPanels, kValuePanels = Memory::kValuePanels;
    const bool is_first = threadIdx.x == 0;
    const NoteLayout& layout = params.note.layout;
    const bool copies_masked =
        !kIsPlain && params.note.words != nullptr && layout.has_bits_by_key();
    const bool has_ranges = !kIsPlain && params.visible.are_given();
    const auto start_copy_of_tile = [&](int head, int query, int step) {
      const int stage = step % kStages;
      [[maybe_unused]] KeyRange ranges[kQueries / 32];
      if (has_ranges) find_ranges(ranges, params, batch, head, query);
      memory.stage_is_used(stage).wait((step / kStages & 1) ^ 1);
      if (has_ranges) {
#pragma unroll
        for (int i = 0; i < kQueries / 32; i += 2) {
          const int begin = largest_of_lanes(max(ranges[i].begin, ranges[i + 1].begin));
          const int end = smallest_of_lanes(min(ranges[i].end, ranges[i + 1].end));
          if (is_first)
            Memory::ranges_of_panels(shared_memory, stage)[i / 2] = make_int2(begin, end);
          for (int j = i; j < i + 2; ++j)
            Memory::ranges(shared_memory, stage)[32 * j + thread_index_anew() % 32] =
                make_int2(ranges[j].begin, ranges[j].end);
        }
        __syncwarp();  // all lanes have written theirs
      }
      if (!is_first) return;
      const Barrier there = memory.stage_is_there(stage);
      const int rows = min(kQueries, params.queries - query);
      const int row_bytes = rows * static_cast<int>(sizeof(RowOfBackward));
      const int masked_bytes =
          copies_masked ? divide_up(rows, kNoteTile) * Memory::kMaskedTileBytes : 0;
      const int masked_tiles = min(kWarpgroups, layout.key_tiles - first_key / kNoteTile);
      there.arrive_and_expect(Memory::kStageBytes + row_bytes + masked_tiles * masked_bytes);
      for (int i = 0; i < masked_tiles && copies_masked; ++i)
        start_copy_of_bytes(memory.masked(stage, i),
                            params.note.of(batch, head) +
                                layout.bits_by_key(first_key / kNoteTile + i, query / kNoteTile),
                            masked_bytes, there);
      start_copy_of_panels<kPanels>(memory.queries(stage), maps.query, there, kQueries, query, head,
                                    batch);
      start_copy_of_panels<kValuePanels>(memory.gradients(stage), maps.output_gradient, there,
                                         kQueries, query, head, batch);
      start_copy_of_bytes(memory.rows(stage),
                          params.rows_of_backward + params.row_index(batch, head, query), row_bytes,
                          there);
    };
    if constexpr (kHasTable) {
      // All warps sum a tile when they have begun to copy the one after the next.
      const int warp = static_cast<int>(uniform(threadIdx.x / 32));
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const typename Memory::DiagonalSums sums{
          reinterpret_cast<float*>(shared_memory + Memory::kDiagonalSumsAt)};
      if (is_first) start_copy_of_keys(memory, maps, first_key, key_head, batch);
      const auto sync = [] { sync_warps<kWarpgroups + 2, Memory::kSummingWarps>(); };
      auto summed = tiles;
      // Tiles that are copied, and summed.
      for (int step = 0, done = 0;;) {
        const int stage = step % kStages;
        if (tiles.are_left()) {
          if (warp == 0) start_copy_of_tile(tiles.head, tiles.query, step);
          if (warp == 1) {
            Memory::diagonals(shared_memory, stage)
                .template fill<32>(lane, BiasRows<T>(params, batch, tiles.head), tiles.query,
                                   first_key, params.queries, params.keys, [&] {
                                     memory.stage_is_used(stage).wait((step / kStages & 1) ^ 1);
                                   });
            __syncwarp();  // all lanes have written theirs
            if (lane == 0) memory.stage_is_there(stage).arrive();
          }
          tiles.advance(params, batch, first_key);
          ++step;
          if (step < done + 3 && tiles.are_left()) continue;
        }
        if (has_diagonals && done == 0) {  // also where no tile is
          sums.clear();
          const int heads = static_cast<int>(params.heads_per_key_head.divisor);
          for (int head = key_head * heads; head < (key_head + 1) * heads; ++head)
            sums.clear(diagonals_of<kKeys>(params, batch, head, first_key), params.queries);
        }
        if (!summed.are_left()) return;
        if (has_diagonals) {
          const int buffer = done % 2;
          memory.gradients_are_there(buffer).wait(done / 2 & 1);
          sync();
          sums.template add_blocks<T>(memory.scores(buffer));
          sync();
          sums.template add_to<T>(diagonals_of<kKeys>(params, batch, summed.head, first_key),
                                  params.queries, summed.query, memory.scores(buffer));
          __syncwarp();  // all lanes have read theirs
          if (lane == 0) memory.scores_are_used(buffer).arrive();
        }
        summed.advance(params, batch, first_key);
        ++done;
      }
    }
    if (threadIdx.x >= 32) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      if constexpr (kHasTile) {
        const int warp = static_cast<int>(uniform(threadIdx.x / 32)) - 1;
        if (params.bias_gradient_kind == BiasGradient::kNone) return;
        if (is_added) {
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
        if (is_in_cluster && warp == Memory::kStoringWarps) {
          const int rows = kQueries / cluster, bytes = rows * 64;
          int step = 0;
          for (; tiles.are_left(); tiles.advance(params, batch, first_key), ++step) {
            memory.gradients_are_there(step % 2).wait(step / 2 & 1);
#pragma unroll 1
            for (int part = 0; part < Memory::kSentParts; ++part) {
              memory.sent_is_used(part).wait((step & 1) ^ 1);
              const Barrier there = memory.sent_is_there(part);
              if (lane == 0) there.arrive_and_expect((cluster - 1) * bytes);
              // To the next one first, so that not all send to the same one at a time.
              const int to = (block + 1 + lane) & (cluster - 1);
              if (lane < cluster - 1)
                start_copy_to_block(
                    memory.sent_part(block - (block > to ? 1 : 0), cluster - 1, rows, part),
                    memory.own_part(step % 2, to, rows, part), bytes, there, to);
              __syncwarp();
            }
          }
          // A block ends when no other arrives at its barriers any more.
          for (int part = 0; part < Memory::kSentParts; ++part)
            memory.sent_is_used(part).wait((step & 1) ^ 1);
        } else if (is_in_cluster) {
          const auto store = [&]<int kBlocks>() {
            using Sums = SumsOverBlocks<T, kBlocks, Memory>;
            const Sums sums(memory);
            T* const gradient =
                static_cast<T*>(params.bias_gradient) + first_key + sums.key +
                (bias_batch * params.heads * params.queries + sums.row) * params.keys;
            for (int step = 0; tiles.are_left(); tiles.advance(params, batch, first_key), ++step) {
              const int first = tiles.query + block * Sums::kRows;
              const int64_t first_row = int64_t{tiles.head} * params.queries + first;
              memory.gradients_are_there(step % 2).wait(step / 2 & 1);
              sums.store(gradient + first_row * params.keys, params.keys, params.queries - first,
                         params.keys - first_key, block, step);
            }
          };
          if (cluster == 2) store.template operator()<2>();
          if (cluster == 4) store.template operator()<4>();
          if (cluster == 8) store.template operator()<8>();
        }
        // What no tile writes is cleared. Heads share no gradient.
        const int heads = static_cast<int>(params.heads_per_key_head.divisor);
        int head = key_head * heads;
        const auto clear = [&](int begin, int end) {
          clear_bias_gradient<T>(params, (bias_batch * params.heads + head) * params.queries, begin,
                                 end, first_key, block * Memory::kSummingWarps + warp,
                                 cluster * Memory::kSummingWarps);
        };
        if (is_in_cluster) {
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
      return;
    }
    if (is_first) start_copy_of_keys(memory, maps, first_key, key_head, batch);
    int step = 0;
    for (; tiles.are_left(); tiles.advance(params, batch, first_key), ++step) {
      const int head = tiles.head, query = tiles.query;
      start_copy_of_tile(head, query, step);
      if constexpr (kHasTile) {
        const int buffer = step % 2;
        int bias_batch, bias_head;
        params.entry_of_bias(batch, head, bias_batch, bias_head);
        memory.scores_are_used(buffer).wait((step / 2 & 1) ^ 1);
        if (!is_first) continue;
        const Barrier there = memory.bias_is_there(buffer);
        there.arrive_and_expect(Memory::kScoreBytes);
        for (int i = 0; i < kWarpgroups; ++i)
          start_copy_of_box(memory.scores(buffer) + i * Memory::kScorePanelBytes, maps.bias, there,
                            first_key + 64 * i, query, bias_head, bias_batch);
      }
    }
    // A block ends when no other arrives at its barriers any more.
    if constexpr (kHasTile) {
      for (int last = step + 2; is_in_cluster && step < last; ++step)
        memory.scores_are_used(step % 2).wait((step / 2 & 1) ^ 1);
    }
    return;
  }

  take_registers<Memory::kTile.registers>();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_in_group = static_cast<int>(threadIdx.x) / 32 % 4;
  const bool is_first_of_group = threadIdx.x % 128 == 0;
  const int group_key = first_key + 64 * warpgroup;
  const int warp_key = group_key + 16 * warp_in_group;
  // Its 64 queries and columns of dQ.
  const int query_panel = warpgroup % Memory::kQueryPanels;
  const int column_panel = warpgroup / Memory::kQueryPanels;
  char* const sums = shared_memory + Memory::kSumsAt + warpgroup * Memory::kSumBytes;

  float key_gradient[kDim / 8][4] = {}, value_gradient[Memory::kValueDim / 8][4] = {};
  float weights[kN][4], gradients[kN][4];
  // Weights are multiplied as soon as they are there, where registers allow it.
  constexpr bool kIsEarly = kQueries <= 64 && (kDim < 128 || Memory::kTile.registers > 232);
  uint32_t rounded_weights[kSteps][4], rounded_gradients[kSteps][4];

  // Products of this warpgroup's keys with queries, and of its values with gradients of outputs.
  const auto start_scores = [&](uint32_t queries) {
    const uint32_t keys = memory.keys() + warpgroup * 64 * 128;
    begin_products();
    start_product_of_rows<T, kDim>(weights, matrix_at(keys, 16), Memory::kKeyPanelBytes,
                                   matrix_at(queries, 16), Memory::kQueryPanelBytes);
    end_products();
  };
  const auto start_weight_gradients = [&](uint32_t output_gradients) {
    const uint32_t values = memory.values() + warpgroup * 64 * 128;
    begin_products();
    start_product_of_rows<T, Memory::kValueDim>(
        gradients, matrix_at(values, 16), Memory::kKeyPanelBytes, matrix_at(output_gradients, 16),
        Memory::kQueryPanelBytes);
    end_products();
  };
  const auto start_value_gradient = [&](uint32_t output_gradients) {
    begin_products();
    start_sum_of_products<T>(value_gradient, rounded_weights,
                             matrix_at(output_gradients, Memory::kQueryPanelBytes));
    end_products();
  };
  const auto start_key_gradient = [&](uint32_t queries) {
    begin_products();
    start_sum_of_products<T>(key_gradient, rounded_gradients,
                             matrix_at(queries, Memory::kQueryPanelBytes));
    end_products();
  };
  const auto start_query_gradient = [&](float (&sum)[8][4], uint32_t scores) {
    const uint64_t a = matrix_at(scores + query_panel * 64 * 128, 16),
                   b = matrix_at(memory.keys() + column_panel * Memory::kKeyPanelBytes, 16);
    begin_products();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      start_product<T, true>(sum, moved(a, step / 4 * Memory::kScorePanelBytes + step % 4 * 32),
                             moved(b, step * 16 * 128), step > 0);
    end_products();
  };
  ExcludedOfTile<kQueries, kIsPlain> excluding(params, batch, group_key, warp_key);
  // Where all queries share the bits of a key, each warp writes those of its keys for all tiles of
  // a head.
  const bool shares_bits =
      !kIsPlain && excluding.has_bits() && !params.note.layout.has_bits_by_key();
  [[maybe_unused]] int head_of_bits = -1;
  const auto masked_of = [&](int stage, int panel, int half) -> uint2& {
    return Memory::masked(shared_memory, stage, warpgroup,
                          panel)[16 * warp_in_group + FirstElement().row + 8 * half];
  };
  const auto write_shared_bits = [&](int head) {
    typename ExcludedOfTile<kQueries, kIsPlain>::Masked masked;
    excluding.load_masked(masked, head, 0);
#pragma unroll
    for (int i = 0; i < kStages * Memory::kQueryPanels * 2; ++i)
      masked_of(i % kStages, i / kStages / 2, i / kStages % 2) = masked[i / kStages % 2];
    head_of_bits = head;
    __syncwarp();
  };
  // From this lane's first column on.
  const auto rows_of = [&](int stage) {
    return reinterpret_cast<const RowOfBackward*>(shared_memory + Memory::kRowsAt +
                                                  stage * Memory::kRowBytes) +
           FirstElement().column;
  };
  // Gradients of scores of this warpgroup's keys.
  using Panel = Tile<T, kQueries, 64>;
  const auto panel_of = [&](int buffer) {
    return Panel{memory.scores(buffer) + warpgroup * Memory::kScorePanelBytes};
  };
  // Which weights dropout keeps. The bits of a tile are read before the warpgroups meet, those of
  // the next one are written after that.
  const bool exchanges_bits = Memory::kExchangesBits && !kIsPlain && params.dropout.is_given();
  [[maybe_unused]] KeptBits::OfLane kept;
  const auto make_bits = [&] {
    if (exchanges_bits && tiles.are_left())
      memory.bits(warpgroup).make(Dropping<true>(params, batch, tiles.head), tiles.query, group_key,
                                  warp_in_group);
  };
  // Products leave shared memory little time for others. So numbers of the first eights of rows are
  // loaded while products run whose results need them, where registers have room.
  constexpr int kEightsAhead = kBias != HopperBias::kNone ? 0 : kIsPlain ? 8 : 4;
  float2 rows_ahead[std::max(2 * kEightsAhead, 1)], deltas_ahead[std::max(kEightsAhead, 1)];
  const auto row_at = [](const RowOfBackward* rows, int column) {
    const RowOfBackward& row = rows[column_offset(column / 2, column)];
    return float2{row.max, row.log2_sum};
  };
  // Of two neighbours.
  const auto deltas_at = [](const RowOfBackward* rows, int n) {
    const RowOfBackward& row = rows[column_offset(n, 0)];
    return float2{row.delta, row.next_delta};
  };
  const auto load_rows = [&](int stage) {
    const RowOfBackward* const rows = rows_of(stage);
#pragma unroll
    for (int column = 0; column < 2 * kEightsAhead; ++column)
      rows_ahead[column] = row_at(rows, column);
  };
  const auto load_deltas = [&](int stage) {
    const RowOfBackward* const rows = rows_of(stage);
#pragma unroll
    for (int n = 0; n < kEightsAhead; ++n) deltas_ahead[n] = deltas_at(rows, n);
  };
  // Scores become weights; negative where dropout drops them.
  const auto weigh = [&](int stage, int step, int head, int query) {
    if constexpr (kHasTile) {
      memory.bias_is_there(step % 2).wait(step / 2 & 1);
      add_bias(reinterpret_cast<Accumulators<1, kN>&>(weights), params.scale,
               TileBias<T, true, Panel>(panel_of(step % 2), 0, 16 * warp_in_group));
    } else if constexpr (kHasTable) {
      add_bias(reinterpret_cast<Accumulators<1, kN>&>(weights), params.scale,
               DiagonalBias(Memory::diagonals(shared_memory, stage),
                            64 * warpgroup + 16 * warp_in_group));
    }
    const float to_logit = kBias == HopperBias::kNone ? params.scale : 1.f;
    const RowOfBackward* const rows = rows_of(stage);
#pragma unroll
    for (int column = 0; column < 2 * kN; ++column) {
      const float2 row = column < 2 * kEightsAhead ? rows_ahead[column] : row_at(rows, column);
#pragma unroll
      for (int i = column % 2; i < 4; i += 2) {
        float& weight = weights[column / 2][i];
        weight = exp2_approximate(fmaf(fmaf(weight, to_logit, -row.x), kLog2E, -row.y));
      }
    }
    if (kIsPlain || !params.dropout.is_given()) return;
    if constexpr (Memory::kExchangesBits) {
      kept.for_each([&](int n, int i, bool is_kept) {
        if (!is_kept) weights[n][i] = -weights[n][i];
      });
    } else {
      const Dropping<true> dropping(params, batch, head);
      dropping.template for_each_pair<1, kN>(
          query, warp_key, [&](int, int n, int half, uint32_t halves) {
            float* const pair = weights[n] + 2 * half;
            negate_below(pair[0], pair[1], halves, dropping.least);
          });
    }
  };
  const auto exclude = [](const Excluded<1, 8>(&excluded)[Memory::kQueryPanels],
                          float (&elements)[kN][4]) {
#pragma unroll
    for (int panel = 0; panel < Memory::kQueryPanels; ++panel)
      excluded[panel].apply(reinterpret_cast<Accumulators<1, 8>&>(elements[panel * 8]), 0.f);
  };
  const auto multiply_weights_of = [&](int stage) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      as_matrix_a<T, !kIsPlain>(rounded_weights[step], weights, step);
    start_value_gradient(memory.gradients(stage));
  };
  // Gradients of weights become those of scores.
  const auto find_score_gradients_of = [&](int stage) {
    const RowOfBackward* const rows = rows_of(stage);
    // Not 0 where a delta is not finite; or also, with a mask or ranges, a gradient.
    float check = 0.f;
    with_dropout<kIsPlain>(params, [&]<bool kMayDrop>() {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 deltas = n < kEightsAhead ? deltas_ahead[n] : deltas_at(rows, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float delta = i % 2 == 0 ? deltas.x : deltas.y;
          if (kIsPlain && i < 2) check = fmaf(delta, 0.f, check);
          float& gradient = gradients[n][i];
          gradient =
              score_gradient<kMayDrop>(gradient, weights[n][i], delta, params.dropout.factor);
          if constexpr (!kIsPlain) check = fmaf(gradient, 0.f, check);
        }
      }
    });
    // As in sm80/backward_tile.cuh.
    if (check != 0.f) {
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i) {
        if (weights[i / 4][i % 4] == 0.f) gradients[i / 4][i % 4] = 0.f;
      }
    }
  };
  // To where products of both warpgroups find them.
  const auto share_gradients = [&](int buffer) {
    const uint32_t first = FragmentsAcross<Panel>(panel_of(buffer), 0).address ^ warp_in_group * 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      as_matrix_a<T>(rounded_gradients[step], gradients, step);
      store_matrices_transposed(first + step * 16 * 128, rounded_gradients[step]);
    }
  };

  make_bits();
  if (exchanges_bits) sync_warpgroup(warpgroup);
  memory.keys_are_there().wait(0);
  int step = 0;
  [[maybe_unused]] uint32_t* taken = nullptr;  // the turn of the step before
  const auto end_turn = [&] {
    if (!kHasTurns || step == 0) return;
    wait_for_stores();
    publish_writes_to_others();
    pass_turn(taken);
  };
#pragma unroll 1
  for (; tiles.are_left(); ++step) {
    const int stage = step % kStages, head = tiles.head, query = tiles.query;
    if (shares_bits && head != head_of_bits) write_shared_bits(head);
    memory.stage_is_there(stage).wait(step / kStages & 1);
    start_scores(memory.queries(stage));
    start_weight_gradients(memory.gradients(stage));
    tiles.advance(params, batch, first_key);
    if (exchanges_bits) kept = memory.bits(warpgroup).load(warp_in_group);
    Excluded<1, 8> excluded[Memory::kQueryPanels];
    const auto key_range_of = [](int2 range) { return KeyRange{range.x, range.y}; };
    excluding.find(
        excluded, head, query, [&](int panel, int half) { return masked_of(stage, panel, half); },
        [&](int panel) {
          return key_range_of(Memory::ranges_of_panels(shared_memory, stage)[panel])
              .contains(warp_key, 16);
        },
        [&](int offset, int column) {
          return key_range_of(Memory::ranges(shared_memory, stage)[offset + column]);
        });
    if constexpr (kEightsAhead > 0) load_rows(stage);
    wait_for_products<1>();
    touch(weights);
    // Diagonals are summed while weights are made, when few products run.
    if (has_diagonals && step > 0 && warpgroup == 0 && is_first_of_group)
      memory.gradients_are_there((step - 1) % 2).arrive();
    weigh(stage, step, head, query);
    exclude(excluded, weights);
    if constexpr (kEightsAhead > 0) load_deltas(stage);
    if constexpr (kIsEarly) {
      multiply_weights_of(stage);
      wait_for_products<1>();
    } else {
      wait_for_products<0>();
    }
    touch(gradients);
    find_score_gradients_of(stage);
    if constexpr (kIsPlain) exclude(excluded, gradients);  // of few tiles
    if constexpr (!kIsEarly) multiply_weights_of(stage);
    if (has_diagonals) memory.scores_are_used(step % 2).wait((step / 2 & 1) ^ 1);
    share_gradients(step % 2);
    publish_writes();
    if (is_first_of_group) wait_for_reads_of_stores();
    // Gradients of all scores are there. The step before is done, so that the other buffer is free.
    sync_warpgroups<kWarpgroups>();
    if constexpr (kHasTile) {
      if (step > 0 && warpgroup == 0 && is_first_of_group)
        memory.scores_are_used((step - 1) % 2).arrive();
      if (params.bias_gradient_kind == BiasGradient::kDense && is_first_of_group)
        start_store_of_box(maps.bias_gradient, panel_of(step % 2).address, group_key, query, head,
                           batch);  // with the sums that follow
    }
    if ((is_added || is_in_cluster) && warpgroup == 0 && is_first_of_group)
      memory.gradients_are_there(step % 2).arrive();
    float query_gradient[8][4];
    start_query_gradient(query_gradient, memory.scores(step % 2));
    start_key_gradient(memory.queries(stage));
    make_bits();
    if constexpr (kHasTurns) {  // while products run, and by two warps
      uint32_t* const turn = turn_of<kQueries>(params, batch, head, query, warpgroup);
      if (is_first_of_group) end_turn();
      if (threadIdx.x % 128 == 32)
        wait_for_turn(turn, steps_before<kKeys, kQueries, kIsPlain, false>(params, batch, head,
                                                                           query, first_key));
      taken = turn;
    }
    wait_for_products<1>();
    touch(value_gradient);
    touch(query_gradient);
#pragma unroll
    for (int side = 0; side < 2; ++side)
      store_sums(sums + side * Memory::kSumPanelBytes, query_gradient, side);
    publish_writes();
    sync_warpgroup(warpgroup);
    if (is_first_of_group) {
      if (kHasTurns) publish_writes_to_others();
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int column = 64 * column_panel + 32 * side;
        if (column < kDim)
          start_sum_of_box(maps.query_gradient_sum,
                           memory.sums(warpgroup) + side * Memory::kSumPanelBytes, column,
                           query + 64 * query_panel, head, batch);
      }
      end_stores();
    }
    wait_for_products<0>();
    touch(key_gradient);
    __syncwarp();  // all lanes have read its rows
    if (lane == 0) memory.stage_is_used(stage).arrive();
  }

  if (step > 0 && warpgroup == 0 && is_first_of_group) {
    if constexpr (kHasTile) memory.scores_are_used((step - 1) % 2).arrive();
    if (has_diagonals) memory.gradients_are_there((step - 1) % 2).arrive();
  }

  if (is_first_of_group) {
    wait_for_reads_of_stores();
    end_turn();
  }
  sync_warpgroup(warpgroup);
  // Both in the same rows of a tile, so that a warp writes where it alone has written.
  using Rows = Tile<T, 64, 64 * Memory::kPanels>;
  const auto store = [&]<int kColumns>(const float (&results)[kColumns][4], float factor,
                                       const Strided& tensor, int width) {
    store_rows<T, Rows>(sums, 16 * warp_in_group, results, {factor, factor},
                        tensor.row<T>(batch, key_head, group_key), tensor.query_stride,
                        params.keys - group_key, width);
  };
  store(value_gradient, kIsPlain ? 1.f : params.dropout.factor, params.value_gradient,
        params.value_dim);
  __syncwarp();  // its rows were read
  store(key_gradient, params.scale, params.key_gradient, params.head_dim);
#endif
}

}  // namespace megasoftmax
