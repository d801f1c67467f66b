#pragma once
// dB of a bias that batches or heads share, on Hopper, in float32 and always in the same order. As
// in sm80/bias_gradient_in_order.cuh a block owns a tile of the bias, keeps its sums in registers
// and takes its members one after the other, in parts. Above a head dimension of 32 blocks are
// persistent: the first members of the next tile are copied while sums of a tile are stored.
//
// One thread copies what a member has for the tile. Each of the other warpgroups has 64 queries and
// all keys, at first 64 of them, then the others. Queries are in rows, so a lane needs the
// statistics of two rows. With HopperMask::kAny, which stands for causality and windows too, each
// thread of the copying warpgroup also writes which keys a query does not see. Tiles that no query
// sees get zeros at the end, and members whose block mask has no visible pair in a tile are not
// copied.

#include <utility>

#include "../../common/math.cuh"
#include "../bias.cuh"
#include "../dropping.cuh"
#include "../exclusion.cuh"
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
  // of outputs, keys and values of each stage; rows, bits of excluded keys, and the batch and head
  // of the member, of each stage; barriers.
  static constexpr int kPanelBytes = 64 * 128, kBiasBytes = 2 * kWarpgroups * kPanelBytes;
  static constexpr int kQueryBytes = kQueries * kRowBytes, kKeyBytes = kKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * (kQueryBytes + kKeyBytes);
  static constexpr int kRowsBytes = kQueries * static_cast<int>(sizeof(RowOfBackward));
  // Bits of a mask of keys are copied 16 bytes at a time, those of 128 keys. With HopperMask::kAny
  // each query has so many bytes.
  static constexpr int kKeysOfCopy = 128, kBytesOfCopy = kKeysOfCopy / 8;
  static constexpr int kBitBytes = kBytesOfCopy * (kTile.takes_any_mask()     ? kQueries
                                                   : kKeys % kKeysOfCopy == 0 ? 1
                                                                              : 2);
  static constexpr int kRowsAt = kBiasBytes + kStages * kStageBytes;
  static constexpr int kBitsAt = kRowsAt + kStages * kRowsBytes;
  static constexpr int kMembersAt = kBitsAt + kStages * kBitBytes;
  static constexpr int kBarriersAt = kMembersAt + kStages * static_cast<int>(sizeof(int2));
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
  // With HopperMask::kAny: the batch and head of the member of a stage, or -1 after the last one.
  __device__ static int2& member(char* shared_memory, int stage) {
    return reinterpret_cast<int2*>(shared_memory + kMembersAt)[stage];
  }
  __device__ Barrier barrier(int index) const { return {address + kBarriersAt + 8 * index}; }
  __device__ Barrier bias_is_there() const { return barrier(0); }
  __device__ Barrier bias_is_used() const { return barrier(1); }
  __device__ Barrier stage_is_there(int stage) const { return barrier(2 + stage); }
  __device__ Barrier stage_is_used(int stage) const { return barrier(2 + kStages + stage); }

  // Called by one thread before others use the barriers. `fillers`: how many arrive when they have
  // filled a stage.
  __device__ void init_barriers(int fillers) const {
    bias_is_there().init(1);
    bias_is_used().init(4 * kWarpgroups);
    for (int stage = 0; stage < kStages; ++stage) {
      stage_is_there(stage).init(fillers);
      stage_is_used(stage).init(4 * kWarpgroups);
    }
    publish_barriers();
  }
};

// A tile and a part of its members. Tiles of a head lie side by side: blocks that run at a time
// read the same members. kInWindow: tile `index` of those that some query sees, else of all.
template <class Memory, bool kInWindow = false>
struct TileOfBias {
  const int index, tiles_of_entry;
  const int2 place;
  const int first_query, first_key;
  const BiasMembers members;

