#pragma once
// The same as sm80/forward.cuh on Hopper, by products of warpgroups and tensor copies.
//
// A block takes one tile of queries, or several one after the other. One of its warps only copies,
// ahead over the end of a tile. Each other warpgroup has 64 queries. It starts the product with the
// next keys, then that of the weights before with their values, and makes weights while the latter
// runs.

#include "../../common/vector.cuh"
#include "../bias.cuh"
#include "../dropping.cuh"
#include "../exclusion.cuh"
#include "../limits.h"
#include "../online_softmax.cuh"
#include "../sm80/tile.cuh"
#include "../tile_of_queries.cuh"
#include "ptx.cuh"

namespace megasoftmax {

// Boxes of 64 columns: of 64 queries, and of the keys of a tile. Of the bias 64 queries and keys.
struct TensorMaps {
  CUtensorMap query, key, value, bias;
};

template <HopperBias kBias, int kIndex>
struct HopperMemory {
  static constexpr AttentionHopperTile kTile = kAttentionHopperTiles[kIndex];
  static constexpr int kDim = kTile.head_dim, kKeys = kTile.keys, kPanels = kDim / 64;
  static constexpr int kWarpgroups = kTile.warpgroups, kQueries = kTile.queries();
  static constexpr int kThreads = kTile.threads(), kStages = 2;
  static_assert(shares_registers(kTile));
  static_assert(kDim % 64 == 0 && kKeys == 2 * kNoteTile && kQueries % kNoteTile == 0);

  // Queries of each warpgroup; keys, values of each stage; results of each warpgroup; the bias of
  // each stage and warpgroup, of a table that of each stage; barriers.
  static constexpr int kPanelBytes = kKeys * 128, kQueryPanelBytes = 64 * 128;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kKeyBytes = kPanels * kPanelBytes;
  static constexpr int kKeysAt = kWarpgroups * kQueryBytes;
  static constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kResultsAt = kValuesAt + kStages * kKeyBytes;
  static constexpr int kBiasAt = kResultsAt + kWarpgroups * kQueryBytes;
  using Diagonals = DiagonalTile<false, kQueries, kKeys>;
  static constexpr bool kIsTable = kBias == HopperBias::kTable;
  static constexpr int kBiasStages = kIsTable ? kStages : kTile.bias_stages;
  static constexpr int kBiasSharers = kIsTable ? kWarpgroups : 1;  // warpgroups with one tile of it
  static constexpr int kBiasPanelBytes = 64 * 128;
  static constexpr int kBiasBytes = kIsTable ? Diagonals::kBytes : kKeys / 64 * kBiasPanelBytes;
  static constexpr int kBiasTilesOfStage = kWarpgroups / kBiasSharers;
  static constexpr int kBiasTiles =
      kBias == HopperBias::kNone ? 0 : kBiasStages * kBiasTilesOfStage;
  static constexpr int kBarriersAt = kBiasAt + kBiasTiles * kBiasBytes;
  static constexpr int kBiasBarrier = 2 + 4 * kStages;
  static constexpr int kBytes = kBarriersAt + 8 * (kBiasBarrier + 2 * kBiasTiles);

  uint32_t address;

  __device__ static int bias_tile(int stage, int warpgroup) {
    return stage * kBiasTilesOfStage + warpgroup / kBiasSharers;
  }
  __device__ static Diagonals diagonals(char* memory, int stage) {
    return {reinterpret_cast<float*>(memory + kBiasAt + stage * kBiasBytes)};
  }
  __device__ uint32_t queries(int warpgroup) const { return address + warpgroup * kQueryBytes; }
  __device__ uint32_t keys(int stage) const { return address + kKeysAt + stage * kKeyBytes; }
  __device__ uint32_t values(int stage) const { return address + kValuesAt + stage * kKeyBytes; }
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
  __device__ Barrier bias_is_there(int stage, int warpgroup) const {
    return barrier(kBiasBarrier + 2 * bias_tile(stage, warpgroup));
  }
  __device__ Barrier bias_is_used(int stage, int warpgroup) const {
    return barrier(kBiasBarrier + 2 * bias_tile(stage, warpgroup) + 1);
  }
};

// The tiles of keys that a block takes, one after the other.
template <int kQueries, int kKeys, bool kIsPlain>
class TilesOfBlock {
 public:
  int key, end;   // the first key of the tile at hand; none is left from `end` on
  uint32_t step;  // how many the block took before

