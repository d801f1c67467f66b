#pragma once
// dB of a bias that batches or heads share, on Hopper, in float32 and always in the same order. As
// in sm80/bias_gradient_in_order.cuh a block owns a tile of the bias, keeps its sums in registers
// and takes its members one after the other, in parts. Above a head dimension of 32 blocks are
// persistent: the first members of the next tile are copied while sums of a tile are stored.
//
// One warp copies what a member has for the tile. Each of the other warpgroups has 64 queries and
// all keys, at first 64 of them, then the others. Queries are in rows, so a lane needs the
// statistics of two rows.

#include "../../common/math.cuh"
#include "../bias.cuh"
#include "../limits.h"
#include "../params.h"
#include "plan.h"
#include "ptx.cuh"
#include "tensor_map.h"

namespace megasoftmax {

template <int kIndex>
struct HopperBiasGradientMemory {
  static constexpr AttentionHopperBiasGradientTile kTile =
      kAttentionHopperBiasGradientTiles[kIndex];
  static constexpr int kWarpgroups = kTile.warpgroups, kStages = kTile.stages;
  static constexpr int kDim = kTile.head_dim;
  static constexpr int kQueries = kTile.queries(), kKeys = kTile.keys();
  static_assert(kKeys > 64 && kKeys <= 128 && kKeys % 16 == 0);
  static constexpr int kRowBytes = 2 * kDim;

  // In this order: the bias of each warpgroup in panels of 64 queries and keys; queries, gradients
  // of outputs, keys and values of each stage; rows, and bits of a mask, of each stage; barriers.
  static constexpr int kPanelBytes = 64 * 128, kBiasBytes = 2 * kWarpgroups * kPanelBytes;
  static constexpr int kQueryBytes = kQueries * kRowBytes, kKeyBytes = kKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * (kQueryBytes + kKeyBytes);
  static constexpr int kRowsBytes = kQueries * static_cast<int>(sizeof(RowOfBackward));
  // Bits of a mask are copied 16 bytes at a time, those of 128 keys.
  static constexpr int kKeysOfCopy = 128, kBytesOfCopy = kKeysOfCopy / 8;
  static constexpr int kBitBytes = kBytesOfCopy * (kKeys % kKeysOfCopy == 0 ? 1 : 2);
  static constexpr int kRowsAt = kBiasBytes + kStages * kStageBytes;
  static constexpr int kBitsAt = kRowsAt + kStages * kRowsBytes;
  static constexpr int kBarriersAt = kBitsAt + kStages * kBitBytes;
  static constexpr int kBytes = kBarriersAt + 8 * (2 + 2 * kStages);
  static_assert(kBytes <= least_shared_bytes(kHopperMajor, kHopperMajor));

  // Keys of a half, in groups of eight.
  static constexpr int eights(int half) { return half == 0 ? 8 : (kKeys - 64) / 8; }

  uint32_t address;

  __device__ uint32_t bias(int warpgroup, int half) const {
    return address + (2 * warpgroup + half) * kPanelBytes;
  }
  __device__ uint32_t queries(int stage) const {
    return address + kBiasBytes + stage * kStageBytes;
  }
  __device__ uint32_t gradients(int stage) const { return queries(stage) + kQueryBytes; }
  __device__ uint32_t keys(int stage) const { return gradients(stage) + kQueryBytes; }
  __device__ uint32_t values(int stage) const { return keys(stage) + kKeyBytes; }
  __device__ uint32_t rows(int stage) const { return address + kRowsAt + stage * kRowsBytes; }
  __device__ uint32_t bits(int stage) const { return address + kBitsAt + stage * kBitBytes; }
  __device__ Barrier barrier(int index) const { return {address + kBarriersAt + 8 * index}; }
  __device__ Barrier bias_is_there() const { return barrier(0); }
  __device__ Barrier bias_is_used() const { return barrier(1); }
  __device__ Barrier stage_is_there(int stage) const { return barrier(2 + stage); }
  __device__ Barrier stage_is_used(int stage) const { return barrier(2 + kStages + stage); }