  __device__ TileOfBias(const AttentionBackwardParams& params, int index)
      : index(index),
        tiles_of_entry(static_cast<int>(count_of_entry(params))),
        place(first_entry_of(params, index % tiles_of_entry)),
        first_query(place.x),
        first_key(place.y),
        members(params, index / tiles_of_entry) {}
  // Parts of all tiles.
  __host__ __device__ static int64_t count(const AttentionBackwardParams& params) {
    return params.bias_parts * params.bias_batches() * params.bias_heads() * count_of_entry(params);
  }
  // Whether some of its queries see some of its keys, by length and window.
  __device__ bool is_in_window(const AttentionParams& params) const {
    return visible_tiles(params, first_query, Memory::kQueries, Memory::kKeys)
        .contains(first_key / Memory::kKeys);
  }
  // Whether all of its queries see all of its keys, by length and window.
  __device__ bool is_whole(const AttentionParams& params) const {
    const int last_query = first_query + Memory::kQueries - 1;
    return last_query < params.queries &&
           visible_keys(params, first_query).end >= first_key + Memory::kKeys &&
           visible_keys(params, last_query).begin <= first_key;
  }
  // Whether a member has a visible pair in it, by the block mask.
  __device__ bool has_visible_pair(const AttentionParams& params, int batch, int head) const {
    static_assert(Memory::kKeys == 2 * kMaskTile);
    bool is_visible = params.block_mask.words == nullptr;
    for (int i = 0; i < 2 * Memory::kQueries / kMaskTile && !is_visible; ++i)
      is_visible = is_seen(params, batch, head, first_query / kMaskTile + i / 2,
                           first_key / kMaskTile + i % 2);
    return is_visible;
  }

 private:
  __host__ __device__ static int64_t count_of_entry(const AttentionParams& params) {
    if constexpr (kInWindow) return count_visible_tiles(params, Memory::kQueries, Memory::kKeys);
    return int64_t{divide_up(params.queries, Memory::kQueries)} *
           divide_up(params.keys, Memory::kKeys);
  }
  // The first query and key of a tile.
  __device__ static int2 first_entry_of(const AttentionParams& params, int tile) {
    if constexpr (!kInWindow) {
      const int key_tiles = divide_up(params.keys, Memory::kKeys);
      return {tile / key_tiles * Memory::kQueries, tile % key_tiles * Memory::kKeys};
    }
    for (int query = 0;; query += Memory::kQueries) {
      const KeyRange tiles = visible_tiles(params, query, Memory::kQueries, Memory::kKeys);
      if (tile < tiles.end - tiles.begin) return {query, (tiles.begin + tile) * Memory::kKeys};
      tile -= tiles.end - tiles.begin;
    }
  }
};

// Calls take(tile, round, is_last) for each tile of this block. `round` is its number, from 0 on.
// Blocks that are not persistent have one tile.
template <class Tile, class Memory, class Take>
__device__ __forceinline__ void for_each_tile(const AttentionBackwardParams& params, Take&& take) {
  int index = static_cast<int>(blockIdx.x);
  if constexpr (Memory::kTile.is_persistent()) {
    const int tiles = static_cast<int>(Tile::count(params));
#pragma unroll 1
    for (uint32_t round = 0; index < tiles; ++round) {
      const int next = index + static_cast<int>(gridDim.x);
      take(Tile(params, index), round, next >= tiles);
      index = next;
    }
  } else {
    take(Tile(params, index), 0, true);
  }
}

// Bits of the keys of a tile that one of its queries does not see. `is_cut`: length or window may
// exclude some.
template <class Tile>
__device__ __forceinline__ void find_excluded(uint32_t (&words)[4], const AttentionParams& params,
                                              const Tile& tile, int batch, int head, int query,
                                              bool is_cut) {
  const BlockMaskLayout& layout = params.block_mask.layout;
#pragma unroll
  for (uint32_t& word : words) word = 0;
  if (params.mask.data != nullptr && layout.bit_rows > 0) {
    const int bit_row = layout.bit_rows == 1 ? 0 : min(query, params.queries - 1);
    start_load(words, params.block_mask.of(batch, head) + layout.bits() +
                          int64_t{bit_row} * layout.words_of_bits() + tile.first_key / 32);
  } else if (params.mask.data != nullptr) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!is_seen(params, batch, head, query / kMaskTile, tile.first_key / kMaskTile + i))
        words[2 * i] = words[2 * i + 1] = ~0u;
    }
  }
  if (params.visible.are_given() || is_cut) {
    const KeyRange visible =
        query < params.queries ? visible_keys(params, batch, head, query) : KeyRange{0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] |= bits_outside(visible, tile.first_key + 32 * i);
  }
}