  __device__ TilesOfBlock(const AttentionParams& params, const TileOfQueries& block, uint32_t step)
      : step(step) {
    const int last_query = min(block.first_query + kQueries, params.queries) - 1;
    end = visible_keys(params, last_query).end;
    int seen = visible_keys(params, block.first_query).begin / kNoteTile * kNoteTile;
    if constexpr (!kIsPlain)
      seen = tiles_.from(params, block.batch, block.head, block.first_query, seen);
    go_to(seen);
  }
  __device__ bool are_left() const { return key < end; }
  __device__ void advance(const AttentionParams& params, const TileOfQueries& block) {
    if constexpr (kIsPlain) {
      key += kKeys;
    } else {
      go_to(tiles_.after(params, key + kNoteTile, [&] { return block; }));
    }
    ++step;
  }
  // By mask or range.
  __device__ bool may_exclude() const {
    return !kIsPlain && (tiles_.may_exclude(key) || tiles_.may_exclude(key + kNoteTile));
  }

 private:
  // Of the key behind the last tile that is noted, the tile may begin before the end.
  __device__ void go_to(int seen) { key = seen < end ? seen / kKeys * kKeys : end; }

  [[maybe_unused]] KeyTiles<kQueries> tiles_;
};

// The tiles of queries of a block: all blocks take them in turn, every other turn in reverse, since
// causal tiles become shorter.
class WorkOfBlock {
 public:
  int turn = 0;

  __device__ explicit WorkOfBlock(const AttentionParams& params)
      : count_(static_cast<int>(params.tiles.divisor * params.heads * params.batches)) {}
  __device__ int number() const {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    return turn * blocks + (turn % 2 == 0 ? block : blocks - 1 - block);
  }
  __device__ bool is_left() const { return number() < count_; }
  __device__ bool may_come() const { return turn * static_cast<int>(gridDim.x) < count_; }

