#pragma once
// Shared memory of a block of forward_heads.cuh, and what the block takes.

#include "../../bias.cuh"
#include "../../limits.h"
#include "../plan.h"
#include "../ptx.cuh"
#include "../rows_of_keys.cuh"
#include "../tensor_map.h"

namespace megasoftmax {

// Boxes of all columns: 128 queries or keys, and of the output the 16 queries of a warp.
struct HeadsForwardMaps {
  CUtensorMap query, key, value, output;
};

// A stage of a ring that is filled again and again, and which parity that has for the barriers.
template <int kStages>
struct StageInTurn {
  int stage = 0, parity = 0;

  // Of the copy with this number.
  __device__ static StageInTurn of(int number) { return {number % kStages, number / kStages & 1}; }
  __device__ StageInTurn next() const {
    return stage + 1 == kStages ? StageInTurn{0, parity ^ 1} : StageInTurn{stage + 1, parity};
  }
  __device__ int before() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

template <bool kHasMask, int kIndex>
struct HopperHeadsForwardMemory {
  static constexpr AttentionHopperHeadsForwardTile kTile =
      kAttentionHopperHeadsForwardTiles[kIndex];
  static constexpr int kWarps = 4 * kTile.warpgroups, kStages = kTile.stages;
  static constexpr int kDim = kTile.head_dim, kRowBytes = 2 * kDim;
  static constexpr int kQueries = kTile.queries(), kBox = 128;
  static constexpr bool kIsWhole = !kTile.halves_bias;
  // A warp of its own writes what a mask excludes, or the copying warp does.
  static constexpr bool kHasMaskWarp = kHasMask && kIsWhole,
                        kCopierWritesMask = kHasMask && !kIsWhole;
  static constexpr int kKeys = kTile.stage_keys(), kCopies = kTile.keys / kKeys;
  static constexpr int kSteps = kKeys / kTile.step_keys;  // of a stage
  static_assert(kKeys % kBox == 0 && kQueries == kBox && kSteps % 2 == 0);
  // A copy is there before the one before the last is given back.
  static_assert(kIsWhole || (kStages > 2 && kStages <= kCopies + 1));
  static_assert(shares_registers(kTile));

  // Of each stage keys, values, and what a mask of keys excludes, as HopperMemory has it; before
  // them queries, if it is a whole head, else two stages of queries; half of the bias; ones;
  // results of each warp; barriers; of each stage of queries whether the mask excludes all keys.
  static constexpr int kQueryBytes = kQueries * kRowBytes, kKeyBytes = kKeys * kRowBytes;
  static constexpr int kMaskedPanelBytes = 16 * 128, kOnesBytes = kHasMask ? 8 * 128 : 0;
  static constexpr int kMaskedBytes = kHasMask ? kKeys / 64 * kMaskedPanelBytes : 0;
  static constexpr int kStageBytes = (kIsWhole ? kQueryBytes : 0) + 2 * kKeyBytes + kMaskedBytes;
  // A stage that is filled again was used after the end of the member before the last one.
  static constexpr int kQueryStages = kIsWhole ? kStages : 2;
  static constexpr int kQueriesAt = kIsWhole ? 0 : kStages * kStageBytes;
  static constexpr int kQueryStageBytes = kIsWhole ? kStageBytes : kQueryBytes;
  // Of each step and warp vectors of four words for each lane.
  static constexpr int kBiasVectors = kTile.step_keys / 32;
  static constexpr int kBiasStepBytes = kWarps * kBiasVectors * 32 * 16;
  static constexpr int kBiasAt =
      kStages * kStageBytes + (kIsWhole ? 0 : kQueryStages * kQueryBytes);
  static constexpr int kOnesAt = kBiasAt + (kIsWhole ? 0 : kCopies * kSteps * kBiasStepBytes);
  static constexpr int kResultsAt = kOnesAt + kOnesBytes;
  static constexpr int kResultBytes = 16 * kRowBytes;
  static constexpr int kBarriersAt = kResultsAt + kWarps * kResultBytes;
  static constexpr int kFlagsAt = kBarriersAt + 8 * 2 * kStages;
  static constexpr int kBytes = kFlagsAt + kQueryStages * static_cast<int>(sizeof(int));
  static_assert(kBytes <= least_shared_bytes(kHopperMajor, kHopperMajor));