// The copying thread, with kAny all threads of its warpgroup.
template <HopperMask kMask, class Memory>
__device__ __forceinline__ void copy_members(const AttentionBackwardParams& params,
                                             const NarrowTensorMaps& maps, const Memory& memory) {
  constexpr bool kMasksKeys = kMask == HopperMask::kKeys, kIsAny = kMask == HopperMask::kAny;
  using TileOfBlock = TileOfBias<Memory, kIsAny>;
  extern __shared__ __align__(1024) char shared_memory[];
  // Counts members of all tiles. Without kIsAny each part has at least one. With it, a mark follows
  // the last one of a tile. Others wait for either.
  int step = 0;
  const bool copies = threadIdx.x == 0;
  const auto take = [&](const TileOfBlock& tile, uint32_t round, bool) {
    [[maybe_unused]] const bool is_cut = kIsAny && !tile.is_whole(params);
    const BiasMembers& members = tile.members;
    const int query = tile.first_query, key = tile.first_key;
    const int row_bytes =
        min(Memory::kQueries, params.queries - query) * static_cast<int>(sizeof(RowOfBackward));
    const int first_copy = key / Memory::kKeysOfCopy;
    const int last_copy = (min(key + Memory::kKeys, params.keys) - 1) / Memory::kKeysOfCopy;
    const int bit_bytes = kMasksKeys ? Memory::kBytesOfCopy * (last_copy - first_copy + 1) : 0;
    // Waits for the place of a step.
    const auto place_of_step = [&] {
      const int stage = step % Memory::kStages;
      memory.stage_is_used(stage).wait((step / Memory::kStages & 1) ^ 1);
      return stage;
    };
    const auto arrive = [](const Barrier& there) {  // each warp, once its lanes have written
      __syncwarp();
      if (threadIdx.x % 32 == 0) there.arrive();
    };
    bool is_first = true;
    const auto copy_bias = [&] {  // after the first member, whose place is free earlier
      if (!std::exchange(is_first, false) || !copies) return;
      // The place of the bias is taken until the tile before ends.
      if constexpr (Memory::kTile.is_persistent()) memory.bias_is_used().wait((round & 1) ^ 1);
      memory.bias_is_there().arrive_and_expect(Memory::kBiasBytes);
      for (int i = 0; i < 2 * Memory::kWarpgroups; ++i)
        start_copy_of_box(memory.bias(i / 2, i % 2), maps.bias, memory.bias_is_there(),
                          key + 64 * (i % 2), query + 64 * (i / 2), members.head, members.batch);
    };
    for (int member = members.begin; member < members.end; ++member) {
      int batch, head, key_head, rest;
      members.place(params, member, batch, head);
      if constexpr (kIsAny) {
        if (!tile.has_visible_pair(params, batch, head)) continue;
      }
      params.heads_per_key_head.split(head, key_head, rest);
      [[maybe_unused]] uint32_t excluded[4];
      [[maybe_unused]] const int row = static_cast<int>(threadIdx.x);
      if constexpr (kIsAny)  // while the place may still be taken
        find_excluded(excluded, params, tile, batch, head, query + row, is_cut);
      const int stage = place_of_step();
      const Barrier there = memory.stage_is_there(stage);
      if (copies) {
        if constexpr (kIsAny) Memory::member(shared_memory, stage) = make_int2(batch, head);
        there.arrive_and_expect(Memory::kStageBytes + row_bytes + bit_bytes);
        start_copy_of_box(memory.queries(stage), maps.query, there, 0, query, head, batch);
        start_copy_of_box(memory.keys(stage), maps.key, there, 0, key, key_head, batch);
        start_copy_of_box(memory.gradients(stage), maps.output_gradient, there, 0, query, head,
                          batch);
        start_copy_of_box(memory.values(stage), maps.value, there, 0, key, key_head, batch);
        start_copy_of_bytes(memory.rows(stage),
                            params.rows_of_backward + params.row_index(batch, head, query),
                            row_bytes, there);
        if constexpr (kMasksKeys)
          start_copy_of_bytes(memory.bits(stage),
                              params.block_mask.of(batch, head) + params.block_mask.layout.bits() +
                                  first_copy * (Memory::kKeysOfCopy / 32),
                              bit_bytes, there);
      }
      if constexpr (kIsAny) {
        static_assert(Memory::kQueries == 128);
        store_four(memory.bits(stage) + row * Memory::kBytesOfCopy, excluded);
        arrive(there);
      }
      ++step;
      copy_bias();
    }
    if constexpr (kIsAny) {
      const int stage = place_of_step();
      if (copies) {
        Memory::member(shared_memory, stage) = make_int2(-1, 0);
        memory.stage_is_there(stage).arrive();
      }
      arrive(memory.stage_is_there(stage));
      ++step;
      copy_bias();
    }
  };
  for_each_tile<TileOfBlock, Memory>(params, take);
}

