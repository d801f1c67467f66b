#pragma once
// The same as sm80/forward.cuh on Hopper, by products of warpgroups and tensor copies.
//
// A block takes one tile of queries, or several one after the other. One of its warps only copies,
// ahead over the end of a tile; where masks, ranges or dropout are given, others of its warpgroup
// find what the next tile of queries sees. Each other warpgroup has 64 queries. It starts the
// product with the next keys, then that of the weights before with their values, and makes weights
// while the latter runs.

#include "../../common/limits.h"
#include "../../common/vector.cuh"
#include "../bias.cuh"
#include "../dropping.cuh"
#include "../exclusion.cuh"
#include "../limits.h"
#include "../online_softmax.cuh"
#include "../parts.cuh"
#include "../sm80/tile.cuh"
#include "../tile_of_queries.cuh"
#include "ptx.cuh"

namespace megasoftmax {

// Boxes of 64 columns: of 64 queries, and of the keys of a tile. Of the bias 64 queries and keys.
// Of the output the 16 queries of a warp.
struct TensorMaps {
  CUtensorMap query, key, value, bias, output;
};

// What a block tells its warps of a tile of queries that it takes, and what they see by length,
// window and range: each query; of each 64 queries the keys between the first and the last that one
// sees, and the keys that all of them see.
template <int kQueries>
struct AssignedTile {
  static constexpr int kGroups = kQueries / 64;

  int number;     // of the tile; negative: there is no other
  int first_key;  // of the first step; kNoKey: there is none
  TileOfQueries block;
  alignas(8) KeyRange seen[kGroups], whole[kGroups], rows[kQueries];

  // Of 64 queries, by the lanes of a warp.
  __device__ void find(const AttentionParams& params, const TileOfQueries& tile, int group) {
    const int lane = thread_index_anew() % 32;
    const int first_row = group * 64 + lane;
    KeyRange ranges[2];  // both on their way at a time
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = tile.first_query + first_row + 32 * half;
      ranges[half] =
          visible_keys(params, tile.batch, tile.head, max(min(query, params.queries - 1), 0));
    }
    int first = INT32_MAX, end = 0, whole_first = 0, whole_end = INT32_MAX;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = tile.first_query + first_row + 32 * half;
      const bool is_query = query >= 0 && query < params.queries;
      KeyRange& range = ranges[half];
      if (is_query && range.begin < range.end) {
        first = min(first, range.begin);
        end = max(end, range.end);
      } else {
        range = {0, 0};
      }
      if (is_query) {
        whole_first = max(whole_first, range.begin);
        whole_end = min(whole_end, range.end);
      }
      rows[first_row + 32 * half] = range;
    }
    first = smallest_of_lanes(first);
    end = largest_of_lanes(end);
    whole_first = largest_of_lanes(whole_first);
    whole_end = smallest_of_lanes(whole_end);
    if (lane == 0) {
      if (group == 0) block = tile;
      seen[group] = {first, end};
      whole[group] = {whole_first, whole_end};
    }
  }
  // The first key from `key` on between those that some 64 queries see; INT32_MAX if none is left.
  __device__ int next(int key) const {
    int found = INT32_MAX;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const KeyRange range = seen[group];
      if (key < range.end) found = min(found, max(key, range.begin));
    }
    return found;
  }
  // The key after the last one that is seen.
  __device__ int end() const {
    int found = 0;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) found = max(found, seen[group].end);
    return found;
  }
};

// In place of a key that is not there; beyond all keys, and a multiple of 64 as the first keys of
// steps.
inline constexpr int kNoKey = INT32_MAX / 64 * 64;
static_assert(kNoKey > kMaxPositions);

template <HopperBias kBias, int kIndex>
struct HopperMemory {
  static constexpr AttentionHopperTile kTile = kAttentionHopperTiles[kIndex];
  static constexpr int kDim = kTile.head_dim, kValueDim = kTile.value_dim, kKeys = kTile.keys;
  static constexpr int kPanels = divide_up(kDim, 64), kValuePanels = divide_up(kValueDim, 64);
  static constexpr int kWarpgroups = kTile.warpgroups, kQueries = kTile.queries();
  static constexpr int kThreads = kTile.threads(), kStages = 2;
  static_assert(shares_registers(kTile));
  static_assert(takes_bias(kTile, kBias));
  static_assert(kDim % 16 == 0 && kValueDim % 16 == 0 && kQueries % kNoteTile == 0);
  static_assert(kKeys == kNoteTile || kKeys == 2 * kNoteTile);

  // Queries of each stage and warpgroup, and later their results; keys, values of each stage; the
  // bias of each stage and warpgroup, of a table that of each stage; barriers.
  static constexpr int kPanelBytes = kKeys * 128, kQueryPanelBytes = 64 * 128;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kKeyBytes = kPanels * kPanelBytes;
  static constexpr int kValueBytes = kValuePanels * kPanelBytes;
  static constexpr int kQueryStages = kTile.query_stages;
  static constexpr int kKeysAt = kQueryStages * kWarpgroups * kQueryBytes;
  static constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
  static_assert(kValuePanels <= kPanels);  // results have the place of queries
  static constexpr int kBiasAt = kValuesAt + kStages * kValueBytes;
  using Diagonals = DiagonalTile<false, kQueries, kKeys>;
  static constexpr bool kIsTable = kBias == HopperBias::kTable;
  static constexpr int kBiasStages = kBias == HopperBias::kTile ? kTile.bias_stages : kStages;
  static constexpr int kBiasSharers = kIsTable ? kWarpgroups : 1;  // warpgroups with one tile of it
  static constexpr int kBiasPanelBytes = 64 * 128;
  static constexpr int kBiasBytes = kIsTable ? Diagonals::kBytes : kKeys / 64 * kBiasPanelBytes;
  static constexpr int kBiasTilesOfStage = kWarpgroups / kBiasSharers;
  static constexpr int kBiasTiles =
      kBias == HopperBias::kNone ? 0 : kBiasStages * kBiasTilesOfStage;
  static constexpr int kBarriersAt = kBiasAt + kBiasTiles * kBiasBytes;
  static constexpr int kBiasBarrier = 5 + 4 * kStages;
  using Assignment = AssignedTile<kQueries>;  // two, in turn
  static constexpr int kAssignmentsAt = kBarriersAt + 8 * (kBiasBarrier + 2 * kBiasTiles);
  static constexpr int kStepsAt = kAssignmentsAt + 2 * static_cast<int>(sizeof(Assignment));
  static constexpr int kBytes = kStepsAt + kStages * static_cast<int>(sizeof(int));
  static_assert(kBytes <= least_shared_bytes(kHopperMajor, kHopperMajor));