  // Called by one thread before others use the barriers.
  __device__ void init_barriers() const {
    bias_is_there().init(1);
    bias_is_used().init(4 * kWarpgroups);
    for (int stage = 0; stage < kStages; ++stage) {
      stage_is_there(stage).init(1);
      stage_is_used(stage).init(4 * kWarpgroups);
    }
    publish_barriers();
  }
};

// A tile and a part of its members. Tiles of a head lie side by side: blocks that run at a time
// read the same members.
template <class Memory>
struct TileOfBias {
  const int index, key_tiles, tiles_of_entry, tile, first_query, first_key;
  const BiasMembers members;

  __device__ TileOfBias(const AttentionBackwardParams& params, int index)
      : index(index),
        key_tiles(divide_up(params.keys, Memory::kKeys)),
        tiles_of_entry(key_tiles * divide_up(params.queries, Memory::kQueries)),
        tile(index % tiles_of_entry),
        first_query(tile / key_tiles * Memory::kQueries),
        first_key(tile % key_tiles * Memory::kKeys),
        members(params, index / tiles_of_entry) {}
  // Parts of all tiles.
  __host__ __device__ static int64_t count(const AttentionBackwardParams& params) {
    return params.bias_parts * params.bias_batches() * params.bias_heads() *
           divide_up(params.queries, Memory::kQueries) * divide_up(params.keys, Memory::kKeys);
  }
};

// Calls take(tile, round, is_last) for each tile of this block. `round` is its number, from 0 on.
// Blocks that are not persistent have one tile.
template <class Memory, class Take>
__device__ __forceinline__ void for_each_tile(const AttentionBackwardParams& params, Take&& take) {
  int index = static_cast<int>(blockIdx.x);
  if constexpr (Memory::kTile.is_persistent()) {
    const int tiles = static_cast<int>(TileOfBias<Memory>::count(params));
#pragma unroll 1
    for (uint32_t round = 0; index < tiles; ++round) {
      const int next = index + static_cast<int>(gridDim.x);
      take(TileOfBias<Memory>(params, index), round, next >= tiles);
      index = next;
    }
  } else {
    take(TileOfBias<Memory>(params, index), 0, true);
  }
}

// The copying thread.
template <class Memory>
__device__ __forceinline__ void copy_members(const AttentionBackwardParams& params,
                                             const NarrowTensorMaps& maps, const Memory& memory) {
  const bool has_mask = params.block_mask.words != nullptr;
  // Counts members of all tiles. Each part has at least one, which others wait for.
  int step = 0;
  for_each_tile<Memory>(params, [&](const TileOfBias<Memory>& tile, uint32_t round, bool) {
    const BiasMembers& members = tile.members;
    const int query = tile.first_query, key = tile.first_key;
    const int row_bytes =
        min(Memory::kQueries, params.queries - query) * static_cast<int>(sizeof(RowOfBackward));
    const int first_copy = key / Memory::kKeysOfCopy;
    const int last_copy = (min(key + Memory::kKeys, params.keys) - 1) / Memory::kKeysOfCopy;
    const int bit_bytes = has_mask ? Memory::kBytesOfCopy * (last_copy - first_copy + 1) : 0;
    for (int member = members.begin; member < members.end; ++member, ++step) {
      int batch, head, key_head, rest;
      members.place(params, member, batch, head);
      params.heads_per_key_head.split(head, key_head, rest);
      const int stage = step % Memory::kStages;
      memory.stage_is_used(stage).wait((step / Memory::kStages & 1) ^ 1);
      const Barrier there = memory.stage_is_there(stage);
      there.arrive_and_expect(Memory::kStageBytes + row_bytes + bit_bytes);
      start_copy_of_box(memory.queries(stage), maps.query, there, 0, query, head, batch);
      start_copy_of_box(memory.keys(stage), maps.key, there, 0, key, key_head, batch);
      start_copy_of_box(memory.gradients(stage), maps.output_gradient, there, 0, query, head,
                        batch);
      start_copy_of_box(memory.values(stage), maps.value, there, 0, key, key_head, batch);
      start_copy_of_bytes(memory.rows(stage),
                          params.rows_of_backward + params.row_index(batch, head, query), row_bytes,
                          there);
      if (has_mask)
        start_copy_of_bytes(memory.bits(stage),
                            params.block_mask.of(batch, head) + params.block_mask.layout.bits() +
                                first_copy * (Memory::kKeysOfCopy / 32),
                            bit_bytes, there);
      if (member > members.begin) continue;
      // The place of the bias is taken until the tile before ends.
      if constexpr (Memory::kTile.is_persistent()) memory.bias_is_used().wait((round & 1) ^ 1);
      memory.bias_is_there().arrive_and_expect(Memory::kBiasBytes);
      for (int i = 0; i < 2 * Memory::kWarpgroups; ++i)
        start_copy_of_box(memory.bias(i / 2, i % 2), maps.bias, memory.bias_is_there(),
                          key + 64 * (i % 2), query + 64 * (i / 2), members.head, members.batch);
    }
  });
}

// A warpgroup with 64 queries and all keys of a tile.
template <class T, bool kMasksKeys, class Memory>
__device__ __forceinline__ void sum_members(const AttentionBackwardParams& params,
                                            const Memory& memory, int warpgroup) {
  constexpr int kRowBytes = Memory::kRowBytes, kHalfBytes = 64 * kRowBytes;
  // With registers for it, products of the second half run while the first one is added. With a
  // third stage those of the next step also run while the second half is added. With a mask that
  // gained nothing.
  constexpr int kBuffers = Memory::kTile.registers > 160 ? 2 : 1;
  constexpr bool kStartsNextStep = kBuffers == 2 && Memory::kStages > 2 && !kMasksKeys;
  extern __shared__ __align__(1024) char shared_memory[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const FirstElement mine;
  using Panel = Tile<T, 64, 64>;

  float weights[kBuffers][8][4], gradients[kBuffers][8][4], sums[2][8][4];
  const auto start = [&]<int kHalf>(int step) {
    const int stage = step % Memory::kStages;
    using Part = float (&)[Memory::eights(kHalf)][4];
    constexpr int kBuffer = kHalf % kBuffers;
    const auto at = [](uint32_t rows) {
      return kRowBytes == 64 ? narrow_matrix_at(rows) : matrix_at(rows, 16);
    };
    const auto own = [&](uint32_t rows) { return at(rows + warpgroup * kHalfBytes); };
    begin_products();
    start_product_of_rows<T, Memory::kDim>(reinterpret_cast<Part>(weights[kBuffer]),
                                           own(memory.queries(stage)), 0,
                                           at(memory.keys(stage) + kHalf * kHalfBytes), 0);
    start_product_of_rows<T, Memory::kDim>(reinterpret_cast<Part>(gradients[kBuffer]),
                                           own(memory.gradients(stage)), 0,
                                           at(memory.values(stage) + kHalf * kHalfBytes), 0);
    end_products();
  };
  RowOfBackward rows[2];  // of the member at hand
  // Whether all deltas are finite and, with a mask, all maxima are 0: offsets have them then.
  bool are_plain = false;
  const auto load_rows = [&](int stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      rows[half] = reinterpret_cast<const RowOfBackward*>(
          shared_memory + Memory::kRowsAt +
          stage * Memory::kRowsBytes)[64 * warpgroup + 16 * warp + mine.row + 8 * half];
    const auto is_plain = [](const RowOfBackward& row) {
      return fabsf(row.delta) < INFINITY && (!kMasksKeys || row.max == 0.f);
    };
    are_plain = __all_sync(~0u, is_plain(rows[0]) && is_plain(rows[1])) != 0;
  };
  int first_bit = 0;  // of the first key of a tile, in the copied words
  const auto add = [&]<int kHalf>(int stage) {
    constexpr int kBuffer = kHalf % kBuffers;
    constexpr int kN = Memory::eights(kHalf);
    touch(reinterpret_cast<float (&)[kN][4]>(weights[kBuffer]));
    touch(reinterpret_cast<float (&)[kN][4]>(gradients[kBuffer]));
    [[maybe_unused]] uint32_t bits[2] = {};
    if constexpr (kMasksKeys) {
      const int at = first_bit + 64 * kHalf;
      const auto* const words = reinterpret_cast<const uint32_t*>(
          shared_memory + Memory::kBitsAt + stage * Memory::kBitBytes + at / 32 * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        bits[i] =
            Memory::kKeys % 32 == 0 ? words[i] : __funnelshift_r(words[i], words[i + 1], at % 32);
      if ((bits[0] & bits[1]) == ~0u) return;  // no key is visible
    }
    [[maybe_unused]] const bool excludes_keys = kMasksKeys && (bits[0] | bits[1]) != 0;
    bits[0] >>= mine.column;
    bits[1] >>= mine.column;
    const auto is_visible = [&](int n, int i) {
      return !kMasksKeys || (bits[n / 4] >> (n % 4 * 8 + i % 2) & 1) == 0;
    };
    const auto weigh = [&]<bool kHasMax>() {
      add_bias(reinterpret_cast<Accumulators<1, kN>&>(weights[kBuffer]), params.logit_scale,
               TileBias<T, false, Panel>({memory.bias(warpgroup, kHalf)}, 16 * warp, 0));
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i) gradients[kBuffer][i / 4][i % 4] -= rows[i % 4 / 2].delta;
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i) {
        const RowOfBackward& row = rows[i % 4 / 2];
        float& weight = weights[kBuffer][i / 4][i % 4];
        const float relative = kHasMax ? weight - row.max : weight;
        weight = exp2_approximate(fmaf(relative, kLog2E, -row.log2_sum));
      }
    };
    // Adds entries for which counts(n, i) is true.
    const auto add_if = [&](auto&& counts) {
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i) {
        float& sum = sums[kHalf][i / 4][i % 4];
        if (counts(i / 4, i % 4))
          sum = fmaf(weights[kBuffer][i / 4][i % 4], gradients[kBuffer][i / 4][i % 4], sum);
      }
    };
    const auto is_any = [](int, int) { return true; };
    // The score of a weight of 0 has gradient 0, even if the gradient of the weight is not finite.
    const auto is_counted = [&](int n, int i) {
      return is_visible(n, i) && weights[kBuffer][n][i] != 0.f;
    };
    // With a mask the branch comes before the weights, so that the compiler fills waits of weights
    // with instructions of sums. Without one that takes 5 to 11% longer in most shapes.
    if constexpr (!kMasksKeys) {
      weigh.template operator()<true>();
      are_plain ? add_if(is_any) : add_if(is_counted);
    } else if (!are_plain) {
      weigh.template operator()<true>();
      add_if(is_counted);
    } else if (excludes_keys) {
      weigh.template operator()<false>();
      add_if(is_visible);
    } else {
      weigh.template operator()<false>();
      add_if(is_any);
    }
  };