  uint32_t address;

  __device__ uint32_t queries(int stage) const {
    return address + kQueriesAt + stage * kQueryStageBytes;
  }
  __device__ uint32_t keys(int stage) const {
    return address + stage * kStageBytes + (kIsWhole ? kQueryBytes : 0);
  }
  __device__ uint32_t values(int stage) const { return keys(stage) + kKeyBytes; }
  __device__ uint32_t masked(int stage) const { return values(stage) + kKeyBytes; }
  __device__ uint32_t bias(int warp, int lane) const {
    return address + kBiasAt + (warp * kBiasVectors * 32 + lane) * 16;
  }
  __device__ uint32_t ones() const { return address + kOnesAt; }
  __device__ uint32_t results(int warp) const { return address + kResultsAt + warp * kResultBytes; }
  __device__ static int query_stage(int number) { return number % kQueryStages; }
  __device__ static int& sees_nothing(char* memory, int query_stage) {
    return reinterpret_cast<int*>(memory + kFlagsAt)[query_stage];
  }
  __device__ Barrier stage_is_there(int stage) const { return {address + kBarriersAt + 8 * stage}; }
  __device__ Barrier stage_is_used(int stage) const {
    return {address + kBarriersAt + 8 * (kStages + stage)};
  }
  // Called by one thread before others use the barriers.
  __device__ void init_barriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      stage_is_there(stage).init(kHasMaskWarp ? 2 : 1);  // so many warps fill it
      stage_is_used(stage).init(kWarps);
    }
    publish_barriers();
  }
  // Called by all threads of the block before others use the mask.
  template <class T>
  __device__ void init_mask() const {
    if constexpr (kHasMask) {
      const int thread = thread_index_anew();
      for (int stage = 0; stage < kStages; ++stage) {
        for (int at = 16 * thread; at < kMaskedBytes; at += 16 * kTile.threads())
          store_four(masked(stage) + at, {0, 0, 0, 0});
      }
      RowsOfKeys<T, kBox, false>::store_ones(ones());
      publish_writes();
    }
  }
};

// What a block takes: a tile of queries of the members of a part. Blocks that follow each other
// take the same members. Of some entries of the bias the members are cut into one more part than
// those of the others (units_of_members), whose larger blocks begin first.
template <class Memory>
struct WorkOfHeads {
  int first_query;
  BiasMembers members;

  __device__ explicit WorkOfHeads(const AttentionParams& params)
      : WorkOfHeads(params, divide_up(params.queries, Memory::kQueries)) {}
  __device__ int count() const { return members.end - members.begin; }
  __device__ void place(const AttentionParams& params, int number, int& batch, int& head) const {
    members.place(params, members.begin + number, batch, head);
  }

 private:
  __device__ WorkOfHeads(const AttentionParams& params, int tiles)
      : first_query(static_cast<int>(blockIdx.x) % tiles * Memory::kQueries),
        members(members_of(params, static_cast<int>(blockIdx.x) / tiles,
                           static_cast<int>(gridDim.x) / tiles)) {}
  __device__ static BiasMembers members_of(const AttentionParams& params, int unit, int units) {
    const int entries = BiasMembers::entries(params), parts = units / entries;
    const int of_more = units % entries, of_fewer = entries - of_more;
    const int others = unit - of_fewer * parts;
    return others < 0 ? BiasMembers(params, of_more + unit % of_fewer, unit / of_fewer, parts)
                      : BiasMembers(params, others % of_more, others / of_more, parts + 1);
  }
};

}  // namespace megasoftmax