  uint32_t address;

  __device__ static int bias_tile(int stage, int warpgroup) {
    return stage * kBiasTilesOfStage + warpgroup / kBiasSharers;
  }
  __device__ static Diagonals diagonals(char* memory, int stage) {
    return {reinterpret_cast<float*>(memory + kBiasAt + stage * kBiasBytes)};
  }
  __device__ static Assignment& assignment(char* memory, int number) {
    return reinterpret_cast<Assignment*>(memory + kAssignmentsAt)[number % 2];
  }
  // Of the keys of a stage: the key of the next step, and whether a mask excludes some of them, see
  // FollowedTiles.
  __device__ static int& step(char* memory, int stage) {
    return reinterpret_cast<int*>(memory + kStepsAt)[stage];
  }
  __device__ static int queries_at(int number, int warpgroup) {
    return (number % kQueryStages * kWarpgroups + warpgroup) * kQueryBytes;
  }
  __device__ uint32_t queries(int number, int warpgroup) const {
    return address + queries_at(number, warpgroup);
  }
  __device__ uint32_t keys(int stage) const { return address + kKeysAt + stage * kKeyBytes; }
  __device__ uint32_t values(int stage) const { return address + kValuesAt + stage * kValueBytes; }
  __device__ uint32_t bias(int stage, int warpgroup) const {
    return address + kBiasAt + bias_tile(stage, warpgroup) * kBiasBytes;
  }
  __device__ Barrier barrier(int index) const { return {address + kBarriersAt + 8 * index}; }
  __device__ Barrier queries_are_there() const { return barrier(0); }
  __device__ Barrier queries_are_used() const { return barrier(1); }
  __device__ Barrier keys_are_there(int stage) const { return barrier(2 + stage); }
  __device__ Barrier values_are_there(int stage) const { return barrier(2 + kStages + stage); }
  __device__ Barrier keys_are_used(int stage) const { return barrier(2 + 2 * kStages + stage); }
  __device__ Barrier values_are_used(int stage) const { return barrier(2 + 3 * kStages + stage); }
  __device__ Barrier tile_is_assigned() const { return barrier(2 + 4 * kStages); }
  __device__ Barrier ranges_are_there() const { return barrier(3 + 4 * kStages); }
  __device__ Barrier tile_is_done() const { return barrier(4 + 4 * kStages); }
  __device__ Barrier bias_is_there(int stage, int warpgroup) const {
    return barrier(kBiasBarrier + 2 * bias_tile(stage, warpgroup));
  }
  __device__ Barrier bias_is_used(int stage, int warpgroup) const {
    return barrier(kBiasBarrier + 2 * bias_tile(stage, warpgroup) + 1);
  }
};

// What a block owns: the queries of a head, 64 for each warpgroup, or all queries of several heads
// that share keys, a warpgroup each.
template <bool kMayShare>
struct QueriesOfBlock : TileOfQueries {
  int heads = 0;  // 0: one, whose queries warpgroups share

  __device__ QueriesOfBlock(const AttentionForwardParams& params, int queries_per_tile, int number)
      : TileOfQueries(params, queries_per_tile, number) {
    first_query -= params.lead;
    if (!kMayShare || params.heads_of_block == 1) return;
    const int group = static_cast<int>(params.heads_per_key_head.divisor);
    int key_head, before;
    params.blocks_of_heads.split(head, key_head, before);
    before *= params.heads_of_block;
    head = key_head * group + before;
    heads = min(params.heads_of_block, group - before);
  }
  // As it was assigned, the same for all lanes.
  __device__ explicit QueriesOfBlock(const TileOfQueries& assigned) : TileOfQueries(assigned) {
    first_query = uniform(first_query);
    head = uniform(head);
    batch = uniform(batch);
    split = uniform(split);
  }
  // Of a warpgroup that has none, the last one.
  __device__ int head_of(int warpgroup) const {
    return kMayShare && heads > 0 ? head + min(warpgroup, heads - 1) : head;
  }
  // The first one. Of a warpgroup that has none it lies beyond the tensor.
  __device__ int query_of(const AttentionForwardParams& params, int warpgroup) const {
    if (kMayShare && heads > 0) return warpgroup < heads ? 0 : params.queries;
    const int query = first_query + 64 * warpgroup;
    return query < 0 ? params.queries : query;
  }
};

// The tiles of keys that a block takes, one after the other.
template <int kQueries, int kKeys, bool kIsPlain>
class TilesOfBlock {
 public:
  int key, end;   // the first key of the tile at hand; none is left from `end` on
  uint32_t step;  // how many the block took before