  const auto wait_for_stage = [&](int step) {
    memory.stage_is_there(step % Memory::kStages).wait(step / Memory::kStages & 1);
  };
  const auto store = [&]<class Out>(const TileOfBias<Memory>& tile, Out* entries) {
    const BiasMembers& members = tile.members;
    const int64_t pitch = params.bias_pitch();
    entries += (members.batch * params.bias_heads() + members.head) * params.queries * pitch;
#pragma unroll
    for (int i = 0; i < Memory::kKeys / 2; i += 2) {
      const int half = i / 32, n = i / 4 % 8, j = i % 4;
      const int query = tile.first_query + 64 * warpgroup + 16 * warp + mine.row + 4 * j;
      const int key = tile.first_key + 64 * half + 8 * n + mine.column;
      const float pair[] = {sums[half][n][j], sums[half][n][j + 1]};
      if (query < params.queries && key < pitch)
        *reinterpret_cast<Pack<Out, 2>*>(entries + query * pitch + key) = Pack<Out, 2>::round(pair);
    }
  };
  int step = 0;  // of all tiles
  if constexpr (kStartsNextStep) {
    wait_for_stage(0);
    start.template operator()<0>(0);
  }
  for_each_tile<Memory>(params, [&](const TileOfBias<Memory>& tile, uint32_t round, bool is_last) {
    const int end = step + tile.members.end - tile.members.begin;
    if constexpr (Memory::kKeys % Memory::kKeysOfCopy != 0)
      first_bit = tile.first_key % Memory::kKeysOfCopy;
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i / 32][i / 4 % 8][i % 4] = 0.f;
    memory.bias_is_there().wait(round & 1);
    // The first step of the next tile is copied, too.
    [[maybe_unused]] const int end_of_copies = is_last ? end : end + 1;
#pragma unroll 1
    for (; step < end; ++step) {
      const int stage = step % Memory::kStages;
      if constexpr (kStartsNextStep) {
        wait_for_products<0>();
      } else {
        wait_for_stage(step);
        start.template operator()<0>(step);
      }
      if constexpr (kBuffers == 2) start.template operator()<1>(step);
      load_rows(stage);  // while products run
      if constexpr (!kStartsNextStep) wait_for_products<kBuffers - 1>();
      add.template operator()<0>(stage);
      if constexpr (kBuffers == 1) start.template operator()<1>(step);
      wait_for_products<0>();
      if constexpr (kStartsNextStep) {  // after the last tile: products that nobody reads
        if (step + 1 < end_of_copies) wait_for_stage(step + 1);
        start.template operator()<0>(step + 1);
      }
      add.template operator()<1>(stage);
      __syncwarp();  // all lanes have read its rows
      if (lane == 0) memory.stage_is_used(stage).arrive();
    }
    if constexpr (Memory::kTile.is_persistent()) {
      touch(sums[0]);  // made before the place of the bias is free
      touch(sums[1]);
      __syncwarp();
      if (lane == 0) memory.bias_is_used().arrive();
    } else {
      wait_for_products<0>();  // that nobody reads
    }
    const TileOfBias<Memory> anew(params, unknown(tile.index));  // not kept in registers until here
    params.bias_parts > 1 ? store(anew, params.bias_part(anew.members.part))
                          : store(anew, static_cast<T*>(params.bias_gradient));
  });
  wait_for_products<0>();  // of persistent blocks
}

template <class T, bool kMasksKeys, int kIndex>
__global__ void __launch_bounds__(kAttentionHopperBiasGradientTiles[kIndex].threads(), 1)
    attention_hopper_bias_gradient_kernel(const __grid_constant__ AttentionBackwardParams params,
                                          const __grid_constant__ NarrowTensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Memory = HopperBiasGradientMemory<kIndex>;
  extern __shared__ __align__(1024) char shared_memory[];
  const Memory memory{shared_address(shared_memory)};
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128)) - 1;
  if (threadIdx.x == 0) memory.init_barriers();
  __syncthreads();
  if (warpgroup < 0) {
    give_registers<Memory::kTile.copier_registers()>();
    if (threadIdx.x == 0) copy_members(params, maps, memory);
    return;
  }
  take_registers<Memory::kTile.registers>();
  sum_members<T, kMasksKeys>(params, memory, warpgroup);
#endif
}

}  // namespace megasoftmax
