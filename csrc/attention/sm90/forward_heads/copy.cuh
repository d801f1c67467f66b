#pragma once
// The warps of forward_heads.cuh that fill its stages: one copies, and one writes masks of whole
// heads. Beside a ring of keys the copying warp writes the mask, too.

#include "memory.cuh"

namespace megasoftmax {

// What a mask of keys excludes of a member, as rows of a product. Called by a warp.
template <class T, class Memory>
class MaskOfMember {
  using Rows = RowsOfKeys<T, Memory::kBox, false>;
  static constexpr int kBoxes = Memory::kKeys / Memory::kBox;
  static constexpr int kBoxBytes = Memory::kBox / 64 * Memory::kMaskedPanelBytes;
  static_assert(kBoxes * Rows::kOfLane <= 32);

 public:
  // Loads the mask of the keys of a copy, from `first_key` on.
  __device__ void load(const AttentionForwardParams& params, int batch, int head, int first_key) {
    excluded_ = ~0u;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int key = first_key + Memory::kBox * box, left = params.keys - key - Rows::first();
      if (key >= params.keys) continue;
      Rows rows;
      rows.load(params, batch, head, key);
      const uint32_t visible =
          ~rows.excluded(params) & ((1u << min(max(left, 0), Rows::kOfLane)) - 1);
      excluded_ &= ~(visible << Rows::kOfLane * box);
    }
    sees_nothing_ &= excluded_ == ~0u;
  }
  // Writes what was loaded last to a stage, and whether the member with this number has no visible
  // key so far.
  __device__ void store(const Memory& memory, int stage, int number) const {
    extern __shared__ __align__(1024) char shared_memory[];
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      Rows::store_excluded(excluded_ >> Rows::kOfLane * box, memory.masked(stage) + kBoxBytes * box,
                           Memory::kMaskedPanelBytes);
    const bool sees_nothing = __all_sync(~0u, sees_nothing_);
    if (threadIdx.x % 32 == 0)
      Memory::sees_nothing(shared_memory, Memory::query_stage(number)) = sees_nothing;
    publish_writes();
    __syncwarp();  // all lanes have written theirs
  }

 private:
  uint32_t excluded_;  // Rows::kOfLane bits of each box
  bool sees_nothing_ = true;
};

// The copying warp.
template <class T, class Memory>
__device__ __forceinline__ void copy_members(const AttentionForwardParams& params,
                                             const HeadsForwardMaps& maps, const Memory& memory) {
  constexpr int kBox = Memory::kBox, kBoxes = Memory::kKeys / kBox;
  const WorkOfHeads<Memory> work(params);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  StageInTurn<Memory::kStages> turn;
  for (int number = 0; number < work.count(); ++number) {
    int batch, head, key_head, rest;
    work.place(params, number, batch, head);
    params.heads_per_key_head.split(head, key_head, rest);
    [[maybe_unused]] MaskOfMember<T, Memory> mask;
    for (int copy = 0; copy < Memory::kCopies; ++copy, turn = turn.next()) {
      const int stage = turn.stage, first_key = copy * Memory::kKeys;
      __syncwarp();  // lanes wait for the same phases
      memory.stage_is_used(stage).wait(turn.parity ^ 1);
      if constexpr (Memory::kCopierWritesMask) {
        mask.load(params, batch, head, first_key);
        mask.store(memory, stage, number);
      }
      if (lane != 0) continue;
      const Barrier there = memory.stage_is_there(stage);
      there.arrive_and_expect((copy == 0 ? Memory::kQueryBytes : 0) + 2 * Memory::kKeyBytes);
      if (copy == 0)
        start_copy_of_box(memory.queries(Memory::query_stage(number)), maps.query, there, 0,
                          work.first_query, head, batch);
      for (int box = 0; box < kBoxes; ++box)
        start_copy_of_box(memory.keys(stage) + kBox * Memory::kRowBytes * box, maps.key, there, 0,
                          first_key + kBox * box, key_head, batch);
      for (int box = 0; box < kBoxes; ++box)
        start_copy_of_box(memory.values(stage) + kBox * Memory::kRowBytes * box, maps.value, there,
                          0, first_key + kBox * box, key_head, batch);
    }
  }
}

// The warp that writes masks of whole heads. It loads a member's before it waits for the stage, so
// no copy waits for it.
template <class T, class Memory>
__device__ __forceinline__ void write_masks(const AttentionForwardParams& params,
                                            const Memory& memory) {
  const WorkOfHeads<Memory> work(params);
  StageInTurn<Memory::kStages> turn;
  for (int number = 0; number < work.count(); ++number, turn = turn.next()) {
    int batch, head;
    work.place(params, number, batch, head);
    MaskOfMember<T, Memory> mask;
    mask.load(params, batch, head, 0);
    __syncwarp();  // lanes wait for the same phases
    memory.stage_is_used(turn.stage).wait(turn.parity ^ 1);
    mask.store(memory, turn.stage, number);
    if (threadIdx.x % 32 == 0) memory.stage_is_there(turn.stage).arrive();
  }
}

}  // namespace megasoftmax