 private:
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
  constexpr int kN = kKeys / 8, kColumns = kDim / 8, kSteps = kKeys / 16;
  constexpr bool kHasBias = kBias != HopperBias::kNone;
  using Tiles = TilesOfBlock<kQueries, kKeys, kIsPlain>;
  extern __shared__ __align__(1024) char shared_memory[];
  const Memory memory{shared_address(shared_memory)};
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128)) - 1;

  const bool is_paired = kBias == HopperBias::kTile && params.is_paired;
  const int copies_per_bias = is_paired ? 2 : 1;  // blocks that have each tile of it

  if (threadIdx.x == 0) {
    memory.queries_are_there().init(1);
    memory.queries_are_used().init(4 * kWarpgroups);
    for (int stage = 0; stage < kStages; ++stage) {
      memory.keys_are_there(stage).init(1);
      memory.values_are_there(stage).init(1);
      memory.keys_are_used(stage).init(4 * kWarpgroups);
      memory.values_are_used(stage).init(4 * kWarpgroups);
    }
    for (int i = 0; i < Memory::kBiasTiles; ++i) {
      memory.barrier(Memory::kBiasBarrier + 2 * i).init(Memory::kIsTable ? kFillers : 1);
      memory.barrier(Memory::kBiasBarrier + 2 * i + 1)
          .init(4 * Memory::kBiasSharers * copies_per_bias);
    }
    publish_barriers();
  }
  __syncthreads();
  if (is_paired) {  // the other copies to this block, and arrives at its barriers
    arrive_at_cluster();
    wait_for_cluster();
  }
  WorkOfBlock work(params);
  uint32_t first_step = 0;

  if (warpgroup < 0) {
    give_registers<Memory::kTile.copier_registers>();
    if (threadIdx.x >= 32) {
      if constexpr (Memory::kIsTable) {
        for (; work.may_come(); ++work.turn) {
          if (!work.is_left()) continue;
          const TileOfQueries block(params, kQueries, work.number());
          const BiasRows<T> bias(params, block.batch, block.head);
          Tiles tiles(params, block, first_step);
          for (; tiles.are_left(); tiles.advance(params, block)) {
            const int stage = tiles.step % Memory::kBiasStages;
            Memory::diagonals(shared_memory, stage)
                .template fill<32 * kFillers>(static_cast<int>(threadIdx.x) - 32, bias,
                                              block.first_query, tiles.key, params.queries,
                                              params.keys, [&] {
                                                memory.bias_is_used(stage, 0).wait(
                                                    (tiles.step / Memory::kBiasStages & 1) ^ 1);
                                              });
            __syncwarp();  // all lanes have written theirs
            if (threadIdx.x % 32 == 0) memory.bias_is_there(stage, 0).arrive();
          }
          first_step = uniform(tiles.step);
        }
      }
      return;
    }
    const bool is_first = threadIdx.x == 0;
    for (int done = 0; work.may_come(); ++work.turn) {
      if (!work.is_left()) continue;
      const TileOfQueries block(params, kQueries, work.number());
      int key_head, rest;
      params.heads_per_key_head.split(block.head, key_head, rest);
      const auto copy = [&](uint32_t shared, const CUtensorMap& map, Barrier barrier, int rows,
                            int head, int row) {
        start_copy_of_panels<Memory::kPanels>(shared, map, barrier, rows, row, head, block.batch);
      };
      memory.queries_are_used().wait((done & 1) ^ 1);
      if (is_first) {
        memory.queries_are_there().arrive_and_expect(kWarpgroups * Memory::kQueryBytes);
        for (int i = 0; i < kWarpgroups; ++i)
          copy(memory.queries(i), maps.query, memory.queries_are_there(), 64, block.head,
               block.first_query + 64 * i);
      }
      ++done;
      const auto fill = [&](uint32_t shared, const CUtensorMap& map, Barrier there, Barrier used,
                            uint32_t step, int key) {
        used.wait((step / kStages & 1) ^ 1);
        if (!is_first) return;
        there.arrive_and_expect(Memory::kKeyBytes);
        copy(shared, map, there, kKeys, key_head, key);
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
          const auto copy_panel = [&](int panel, auto&& start) {
            start(memory.bias(stage, i) + panel * Memory::kBiasPanelBytes, maps.bias, there,
                  key + 64 * panel, block.first_query + 64 * i, bias_head, bias_batch);
          };
          if (is_paired) {  // half of them each
            copy_panel(static_cast<int>(blockIdx.x) % 2, start_copy_of_box_to_pair);
          } else {
            for (int panel = 0; panel < kKeys / 64; ++panel) copy_panel(panel, start_copy_of_box);
          }
        }
      };
      Tiles tiles(params, block, first_step);
      for (; tiles.are_left(); tiles.advance(params, block)) {
        const int stage = tiles.step % kStages;
        fill(memory.keys(stage), maps.key, memory.keys_are_there(stage),
             memory.keys_are_used(stage), tiles.step, tiles.key);
        if constexpr (kBias == HopperBias::kTile) fill_bias(tiles.step, tiles.key);
        fill(memory.values(stage), maps.value, memory.values_are_there(stage),
             memory.values_are_used(stage), tiles.step, tiles.key);
      }
      first_step = uniform(tiles.step);
    }
    // A block ends when the other arrives at its barriers no more.
    for (uint32_t step = first_step; is_paired && step < first_step + Memory::kBiasStages; ++step) {
      for (int i = 0; i < kWarpgroups; ++i)
        memory.bias_is_used(step % Memory::kBiasStages, i)
            .wait((step / Memory::kBiasStages & 1) ^ 1);
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

  for (int done = 0; work.may_come(); ++work.turn) {
    if (!work.is_left()) continue;
    const TileOfQueries block(params, kQueries, work.number());
    const int group_query = block.first_query + 64 * warpgroup;
    const int warp_query = group_query + 16 * warp_in_group;
    // Of these keys all queries of the warpgroup see all, by length and window.
    int all_visible_begin, all_visible_end;
    {
      const int last = min(group_query + 64, params.queries) - 1;
      all_visible_begin = visible_keys(params, last).begin;
      all_visible_end = visible_keys(params, min(group_query, last)).end - kKeys;
    }
    // What this lane's rows see by range.
    [[maybe_unused]] KeyRange ranges[2];
    if constexpr (!kIsPlain) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = warp_query + mine.row + row_offset(0, 2 * half);
        ranges[half] =
            visible_keys(params, block.batch, block.head, min(query, params.queries - 1));
      }
    }

    float output[1][kColumns][4] = {};
    float scores[1][kN][4];
    uint32_t weights[kSteps][4];
    float factors[2];
    OnlineSoftmax<1> softmax(params.scale);

    const auto start_scores = [&](int stage) {
      const uint64_t a = matrix_at(memory.queries(warpgroup), 16),
                     b = matrix_at(memory.keys(stage), 16);
      begin_products();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const int panel = step / 4, offset = step % 4 * 32;
        start_product<T>(scores[0], moved(a, panel * Memory::kQueryPanelBytes + offset),
                         moved(b, panel * Memory::kPanelBytes + offset), step > 0);
      }
      end_products();
    };
    const auto start_output = [&](int stage) {
      const uint64_t b = matrix_at(memory.values(stage), Memory::kPanelBytes);
      begin_products();
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        start_product<T>(output[0], weights[step], moved(b, step * 16 * 128));
      end_products();
    };
    // Makes logits of products, and lets go of the keys, of a tile of the bias once it was read.
    const auto add_bias_of = [&](const Tiles& tiles) {
      const Barrier keys = memory.keys_are_used(tiles.step % kStages);
      const int stage = tiles.step % Memory::kBiasStages;
      const auto wait_for_bias = [&] {
        memory.bias_is_there(stage, warpgroup).wait(tiles.step / Memory::kBiasStages & 1);
      };
      if constexpr (!kHasBias) {
        release(keys);
      } else if constexpr (Memory::kIsTable) {
        release(keys);
        wait_for_bias();
        add_bias(scores, params.scale,
                 DiagonalBias(Memory::diagonals(shared_memory, stage),
                              64 * warpgroup + 16 * warp_in_group));
        __syncwarp();  // all lanes have read theirs
        release(memory.bias_is_used(stage, warpgroup));
      } else {
        wait_for_bias();
        using Panel = Tile<T, 64, 64>;
        const FragmentsDown<Panel> fragments(Panel{memory.bias(stage, warpgroup)},
                                             16 * warp_in_group);
        LoadedBias<T, kSteps> bias;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          load_matrices(bias.packs[step].words,
                        (fragments.address ^ step % 4 * 32) + step / 4 * Memory::kBiasPanelBytes);
        release(keys);
        __syncwarp();  // all lanes have read theirs
        // No branch: past one, sums could not free registers of one load for the next.
        if (lane < copies_per_bias) memory.bias_is_used(stage, warpgroup).arrive_in(lane);
        add_bias(scores, params.scale, bias);
      }
    };
    // Scores become weights; the output before is to be scaled by `factors`.
    const auto weigh = [&](const Tiles& tiles) {
      add_bias_of(tiles);
      const bool is_cut = tiles.key < all_visible_begin || tiles.key > all_visible_end;
      if (is_cut || tiles.may_exclude()) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Excluded<1, kN / 2> excluded;
          excluded.template find<false, kIsPlain>(
              params, block.batch, block.head, warp_query, tiles.key + half * kNoteTile, is_cut,
              [&](int query, int offset, bool has_ranges) {
                if (query >= params.queries) return KeyRange{0, 0};
                return has_ranges ? ranges[offset / 8] : visible_keys(params, query);
              });
          excluded.apply(reinterpret_cast<Accumulators<1, kN / 2>&>(scores[0][half * (kN / 2)]),
                         -INFINITY);
        }
      }
      factors[0] = factors[1] = 1.f;
      softmax.template weigh<kHasBias>(
          scores, [&](int, int half, float factor) { factors[half] = factor; });
      if (!kIsPlain && params.dropout.seed != nullptr) {
        const Dropping<false> dropping(params, block.batch, block.head);
        dropping.template for_each_word<1, kN>(
            warp_query, tiles.key, [&](Element first, Element second, uint32_t halves) {
              clear_below(scores[first.m][first.n][first.i], scores[second.m][second.n][second.i],
                          halves, dropping.least);
            });
      }
    };
    const auto round_weights = [&] {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) as_matrix_a<T>(weights[step], scores[0], step);
    };

    memory.queries_are_there().wait(done & 1);
    ++done;
    Tiles tiles(params, block, first_step);
    if (tiles.are_left()) {
      wait_for(keys_are_there, tiles.step);
      start_scores(tiles.step % kStages);
      wait_for_products<0>();
      touch(scores[0]);
      weigh(tiles);
      round_weights();
      for (tiles.advance(params, block); tiles.are_left(); tiles.advance(params, block)) {
        const uint32_t stage = tiles.step % kStages, before = tiles.step - 1;
        wait_for(keys_are_there, tiles.step);
        start_scores(stage);
        wait_for(values_are_there, before);
        start_output(before % kStages);
        wait_for_products<1>();
        touch(scores[0]);
        weigh(tiles);
        wait_for_products<0>();
        touch(output[0]);
        release(memory.values_are_used(before % kStages));
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) output[0][n][i] *= factors[i / 2];
        }
        round_weights();
      }
      release(memory.queries_are_used());
      const uint32_t last = tiles.step - 1;
      wait_for(values_are_there, last);
      start_output(last % kStages);
      wait_for_products<0>();
      touch(output[0]);
      release(memory.values_are_used(last % kStages));
    } else {
      release(memory.queries_are_used());
    }
    // The compiler does not see that it is. Of a step that it cannot keep in registers of the warp,
    // each product would compute anew where its matrices lie.
    first_step = uniform(tiles.step);

    const float sink = sink_logit(params.sink, block.head);
    const int64_t first_row = params.row_index(block.batch, block.head, warp_query);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowEnd row_end(softmax.max[0][half], sum_of_row(softmax.sum[0][half]), sink,
                           params.can_exclude);
      const int row = mine.row + row_offset(0, 2 * half);
      if (mine.column == 0 && warp_query + row < params.queries)
        row_end.store(params, first_row + row);
      factors[half] = row_end.factor * (kIsPlain ? 1.f : params.dropout.factor);
    }
    store_rows<T, Tile<T, 64, kDim>>(
        shared_memory + Memory::kResultsAt + warpgroup * Memory::kQueryBytes, 16 * warp_in_group,
        output[0], factors, params.output.row<T>(block.batch, block.head, group_query),
        params.output.query_stride, params.queries - group_query, params.value_dim);
    __syncwarp();  // results may take their place again
  }
#endif
}

}  // namespace megasoftmax