// A warpgroup with 64 queries and all keys of a tile.
template <class T, HopperMask kMask, bool kHasDropout, class Memory>
__device__ __forceinline__ void sum_members(const AttentionBackwardParams& params,
                                            const Memory& memory, int warpgroup) {
  constexpr bool kMasksKeys = kMask == HopperMask::kKeys, kIsAny = kMask == HopperMask::kAny;
  using TileOfBlock = TileOfBias<Memory, kIsAny>;
  constexpr int kRowBytes = Memory::kRowBytes, kHalfBytes = 64 * kRowBytes;
  // With registers for it, products of the second half run while the first one is added. With a
  // third stage those of the next step also run while the second half is added. With a mask of keys
  // that gained nothing. With dropout the former would spill.
  constexpr int kBuffers = Memory::kTile.registers > 160 && !kHasDropout ? 2 : 1;
  constexpr bool kStartsNextStep =
      kBuffers == 2 && Memory::kStages > 2 && kMask == HopperMask::kNone;
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
      return fabsf(row.delta) < INFINITY && (kMask == HopperMask::kNone || row.max == 0.f);
    };
    are_plain = __all_sync(~0u, is_plain(rows[0]) && is_plain(rows[1])) != 0;
  };
  int first_bit = 0;             // of the first key of a tile, in the copied words
  [[maybe_unused]] int2 member;  // with kIsAny, the one at hand
  const auto add = [&]<int kHalf>(int stage, [[maybe_unused]] const TileOfBlock& tile) {
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
    [[maybe_unused]] Excluded<1, 8> excluded;
    if constexpr (kIsAny) {
      const auto* const words = reinterpret_cast<const uint32_t*>(shared_memory + Memory::kBitsAt +
                                                                  stage * Memory::kBitBytes);
      excluded.add_words([&](int half, int word) {
        return words[4 * (64 * warpgroup + 16 * warp + mine.row + 8 * half) + 2 * kHalf + word];
      });
      if (__all_sync(~0u, excluded.are_all())) return;
      if constexpr (kHasDropout) {
#pragma unroll
        for (int i = 0; i < 4 * kN; ++i) gradients[kBuffer][i / 4][i % 4] *= params.dropout.factor;
        Dropping<false>(params, member.x, member.y)
            .clear(reinterpret_cast<Accumulators<1, kN>&>(gradients[kBuffer]),
                   tile.first_query + 64 * warpgroup + 16 * warp, tile.first_key + 64 * kHalf);
      }
    }
    [[maybe_unused]] const bool excludes =
        kIsAny ? __any_sync(~0u, excluded.any()) != 0 : (bits[0] | bits[1]) != 0;
    bits[0] >>= mine.column;
    bits[1] >>= mine.column;
    const auto is_visible = [&](int n, int i) {
      if constexpr (kIsAny) return !excluded.has(0, n, i);
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
    const auto is_always = [](int, int) { return true; };
    // The score of a weight of 0 has gradient 0, even if the gradient of the weight is not finite.
    const auto is_counted = [&](int n, int i) {
      return is_visible(n, i) && weights[kBuffer][n][i] != 0.f;
    };
    // With a mask the branch comes before the weights, so that the compiler fills waits of weights
    // with instructions of sums. Without one that takes 5 to 11% longer in most shapes.
    if constexpr (kMask == HopperMask::kNone) {
      weigh.template operator()<true>();
      are_plain ? add_if(is_always) : add_if(is_counted);
    } else if (!are_plain) {
      weigh.template operator()<true>();
      add_if(is_counted);
    } else if (excludes) {
      weigh.template operator()<false>();
      add_if(is_visible);
    } else {
      weigh.template operator()<false>();
      add_if(is_always);
    }
  };

  const auto wait_for_stage = [&](int step) {
    memory.stage_is_there(step % Memory::kStages).wait(step / Memory::kStages & 1);
  };
  const auto store = [&]<class Out>(const auto& tile, Out* entries) {
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
  const auto release = [&](int stage) {
    __syncwarp();  // all lanes have read its rows
    if (lane == 0) memory.stage_is_used(stage).arrive();
  };
  int step = 0;  // of all tiles
  if constexpr (kStartsNextStep) {
    wait_for_stage(0);
    start.template operator()<0>(0);
  }
  const auto clear_sums = [&] {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i / 32][i / 4 % 8][i % 4] = 0.f;
  };
  const auto store_sums = [&](const auto& tile) {
    params.bias_parts > 1 ? store(tile, params.bias_part(tile.members.part))
                          : store(tile, static_cast<T*>(params.bias_gradient));
  };
  const auto take = [&](const TileOfBlock& tile, uint32_t round, bool is_last) {
    const int end = step + tile.members.end - tile.members.begin;
    if constexpr (Memory::kKeys % Memory::kKeysOfCopy != 0)
      first_bit = tile.first_key % Memory::kKeysOfCopy;
    clear_sums();
    memory.bias_is_there().wait(round & 1);
    const auto is_left = [&] {
      if constexpr (!kIsAny) return step < end;
      wait_for_stage(step);
      member = Memory::member(shared_memory, step % Memory::kStages);
      return member.x >= 0;
    };
    // The first step of the next tile is copied, too.
    [[maybe_unused]] const int end_of_copies = is_last ? end : end + 1;
#pragma unroll 1
    for (; is_left(); ++step) {
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
      add.template operator()<0>(stage, tile);
      if constexpr (kBuffers == 1) start.template operator()<1>(step);
      wait_for_products<0>();
      if constexpr (kStartsNextStep) {  // after the last tile: products that nobody reads
        if (step + 1 < end_of_copies) wait_for_stage(step + 1);
        start.template operator()<0>(step + 1);
      }
      add.template operator()<1>(stage, tile);
      release(stage);
    }
    if constexpr (kIsAny) release(step++ % Memory::kStages);
    if constexpr (Memory::kTile.is_persistent()) {
      touch(sums[0]);  // made before the place of the bias is free
      touch(sums[1]);
      __syncwarp();
      if (lane == 0) memory.bias_is_used().arrive();
    } else {
      wait_for_products<0>();  // that nobody reads
    }
    store_sums(TileOfBlock(params, unknown(tile.index)));  // not kept in registers until here
  };
  for_each_tile<TileOfBlock, Memory>(params, take);
  if constexpr (kIsAny) {  // zeros for tiles that no query sees
    const int tiles = static_cast<int>(TileOfBias<Memory>::count(params));
    clear_sums();
    for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
      const TileOfBias<Memory> tile(params, i);
      if (!tile.is_in_window(params)) store_sums(tile);
    }
  }
  wait_for_products<0>();  // of persistent blocks
}