  // `assigned` counts where launches are not plain.
  __device__ TilesOfBlock(const AttentionForwardParams& params, const TileOfQueries& block,
                          const AssignedTile<kQueries>& assigned, uint32_t step)
      : step(step) {
    KeyRange seen;
    if constexpr (kIsPlain) {
      const int last_query = min(block.first_query + kQueries, params.queries) - 1;
      seen = {visible_keys(params, max(block.first_query, 0)).begin,
              visible_keys(params, last_query).end};
    } else {
      seen = {assigned.next(0), assigned.end()};
    }
    const KeyRange part =
        part_of<kKeys>(params, {seen.begin / kKeys * kKeys, seen.end}, block.split);
    end = part.end;
    if constexpr (kIsPlain) {
      go_to(part.begin);
    } else {
      const int first = max(part.begin, seen.begin);
      go_to(params.note.words == nullptr || first >= end
                ? first
                : tiles_.from(params, block.batch, block.head, block.first_query,
                              first / kNoteTile * kNoteTile));
    }
  }
  __device__ bool are_left() const { return key < end; }
  __device__ void advance(const AttentionForwardParams& params, const TileOfQueries& block,
                          const AssignedTile<kQueries>& assigned) {
    if constexpr (kIsPlain) {
      key += kKeys;
    } else {
      go_to(params.note.words != nullptr
                ? tiles_.after(params, key + kKeys - kNoteTile, [&] { return block; })
                : assigned.next(key + kKeys));
    }
    ++step;
  }
  // By mask.
  __device__ bool may_exclude() const {
    return !kIsPlain && (tiles_.may_exclude(key) || tiles_.may_exclude(key + kKeys - kNoteTile));
  }

 private:
  // Of the key behind the last tile that is noted, the tile may begin before the end. The compiler
  // does not see that all lanes take the same steps. Unless it is told, it computes in registers of
  // the lanes, between the products, where their matrices lie.
  __device__ void go_to(int seen) {
    key = seen < end ? seen / kKeys * kKeys : end;
    if constexpr (!kIsPlain) key = uniform(key);
  }

  [[maybe_unused]] KeyTiles<kQueries> tiles_;
};

// The same where launches are not plain, as the copying warp tells the others.
class FollowedTiles {
 public:
  int key;
  uint32_t step;

  __device__ FollowedTiles(int first_key, uint32_t step) : key(uniform(first_key)), step(step) {}
  __device__ bool are_left() const { return key != kNoKey; }
  // What is told of a step, in one word.
  __device__ static int told(int next_key, bool may_exclude) { return next_key | may_exclude; }
  // Reads that of the step at hand, whose keys are there, and not used.
  __device__ void read(int told) { told_ = uniform(told); }
  __device__ void advance() {
    key = told_ & ~1;
    ++step;
  }
  __device__ bool may_exclude() const { return (told_ & 1) != 0; }

 private:
  int told_ = kNoKey;
};

// The tiles of queries of a block: all blocks take them in turn. Causal tiles become shorter: every
// other turn is in reverse. Else one tile of a head alone may be shorter: each turn is moved by
// one, so that no block gets those of all heads. What a mask or ranges leave of a tile is not known
// before: then a block takes the next one when it is done with one, which it counts in global
// memory.
class WorkOfBlock {
 public:
  __device__ explicit WorkOfBlock(const AttentionForwardParams& params)
      : is_even_(params.window_left < 0 && params.window_right < 0),
        place_(static_cast<int>(blockIdx.x)),
        count_(static_cast<int>(params.order.tiles * params.key_heads *
                                params.blocks_of_heads.divisor * params.batches)) {}
  __device__ int number() const { return first_ + place_; }
  __device__ bool is_left() const { return number() < count_; }
  __device__ bool may_come() const { return first_ < count_; }
  __device__ void advance() {
    const int blocks = static_cast<int>(gridDim.x);
    first_ += blocks;
    place_ = !is_even_ ? blocks - 1 - place_ : place_ + 1 < blocks ? place_ + 1 : 0;
  }
  // The number of the tile of the next turn, or one that is too large. Lane 0 of the copying warp
  // counts, and has it alone.
  __device__ uint32_t next(const AttentionForwardParams& params) const {
    if (params.tiles_taken != nullptr)
      return threadIdx.x == 0 ? gridDim.x + atomicAdd(params.tiles_taken, 1) : 0;
    WorkOfBlock after = *this;
    after.advance();
    return after.may_come() ? static_cast<uint32_t>(after.number()) : ~0u;
  }
  __device__ bool has(uint32_t number) const { return number < static_cast<uint32_t>(count_); }

 private:
  bool is_even_;
  int first_ = 0, place_;  // of the turn, and of the block in it
  int count_;
};