template <class T, HopperMask kMask, bool kHasDropout, int kIndex>
__global__ void __launch_bounds__(kAttentionHopperBiasGradientTiles[kIndex].threads(), 1)
    attention_hopper_bias_gradient_kernel(const __grid_constant__ AttentionBackwardParams params,
                                          const __grid_constant__ NarrowTensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Memory = HopperBiasGradientMemory<kIndex>;
  extern __shared__ __align__(1024) char shared_memory[];
  const Memory memory{shared_address(shared_memory)};
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128)) - 1;
  // With kAny each copying warp arrives, too.
  if (threadIdx.x == 0) memory.init_barriers(kMask == HopperMask::kAny ? 5 : 1);
  __syncthreads();
  if (warpgroup < 0) {
    give_registers<Memory::kTile.copier_registers()>();
    if (threadIdx.x == 0 || kMask == HopperMask::kAny) copy_members<kMask>(params, maps, memory);
    if (threadIdx.x == 0) {
      // The launch of tiles may still run, see attention_backward. The next one needs its results.
      wait_for_launch_before();
      let_next_launch_begin();
    }
    return;
  }
  take_registers<Memory::kTile.registers>();
  sum_members<T, kMask, kHasDropout>(params, memory, warpgroup);
#endif
}

}  // namespace megasoftmax