template <class T, HopperBias kBias, bool kIsPlain, int kIndex>
__global__ void __launch_bounds__(HopperMemory<kBias, kIndex>::kThreads, 1)
    attention_hopper_forward_kernel(const __grid_constant__ AttentionForwardParams params,
                                    const __grid_constant__ TensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Memory = HopperMemory<kBias, kIndex>;
  constexpr int kFillers = 3;  // the warps that fill in entries of a table
  constexpr int kDim = Memory::kDim, kKeys = Memory::kKeys, kQueries = Memory::kQueries;
  constexpr int kStages = Memory::kStages, kWarpgroups = Memory::kWarpgroups;
  constexpr int kN = kKeys / 8, kColumns = Memory::kValueDim / 8, kSteps = kKeys / 16;
  constexpr bool kHasBias = kBias != HopperBias::kNone;
  constexpr bool kHasTile = kBias == HopperBias::kTile;
  constexpr bool kMayTakeTurns =
      kKeys > kNoteTile && (kIsPlain || !kHasBias || (kHasTile && kWarpgroups == 2));
  // Registers have room for the next weights beside those that a product reads.
  constexpr bool kHasRoom =
      kWarpgroups == 2 && Memory::kValueDim < 256 && !(kHasTile && kKeys > kNoteTile);
  // The warps that find what queries see, of launches that are not plain.
  constexpr int kFinders = Memory::kIsTable ? kFillers : kWarpgroups;
  using TilesToCopy = TilesOfBlock<kQueries, kKeys, kIsPlain>;
  using Tiles = std::conditional_t<kIsPlain, TilesToCopy, FollowedTiles>;
  using Block = QueriesOfBlock<kIsPlain && !kHasBias>;
  extern __shared__ __align__(1024) char shared_memory[];
  const Memory memory{shared_address(shared_memory)};
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128)) - 1;

  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.query, &maps.key, &maps.value, &maps.output})
      prefetch_map(*map);
    if constexpr (kHasTile) prefetch_map(maps.bias);
    memory.tile_is_assigned().init(1);
    memory.ranges_are_there().init(kFinders);
    memory.queries_are_there().init(kIsPlain ? 1 : 2);  // and what is assigned is known
    memory.queries_are_used().init(4 * kWarpgroups);
    // And the copying warp: a tile without keys is not done before it has waited for the last one.
    memory.tile_is_done().init(1 + 4 * kWarpgroups + (Memory::kIsTable ? kFillers : 0));
    for (int stage = 0; stage < kStages; ++stage) {
      memory.keys_are_there(stage).init(1);
      memory.values_are_there(stage).init(1);
      memory.keys_are_used(stage).init(4 * kWarpgroups);
      memory.values_are_used(stage).init(4 * kWarpgroups);
    }
    for (int i = 0; i < Memory::kBiasTiles; ++i) {
      memory.barrier(Memory::kBiasBarrier + 2 * i).init(Memory::kIsTable ? kFillers : 1);
      memory.barrier(Memory::kBiasBarrier + 2 * i + 1).init(4 * Memory::kBiasSharers);
    }
    publish_barriers();
  }
  __syncthreads();
  WorkOfBlock work(params);
  uint32_t first_step = 0;
  const auto block_of = [&](const auto& assigned) {
    if constexpr (kIsPlain) {
      return Block(params, kQueries, work.number());
    } else {
      return Block(assigned.block);
    }
  };
  // Of the launches that are not plain, others than the copying warp take its word for their next
  // tile of queries.
  const auto may_come = [&](Barrier is_there, int done, int& number) {
    if constexpr (kIsPlain) {
      return work.may_come();
    } else {
      is_there.wait(done & 1);
      number = uniform(Memory::assignment(shared_memory, done).number);
      return number >= 0;
    }
  };

  if (warpgroup < 0) {
    give_registers<Memory::kTile.copier_registers>();
    const bool is_first = threadIdx.x % 32 == 0;
    if (threadIdx.x >= 32) {
      if constexpr (Memory::kIsTable || !kIsPlain) {
        const int finder = static_cast<int>(threadIdx.x) / 32 - 1;
        if (finder >= kFinders) return;
        int number;
        for (int done = 0; may_come(memory.tile_is_assigned(), done, number);
             work.advance(), ++done) {
          if (kIsPlain && !work.is_left()) continue;
          auto& assigned = Memory::assignment(shared_memory, done);
          if constexpr (!kIsPlain) {
            const Block tile(params, kQueries, number);
            for (int group = finder; group < kWarpgroups; group += kFinders)
              assigned.find(params, tile, group);
            __syncwarp();  // all lanes have written theirs
            if (is_first) memory.ranges_are_there().arrive();
          }
          if constexpr (Memory::kIsTable) {
            if (!kIsPlain) memory.ranges_are_there().wait(done & 1);
            const Block block = block_of(assigned);
            const BiasRows<T> bias(params, block.batch, block.head);
            TilesToCopy tiles(params, block, assigned, first_step);
            for (; tiles.are_left(); tiles.advance(params, block, assigned)) {
              const int stage = tiles.step % Memory::kBiasStages;
              Memory::diagonals(shared_memory, stage)
                  .template fill<32 * kFillers>(static_cast<int>(threadIdx.x) - 32, bias,
                                                block.first_query, tiles.key, params.queries,
                                                params.keys, [&] {
                                                  memory.bias_is_used(stage, 0).wait(
                                                      (tiles.step / Memory::kBiasStages & 1) ^ 1);
                                                });
              __syncwarp();  // all lanes have written theirs
              if (is_first) memory.bias_is_there(stage, 0).arrive();
            }
            first_step = uniform(tiles.step);
            if constexpr (!kIsPlain) {
              __syncwarp();  // all lanes have read what is assigned
              if (is_first) memory.tile_is_done().arrive();
            }
          }
        }
      }
      return;
    }
    uint32_t number = blockIdx.x;
    // Tells the others the number of a tile. What was assigned two tiles before is not needed any
    // more.
    const auto assign = [&](int done) {
      if (!is_first) return;
      Memory::assignment(shared_memory, done).number =
          work.has(number) ? static_cast<int>(number) : -1;
      memory.tile_is_assigned().arrive();
    };
    if constexpr (!kIsPlain) assign(0);
    int done = 0;
    for (; kIsPlain ? work.may_come() : work.has(number); work.advance()) {
      if (kIsPlain && !work.is_left()) continue;
      auto& assigned = Memory::assignment(shared_memory, done);
      const Block block(params, kQueries, kIsPlain ? work.number() : static_cast<int>(number));
      const auto copy_queries = [&] {
        memory.queries_are_used().wait((done & 1) ^ 1);
        if (!is_first) return;
        memory.queries_are_there().arrive_and_expect(kWarpgroups * Memory::kQueryBytes);
        for (int i = 0; i < kWarpgroups; ++i)
          start_copy_of_panels<Memory::kPanels>(
              memory.queries(done, i), maps.query, memory.queries_are_there(), 64,
              block.query_of(params, i), block.head_of(i), block.batch);
      };
      if constexpr (Memory::kQueryStages > 1) copy_queries();
      if constexpr (!kIsPlain) memory.ranges_are_there().wait(done & 1);
      int key_head, rest;
      params.heads_per_key_head.split(block.head, key_head, rest);
      TilesToCopy tiles(params, block, assigned, first_step);
      if (!kIsPlain && is_first) assigned.first_key = tiles.are_left() ? tiles.key : kNoKey;
      const auto fill = [&]<int kPanels>(uint32_t shared, const CUtensorMap& map, Barrier there,
                                         Barrier used, uint32_t step, int key, auto&& tell) {
        used.wait((step / kStages & 1) ^ 1);
        if (!is_first) return;
        tell();
        there.arrive_and_expect(kPanels * Memory::kPanelBytes);
        start_copy_of_panels<kPanels>(shared, map, there, kKeys, key, key_head, block.batch);
      };
      [[maybe_unused]] int bias_head, bias_batch;
      if constexpr (kBias == HopperBias::kTile)
        params.entry_of_bias(block.batch, block.head, bias_batch, bias_head);
      const auto fill_bias = [&](uint32_t step, int key) {
        const int stage = step % Memory::kBiasStages;
        for (int i = 0; i < kWarpgroups; ++i) {
          memory.bias_is_used(stage, i).wait((step / Memory::kBiasStages & 1) ^ 1);
          if (!is_first) continue;
          const Barrier there = memory.bias_is_there(stage, i);
          there.arrive_and_expect(Memory::kBiasBytes);
          for (int panel = 0; panel < kKeys / 64; ++panel)
            start_copy_of_box(memory.bias(stage, i) + panel * Memory::kBiasPanelBytes, maps.bias,
                              there, key + 64 * panel, block.query_of(params, i), bias_head,
                              bias_batch);
        }
      };
      // In the order in which there is room: keys, then the values of the step before, or, of the
      // first step, the queries, if those of the tile before have their place. The next tile is
      // taken as late as it is found in time, so that all blocks end at about the same. Its number
      // is on the way while room is waited for. It is assigned in the place of the tile before,
      // when all are done with that.
      int key_before = 0;
      for (bool begins = true;; begins = false) {
        const uint32_t step = tiles.step;
        const int stage = step % kStages, key = tiles.key;
        const bool has_keys = tiles.are_left();
        [[maybe_unused]] const bool may_exclude = tiles.may_exclude();
        if (has_keys) tiles.advance(params, block, assigned);
        [[maybe_unused]] const bool ends = !tiles.are_left() && (has_keys || begins);
        [[maybe_unused]] uint32_t next = 0;
        if constexpr (!kIsPlain) {
          if (ends) next = work.next(params);
        }
        if (has_keys)
          fill.template operator()<Memory::kPanels>(
              memory.keys(stage), maps.key, memory.keys_are_there(stage),
              memory.keys_are_used(stage), step, key, [&] {
                if constexpr (!kIsPlain)
                  Memory::step(shared_memory, stage) =
                      FollowedTiles::told(tiles.are_left() ? tiles.key : kNoKey, may_exclude);
              });
        if (begins) {
          if constexpr (Memory::kQueryStages == 1) copy_queries();
          if (!kIsPlain && is_first) memory.queries_are_there().arrive();
        } else {
          const int before = (step - 1) % kStages;
          fill.template operator()<Memory::kValuePanels>(
              memory.values(before), maps.value, memory.values_are_there(before),
              memory.values_are_used(before), step - 1, key_before, [] {});
        }
        if constexpr (!kIsPlain) {
          if (ends) {
            number = __shfl_sync(~0u, next, 0);
            memory.tile_is_done().wait((done & 1) ^ 1);
            __syncwarp();  // all lanes have waited
            if (is_first) memory.tile_is_done().arrive();
            assign(done + 1);
          }
        }
        if (!has_keys) break;
        if constexpr (kBias == HopperBias::kTile) fill_bias(step, key);
        key_before = key;
      }
      ++done;
      first_step = uniform(tiles.step);
    }
    if constexpr (!kIsPlain) {
      memory.queries_are_used().wait((done & 1) ^ 1);
      if (is_first) {
        memory.queries_are_there().arrive();
        memory.queries_are_there().arrive();
      }
    }
    return;
  }

  take_registers<Memory::kTile.registers>();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_in_group = static_cast<int>(threadIdx.x) / 32 % 4;
  const FirstElement mine;
  const auto release = [&](Barrier barrier) {
    if (lane == 0) barrier.arrive();
  };
  const auto wait_for = [&](auto&& barrier_of_stage, uint32_t step) {
    barrier_of_stage(step % kStages).wait(step / kStages & 1);
  };
  const auto keys_are_there = [&](int stage) { return memory.keys_are_there(stage); };
  const auto values_are_there = [&](int stage) { return memory.values_are_there(stage); };

  // Warpgroups take turns at the products of queries and keys, one for each tile of keys, also of
  // those that they pass. So one makes weights while another has products; else all make weights at
  // the same time, and then all wait for products.
  const bool takes_turns = kMayTakeTurns && (kHasTile || params.note.words == nullptr);
  const auto wait_for_my_turn = [&] {
    if (takes_turns) wait_for_turn<kWarpgroups>(warpgroup);
  };
  const auto pass_my_turn = [&] {
    if (takes_turns) pass_turn<kWarpgroups>(warpgroup);
  };
  if (warpgroup == kWarpgroups - 1) pass_my_turn();

  // Loaded once: else each tile would wait for it.
  const uint64_t seed = kIsPlain ? 0 : Dropping<false>::seed(params);
  int number;
  for (int done = 0; may_come(memory.queries_are_there(), done, number); work.advance()) {
    if (kIsPlain && !work.is_left()) continue;
    const int turn = done;
    const auto& assigned = Memory::assignment(shared_memory, turn);
    const Block block = block_of(assigned);
    const int head = block.head_of(warpgroup), group_query = block.query_of(params, warpgroup);
    const int warp_query = group_query + 16 * warp_in_group;
    // By length, window and range: of these keys all queries of the warpgroup see all; and these
    // some see, none where it has no queries.
    int all_visible_begin = 0, all_visible_end = 0;
    KeyRange seen{0, 0};
    if constexpr (!kIsPlain) {
      all_visible_begin = uniform(assigned.whole[warpgroup].begin);
      all_visible_end = uniform(assigned.whole[warpgroup].end) - kKeys;
      seen = {uniform(assigned.seen[warpgroup].begin), uniform(assigned.seen[warpgroup].end)};
    } else if (group_query < params.queries) {
      const KeyRange of_first = visible_keys(params, group_query),
                     of_last = visible_keys(params, min(group_query + 64, params.queries) - 1);
      all_visible_begin = of_last.begin;
      all_visible_end = of_first.end - kKeys;
      seen = {of_first.begin, of_last.end};
    }

    float output[1][kColumns][4] = {};
    float scores[1][kN][4];
    uint32_t weights[kSteps][4];
    float factors[2];
    OnlineSoftmax<1> softmax(params.scale);

    const auto start_scores = [&](int stage) {
      const uint64_t a = matrix_at(memory.queries(turn, warpgroup), 16),
                     b = matrix_at(memory.keys(stage), 16);
      begin_products();
      start_product_of_rows<T, kDim>(scores[0], a, Memory::kQueryPanelBytes, b,
                                     Memory::kPanelBytes);
      end_products();
    };
    const auto start_output = [&](int stage) {
      const uint64_t b = matrix_at(memory.values(stage), Memory::kPanelBytes);
      begin_products();
      start_sum_of_products<T>(output[0], weights, b);
      end_products();
    };
    // Where registers have room, the tile of a bias is loaded while products run, and given back at
    // once. Else the rows of a half are loaded when logits are made of them, and the tile waits
    // until the warp has voted on the largest ones, which takes no registers: all lanes have read
    // theirs.
    constexpr bool kLoadsBiasAhead = kHasTile && Memory::kBiasStages == 1;
    [[maybe_unused]] Pack<T> bias[2][kN / 4];
    const auto wait_for_bias = [&](const Tiles& tiles) {
      const int stage = tiles.step % Memory::kBiasStages;
      memory.bias_is_there(stage, warpgroup).wait(tiles.step / Memory::kBiasStages & 1);
      return stage;
    };
    const auto load_bias = [&](int stage, int half) {
      using Panel = Tile<T, 64, 64>;
      const uint32_t first =
          memory.bias(stage, warpgroup) + Panel::offset(16 * warp_in_group + lane % 8, lane / 8);
#pragma unroll
      for (int n = 0; n < kN; n += 4)
        load_matrices(bias[half][n / 4].words, (first ^ n % 8 * 16) + half * 8 * Panel::kRowBytes +
                                                   n / 8 * Memory::kBiasPanelBytes);
    };
    const auto load_bias_ahead = [&](const Tiles& tiles) {
      const int stage = wait_for_bias(tiles);
      uint32_t words = 0;  // one of each load
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_bias(stage, half);
#pragma unroll
        for (int i = 0; i < kN / 4; ++i) words |= bias[half][i].words[0];
      }
      wait_for_loads(words);
      release(memory.bias_is_used(stage, warpgroup));
    };
    // Makes logits of products, of a half of the rows.
    const auto add_bias_of = [&](const Tiles& tiles, int half) {
      if constexpr (!kLoadsBiasAhead)
        load_bias(half == 0 ? wait_for_bias(tiles) : tiles.step % Memory::kBiasStages, half);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[0][n][2 * half + i];
          score = fmaf(score, params.scale, bias[half][n / 4][n % 4 * 2 + i]);
        }
      }
    };
    // Products leave shared memory little time for others. So three warpgroups load the first
    // entries of a table while they run, too.
    constexpr bool kLoadsPairsAhead = Memory::kIsTable && kWarpgroups > 2;
    [[maybe_unused]] DiagonalPairs<kN, kIsPlain ? 6 : 4> pairs;
    const auto load_pairs_ahead = [&](const Tiles& tiles) {
      pairs.load(Memory::diagonals(shared_memory, wait_for_bias(tiles)),
                 64 * warpgroup + 16 * warp_in_group);
    };
    const auto add_all_bias_of = [&](const Tiles& tiles) {
      if constexpr (kLoadsPairsAhead) {
        pairs.add_to(scores[0], params.scale);
      } else if constexpr (Memory::kIsTable) {
        const int stage = wait_for_bias(tiles);
        add_bias(scores, params.scale,
                 DiagonalBias(Memory::diagonals(shared_memory, stage),
                              64 * warpgroup + 16 * warp_in_group));
      } else {
        add_bias_of(tiles, 0);
        add_bias_of(tiles, 1);
      }
    };
    // Of a tile the bits of this lane's rows that the mask excludes, on their way while products
    // run.
    constexpr int kMaskWords = kKeys / 32;
    [[maybe_unused]] uint32_t masked[2][kMaskWords];
    const auto load_masked = [&](const Tiles& tiles) {
      if constexpr (!kIsPlain) {
        const NoteLayout& layout = params.note.layout;
        if (layout.bit_rows == 0) return;
        const uint32_t* const bits = params.note.of(block.batch, block.head) + layout.bits() +
                                     static_cast<unsigned>(tiles.key) / 32;
        const int pitch = layout.bit_rows == 1 ? 0 : layout.words_of_bits();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = min(warp_query + mine.row + 8 * half, params.queries - 1);
          start_load(masked[half], bits + int64_t{row} * pitch);
        }
      }
    };
    // What length, window, range and mask exclude of a step; whether it may be anything. By length,
    // window and range: `is_cut`. Found while products run, but for plain launches, where it is
    // found later.
    const auto find_excluded = [&](const Tiles& tiles, bool is_cut, Excluded<1, kN>& excluded) {
      if constexpr (!kIsPlain) {
        if (is_cut) {
          const KeyRange* const rows =
              assigned.rows + 64 * warpgroup + 16 * warp_in_group + mine.row;
          const KeyRange ranges[2] = {rows[0], rows[8]};
          excluded.add_words([&](int half, int word) {
            return bits_outside(ranges[half], tiles.key + 32 * word);
          });
        }
        const NoteLayout& layout = params.note.layout;
        if (layout.bit_rows > 0) {
          excluded.add_words([&](int half, int word) { return masked[half][word]; });
        } else if (tiles.may_exclude()) {
          const int line = min(group_query / kNoteTile, layout.query_tiles - 1);
          const int tile = tiles.key / kNoteTile;
          const uint32_t seen =
              __ldg(params.note.of(block.batch, block.head) + layout.seen_by_query() +
                    int64_t{line} * layout.words_of_keys() + tile / 32) >>
              tile % 32;
          excluded.add_words([&](int, int word) { return (seen >> word / 2 & 1) - 1; });
        }
        settle(excluded.words);
      }
      return is_cut || tiles.may_exclude();
    };
    // Scores become weights, and what was summed before is scaled; `finish_output` waits for it.
    const auto weigh = [&]<bool kIsFirst>(const Tiles& tiles, bool excludes,
                                          Excluded<1, kN>& excluded, auto&& finish_output) {
      release(memory.keys_are_used(tiles.step % kStages));
      if constexpr (kHasBias) add_all_bias_of(tiles);
      if (excludes) {
        if constexpr (kIsPlain) {
          excluded.template find<false, true>(params, block.batch, block.head, warp_query,
                                              tiles.key, true);
          excluded.apply(scores, -INFINITY);
        } else {
          excluded.apply_all(scores, -INFINITY);
        }
      }
      const auto release_bias = [&] {
        if constexpr (kHasBias && !kLoadsBiasAhead)
          release(memory.bias_is_used(tiles.step % Memory::kBiasStages, warpgroup));
      };
      const auto scale_output = [&] {
        if constexpr (!kIsFirst) {
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) output[0][n][i] *= factors[i / 2];
          }
        }
      };
      const bool drops = !kIsPlain && params.dropout.is_given();
      const Dropping<false> dropping(params, block.batch, block.head, seed);
      if constexpr (!kHasRoom) finish_output();  // the next weights take its registers
      uint32_t next[kSteps][4];
      auto& tried = kHasRoom ? next : weights;
      bool are_right = false;
      if (!kIsFirst && drops && softmax.is_settled) {
        are_right = softmax.template try_weights<T, kHasBias, true>(
            scores, tried, [&](int first, float (&some)[4][4]) {
              dropping.clear(some, 0, dropping.pairs(warp_query, tiles.key + 8 * first));
            });
      } else if (!kIsFirst && softmax.is_settled) {
        are_right = softmax.template try_weights<T, kHasBias, false>(scores, tried, [] {});
      }
      if (are_right) {
        release_bias();
        if constexpr (kHasRoom) {
          finish_output();
          // There are keys, which the compiler does not know: else it would have the next weights
          // in the same registers, and products would wait for each other.
          const uint32_t nothing = params.keys < 0;
#pragma unroll
          for (int i = 0; i < 4 * kSteps; ++i)
            weights[i / 4][i % 4] = xor_here(next[i / 4][i % 4], nothing);
        }
        return;
      }
      const float before[2] = {softmax.max[0][0], softmax.max[0][1]};
      factors[0] = factors[1] = 1.f;
      softmax.template weigh<kHasBias>(
          scores, [&](int, int half, float factor) { factors[half] = factor; });
      softmax.settle(before);
      release_bias();
      if constexpr (kHasRoom) finish_output();
      scale_output();
      if (drops) dropping.clear(scores, warp_query, tiles.key);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) as_matrix_a<T>(weights[step], scores[0], step);
    };

    if constexpr (kIsPlain) memory.queries_are_there().wait(done & 1);
    ++done;
    Tiles tiles = [&] {
      if constexpr (kIsPlain) {
        return Tiles(params, block, assigned, first_step);
      } else {
        return Tiles(assigned.first_key, first_step);
      }
    }();
    const auto advance = [&] {
      if constexpr (kIsPlain) {
        tiles.advance(params, block, assigned);
      } else {
        tiles.advance();
      }
    };
    const auto read_step = [&] {
      if constexpr (!kIsPlain) tiles.read(Memory::step(shared_memory, tiles.step % kStages));
    };
    // All lanes have waited: of a barrier that went on without a lane, that lane would wait for
    // ever. And all have read what is assigned.
    const auto release_by_all = [&](Barrier used) {
      __syncwarp();
      release(used);
    };
    // Goes past tiles that other warpgroups alone see, up to a key. They are there before it lets
    // go of them: else it would do so twice before others have once.
    const auto pass_tiles = [&](int until) {
      for (; tiles.are_left() && tiles.key < until; advance()) {
        const uint32_t stage = tiles.step % kStages;
        wait_for_my_turn();
        pass_my_turn();
        wait_for(keys_are_there, tiles.step);
        read_step();
        release_by_all(memory.keys_are_used(stage));
        if constexpr (kHasBias) {
          const int bias_stage = tiles.step % Memory::kBiasStages;
          memory.bias_is_there(bias_stage, warpgroup).wait(tiles.step / Memory::kBiasStages & 1);
          release_by_all(memory.bias_is_used(bias_stage, warpgroup));
        }
        wait_for(values_are_there, tiles.step);
        release_by_all(memory.values_are_used(stage));
      }
    };
    pass_tiles(seen.begin - kKeys + 1);
    // The compiler does not see that all lanes take the same steps: see go_to.
    const auto step_of = [](const Tiles& tiles) {
      return kIsPlain ? tiles.step : uniform(tiles.step);
    };
    const auto is_cut = [&] {
      return tiles.key < all_visible_begin || tiles.key > all_visible_end;
    };
    // The next queries take the place of the results of the tile before, which are on their way, or
    // of those of this tile.
    const auto wait_for_copy_of_results = [&] {
      if (lane == 0) wait_for_reads_of_stores();
    };
    const auto release_results_before = [&] {
      if constexpr (Memory::kQueryStages > 1) {
        wait_for_copy_of_results();
        release_by_all(memory.queries_are_used());
      }
    };
    if (tiles.are_left() && tiles.key < seen.end) {
      const uint32_t first = step_of(tiles);
      load_masked(tiles);
      wait_for(keys_are_there, first);
      wait_for_my_turn();
      start_scores(first % kStages);
      if constexpr (kLoadsBiasAhead) load_bias_ahead(tiles);
      if constexpr (kLoadsPairsAhead) load_pairs_ahead(tiles);
      read_step();
      Excluded<1, kN> excluded;
      const bool excludes = find_excluded(tiles, is_cut(), excluded);
      wait_for_products<0>();
      touch(scores[0]);
      pass_my_turn();
      release_results_before();
      weigh.template operator()<true>(tiles, excludes, excluded, [] {});
      for (advance(); tiles.are_left() && tiles.key < seen.end; advance()) {
        const uint32_t step = step_of(tiles), stage = step % kStages, before = step - 1;
        load_masked(tiles);
        wait_for(keys_are_there, step);
        wait_for_my_turn();
        start_scores(stage);
        wait_for(values_are_there, before);
        start_output(before % kStages);
        if constexpr (kLoadsBiasAhead) load_bias_ahead(tiles);
        if constexpr (kLoadsPairsAhead) load_pairs_ahead(tiles);
        read_step();
        Excluded<1, kN> excluded;
        const bool excludes = find_excluded(tiles, is_cut(), excluded);
        wait_for_products<1>();
        touch(scores[0]);
        pass_my_turn();
        weigh.template operator()<false>(tiles, excludes, excluded, [&] {
          wait_for_products<0>();
          touch(output[0]);
          release(memory.values_are_used(before % kStages));
        });
      }
      const uint32_t last = step_of(tiles) - 1;
      wait_for(values_are_there, last);
      start_output(last % kStages);
      wait_for_products<0>();
      touch(output[0]);
      release(memory.values_are_used(last % kStages));
    } else {
      release_results_before();
    }
    pass_tiles(INT32_MAX);
    if constexpr (!kIsPlain) release_by_all(memory.tile_is_done());
    const auto release_results = [&] {
      if constexpr (Memory::kQueryStages == 1) {
        wait_for_copy_of_results();
        release_by_all(memory.queries_are_used());
      }
    };
    first_step = uniform(tiles.step);

    const int64_t first_row = params.row_index(block.batch, head, warp_query);
    if (params.parts != nullptr) {
      // Found anew: it would take a register of the products.
      const int again = kIsPlain ? work.number() : number;
      const TileOfQueries anew(params, kQueries, static_cast<int>(unknown(again)));
      store_parts(params, anew.split, first_row + mine.row, warp_query + mine.row, output[0],
                  softmax.max[0], softmax.sum[0]);
      release_results();
      continue;
    }
    const float sink = sink_logit(params.sink, head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowEnd row_end(softmax.max[0][half], sum_of_row(softmax.sum[0][half]), sink,
                           params.can_exclude);
      const int row = mine.row + row_offset(0, 2 * half);
      if (mine.column == 0 && warp_query + row < params.queries)
        row_end.store(params, first_row + row);
      factors[half] = row_end.factor * (kIsPlain ? 1.f : params.dropout.factor);
    }
    sync_warpgroup(warpgroup);  // results of a warp take the place of queries of all warps
    const int results_at = Memory::queries_at(turn, warpgroup);
    const auto write_panel = [&]<int kN>(int panel) {
      store_to_tile<Tile<T, 64, 64>>(
          shared_memory + results_at + panel * Memory::kQueryPanelBytes, 16 * warp_in_group,
          reinterpret_cast<const float (&)[kN][4]>(output[0][8 * panel]), 0,
          [&](float first, float second, int half) {
            return round_pair<T>(first * factors[half], second * factors[half]);
          });
    };
#pragma unroll
    for (int panel = 0; panel < kColumns / 8; ++panel) write_panel.template operator()<8>(panel);
    if constexpr (kColumns % 8 != 0) write_panel.template operator()<kColumns % 8>(kColumns / 8);
    publish_writes();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int panel = 0; panel < Memory::kValuePanels; ++panel)
        start_store_of_box(maps.output,
                           memory.address + results_at + panel * Memory::kQueryPanelBytes +
                               16 * warp_in_group * 128,
                           64 * panel, warp_query, head, block.batch);
      end_stores();
    }
    release_results();
  }
  if (lane == 0) wait_for_reads_of_stores();
#endif
}

}  // namespace megasoftmax
