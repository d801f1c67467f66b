#pragma once
// Hopper's backward for head dimensions above 128, without a bias.
//
// A block owns 64 keys. Their gradients of keys and values fill the registers of two warpgroups, so
// a warpgroup has one of the two, and each product is made once:
//   * a warpgroup computes the scores S and the weights P, and sums dV;
//   * another computes the gradients of weights dP and those of scores dS, and sums dK. It reads P
//     from shared memory, where the first one leaves it: a thread has the same elements of both.
//     With a softcap that is P times the slope of tanh;
//   * the third computes dQ from dS, 64 columns at a time, which tensor copies add to the sums in
//     global memory, in deterministic mode each warp its 16 rows in turn, see turns.cuh. One of its
//     threads copies what the others need, two tiles ahead.
// The warpgroups work on different steps at the same time. Barriers in shared memory tell when
// another one is done. S, P, dP and dS are transposed, so that P and dS are multiplied from
// registers.

#include "../turns.cuh"
#include "backward.cuh"
#include "backward/capped_weights.cuh"

namespace megasoftmax {

template <int kIndex>
struct HopperWideBackwardMemory {
  static constexpr AttentionHopperBackwardTile kTile = kAttentionHopperBackwardTiles[kIndex];
  static constexpr int kDim = kTile.head_dim, kValueDim = kTile.value_dim;
  static constexpr int kKeys = kTile.keys(), kQueries = kTile.queries, kStages = 2;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kPanels = kDim / 64, kValuePanels = kValueDim / 64;
  static_assert(kTile.is_wide() && kDim % 64 == 0 && kValueDim % 64 == 0);
  static_assert(kKeys == 64 && kQueries == 64);
  static_assert(kKeys % kMaskTile == 0 && kQueries % kMaskTile == 0);

  // Keys; values; queries and gradients of outputs of each stage; weights; gradients of scores;
  // panels of dQ, of 32 columns; rows of each stage; barriers. At the end the gradients of values
  // and keys take the place of the first stage.
  static constexpr int kKeyBytes = kPanels * 64 * 128, kValueBytes = kValuePanels * 64 * 128;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kValuesAt = kKeyBytes, kStagesAt = kStageBytes;
  static constexpr int kValueResultsAt = kStagesAt, kKeyResultsAt = kStagesAt + kValueBytes;
  // Each thread passes 32 weights of 16 bits, eight at a time. Eights of all threads lie side by
  // side.
  static constexpr int kEightBytes = 128 * 16, kWeightBytes = 4 * kEightBytes;
  static constexpr int kWeightsAt = kStagesAt + kStages * kStageBytes;
  static constexpr int kScoresAt = kWeightsAt + kWeightBytes, kScoreBytes = kQueries * 128;
  // The panels are used in order, from the first one for each tile.
  static constexpr int kSumPanels = kDim <= 192 ? 2 * kPanels : 2, kSumPanelBytes = 64 * 128;
  static_assert(2 * kPanels % kSumPanels == 0);
  static constexpr int kSumsAt = kScoresAt + kScoreBytes;
  static constexpr int kRowBytes = kQueries * static_cast<int>(sizeof(RowOfBackward));
  static constexpr int kRowsAt = kSumsAt + kSumPanels * kSumPanelBytes;
  static constexpr int kBarriersAt = kRowsAt + kStages * kRowBytes;
  static constexpr int kBytes = kBarriersAt + 8 * (1 + 3 * kStages + 4);
  static_assert(kBytes <= least_shared_bytes(kHopperMajor, kHopperMajor));
  static_assert(shares_registers(kTile));

  uint32_t address;

  __device__ uint32_t keys() const { return address; }
  __device__ uint32_t values() const { return address + kValuesAt; }
  __device__ uint32_t queries(int stage) const { return address + kStagesAt + stage * kStageBytes; }
  __device__ uint32_t gradients(int stage) const { return queries(stage) + kKeyBytes; }
  __device__ uint32_t weights() const { return address + kWeightsAt; }
  __device__ uint32_t scores() const { return address + kScoresAt; }
  __device__ uint32_t sums(int panel) const { return address + kSumsAt + panel * kSumPanelBytes; }
  __device__ uint32_t rows(int stage) const { return address + kRowsAt + stage * kRowBytes; }
  __device__ Barrier barrier(int index) const { return {address + kBarriersAt + 8 * index}; }
  __device__ Barrier keys_are_there() const { return barrier(0); }
  // Queries and their rows are there.
  __device__ Barrier queries_are_there(int stage) const { return barrier(1 + stage); }
  __device__ Barrier gradients_are_there(int stage) const { return barrier(1 + kStages + stage); }
  __device__ Barrier stage_is_used(int stage) const { return barrier(1 + 2 * kStages + stage); }
  __device__ Barrier weights_are_there() const { return barrier(1 + 3 * kStages); }
  __device__ Barrier weights_are_used() const { return barrier(1 + 3 * kStages + 1); }
  __device__ Barrier scores_are_there() const { return barrier(1 + 3 * kStages + 2); }
  __device__ Barrier scores_are_used() const { return barrier(1 + 3 * kStages + 3); }
};

// Weights are passed as float16 times 4096: small ones stay normal, and up to 15.9 does not
// overflow.
inline constexpr float kPassedWeight = 4096;

// Starts the product of 64 keys, or values, with 64 queries, or gradients of outputs.
template <class T, int kDim>
__device__ __forceinline__ void start_wide_scores(float (&scores)[8][4], uint32_t keys,
                                                  uint32_t queries) {
  const uint64_t a = matrix_at(unknown(keys), 16), b = matrix_at(queries, 16);
  begin_products();
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const int offset = step / 4 * 64 * 128 + step % 4 * 32;
    start_product<T>(scores, moved(a, offset), moved(b, offset), step > 0);
  }
  end_products();
}

// Starts to add weights, or gradients of scores, times the rows of a tile.
template <class T, int kColumns>
__device__ __forceinline__ void start_wide_sum(float (&sum)[kColumns][4],
                                               const uint32_t (&rounded)[4][4], uint32_t rows) {
  const uint64_t b = matrix_at(rows, 64 * 128);
  begin_products();
  start_sum_of_products<T>(sum, rounded, b);
  end_products();
}

template <class T, bool kHasSoftcap, bool kIsUnmasked, bool kMayAlternate, int kIndex>
__global__ void __launch_bounds__(HopperWideBackwardMemory<kIndex>::kThreads, 1)
    attention_hopper_wide_backward_kernel(const __grid_constant__ AttentionBackwardParams params,
                                          const __grid_constant__ BackwardTensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Memory = HopperWideBackwardMemory<kIndex>;
  constexpr int kDim = Memory::kDim, kKeys = Memory::kKeys, kQueries = Memory::kQueries;
  constexpr int kPanels = Memory::kPanels, kValuePanels = Memory::kValuePanels;
  constexpr int kStages = Memory::kStages;
  extern __shared__ __align__(1024) char shared_memory[];
  const Memory memory{shared_address(shared_memory)};
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128));

  if (threadIdx.x == 0) {
    memory.keys_are_there().init(1);
    for (int stage = 0; stage < kStages; ++stage) {
      memory.queries_are_there(stage).init(1);
      memory.gradients_are_there(stage).init(1);
      memory.stage_is_used(stage).init(8);
    }
    memory.weights_are_there().init(4);
    memory.weights_are_used().init(4);
    memory.scores_are_there().init(4);
    memory.scores_are_used().init(4);
    publish_barriers();
  }
  __syncthreads();
  int first_key, key_head, batch;
  params.order.place(static_cast<int>(blockIdx.x), first_key, key_head, batch);
  if (params.order_of_turns == OrderOfTurns::kLastKeysFirst)
    first_key = params.order.tiles - 1 - first_key;
  first_key *= kKeys;
  using Tiles = QueryTiles<kKeys, kQueries, kIsUnmasked, false, kMayAlternate>;
  Tiles tiles(params, batch, key_head, first_key);

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_in_group = static_cast<int>(threadIdx.x) / 32 % 4;
  const auto parity_of = [](int step) { return step / kStages & 1; };

  if (warpgroup == 0) {
    give_registers<Memory::kTile.copier_registers>();
    const bool is_first = threadIdx.x == 0;
    if (is_first) start_copy_of_keys(memory, maps, first_key, key_head, batch);
    // Queries, gradients of outputs and rows are copied for a tile that is kStages further.
    Tiles copied = tiles;
    const auto copy_next = [&](int stage) {
      if (is_first) {
        const Barrier there = memory.queries_are_there(stage);
        const int rows = min(kQueries, params.queries - copied.query);
        const int row_bytes = rows * static_cast<int>(sizeof(RowOfBackward));
        there.arrive_and_expect(Memory::kKeyBytes + row_bytes);
        start_copy_of_panels<kPanels>(memory.queries(stage), maps.query, there, kQueries,
                                      copied.query, copied.head, batch);
        start_copy_of_bytes(
            memory.rows(stage),
            params.rows_of_backward + params.row_index(batch, copied.head, copied.query), row_bytes,
            there);
        const Barrier gradients_there = memory.gradients_are_there(stage);
        gradients_there.arrive_and_expect(Memory::kValueBytes);
        start_copy_of_panels<kValuePanels>(memory.gradients(stage), maps.output_gradient,
                                           gradients_there, kQueries, copied.query, copied.head,
                                           batch);
      }
      copied.advance(params, batch, first_key);
    };
    for (int stage = 0; stage < kStages; ++stage) {
      if (copied.are_left()) copy_next(stage);
    }

    float results[8][4];  // of 64 queries and 64 columns
    const uint64_t a = matrix_at(memory.scores(), 16);
    const auto start_square = [&](int square) {
      const uint64_t b = matrix_at(memory.keys() + square * 64 * 128, 16);
      begin_products();
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step)
        start_product<T, true>(results, moved(a, step * 32), moved(b, step * 16 * 128), step > 0);
      end_products();
    };
    memory.keys_are_there().wait(0);
#pragma unroll 1
    for (int step = 0; tiles.are_left(); tiles.advance(params, batch, first_key), ++step) {
      const int stage = step % kStages;
      uint32_t* const turn =
          params.turns == nullptr
              ? nullptr
              : turn_of<kQueries, 4>(params, batch, tiles.head, tiles.query, warp_in_group);
      memory.scores_are_there().wait(step & 1);
      start_square(0);
#pragma unroll
      for (int square = 0; square < kPanels; ++square) {
        // About now the other warpgroups are done with the stage.
        if (square == 2 && warp_in_group == 0 && copied.are_left()) {
          memory.stage_is_used(stage).wait(parity_of(step));
          copy_next(stage);
        }
        wait_for_products<0>();
        touch(results);
        if (square + 1 == kPanels && lane == 0) memory.scores_are_used().arrive();
        // A warp has 16 rows of each panel for itself.
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int panel = (2 * square + side) % Memory::kSumPanels;
          if (lane == 0) wait_for_reads_of_stores<Memory::kSumPanels - 1>();
          __syncwarp();
          store_sums(shared_memory + Memory::kSumsAt + panel * Memory::kSumPanelBytes, results,
                     side);
          publish_writes();
          __syncwarp();
          if (lane == 0) {
            if (turn != nullptr && square == 0 && side == 0) {
              wait_for_turn(turn, turns_before<kKeys, kQueries, kIsUnmasked, false, kMayAlternate>(
                                      params, batch, tiles.head, tiles.query, first_key));
              publish_writes_to_others();
            }
            start_sum_of_box(maps.query_gradient_sum, memory.sums(panel) + warp_in_group * 16 * 128,
                             64 * square + 32 * side, tiles.query + 16 * warp_in_group, tiles.head,
                             params.batch_of_sums(batch, first_key / kKeys));
            end_stores();
          }
        }
        __syncwarp();  // products are for all lanes at once
        if (square + 1 < kPanels) start_square(square + 1);
      }
      if (turn != nullptr && lane == 0) {
        wait_for_stores();
        publish_writes_to_others();
        pass_turn(turn);
      }
    }
    if (lane == 0) wait_for_reads_of_stores();
    return;
  }

  take_registers<Memory::kTile.registers>();
  const int warp_key = first_key + 16 * warp_in_group;
  using Excluding = ExcludedOfTile<kQueries, kIsUnmasked>;
  Excluding excluding(params, batch, first_key, warp_key);
  // The bits of the mask and the ranges of a tile are loaded before they are needed. Lanes get
  // ranges from each other by shuffles.
  typename Excluding::Masked masked;
  KeyRange ranges[kQueries / 32];
  const auto load_excluded = [&] {
    if (!tiles.are_left()) return;
    if (excluding.has_ranges()) find_ranges(ranges, params, batch, tiles.head, tiles.query);
    excluding.load_masked(masked, tiles.head, tiles.query);
  };
  const auto find_excluded = [&](typename Excluding::Panels& excluded, int head, int query) {
    excluding.find(
        excluded, head, query, [&](int, int half) { return masked[half]; },
        [&](int) {
          return __all_sync(~0u,
                            ranges[0].contains(warp_key, 16) && ranges[1].contains(warp_key, 16));
        },
        [&](int offset, int column) {
          const KeyRange& range = ranges[offset / 32];
          return KeyRange{__shfl_sync(~0u, range.begin, column + offset % 32),
                          __shfl_sync(~0u, range.end, column + offset % 32)};
        });
  };
  const auto rows_of = [&](int stage) {  // from this lane's first column on
    return reinterpret_cast<const RowOfBackward*>(shared_memory + Memory::kRowsAt +
                                                  stage * Memory::kRowBytes) +
           FirstElement().column;
  };
  const auto store = [&]<int kColumns>(const float (&results)[kColumns][4], int results_at,
                                       float factor, const Strided& tensor, int width) {
    sync_warps<1, 8>();  // both warpgroups have read the stages
    store_rows<T, Tile<T, 64, 8 * kColumns>>(shared_memory + results_at, 16 * warp_in_group,
                                             results, {factor, factor},
                                             tensor.row<T>(batch, key_head, first_key),
                                             tensor.query_stride, params.keys - first_key, width);
  };
  int step = 0;
  memory.keys_are_there().wait(0);
  load_excluded();

  if (warpgroup == 1) {
    float value_gradient[Memory::kValueDim / 8][4] = {}, weights[8][4];
    uint32_t rounded[4][4];
    // Starts scores of the step that follows. After the last one they are not used.
    const auto start_scores = [&](int step) {
      const int stage = step % kStages;
      if (tiles.are_left()) memory.queries_are_there(stage).wait(parity_of(step));
      start_wide_scores<T, kDim>(weights, memory.keys(), memory.queries(stage));
    };
    start_scores(0);
#pragma unroll 1
    for (; tiles.are_left(); ++step) {
      const int stage = step % kStages, head = tiles.head, query = tiles.query;
      typename Excluding::Panels excluded;
      find_excluded(excluded, head, query);
      tiles.advance(params, batch, first_key);
      load_excluded();
      wait_for_products<0>();
      touch(weights);
      using Scores = Accumulators<1, 8>;
      const RowOfBackward* const rows = rows_of(stage);
      if constexpr (kHasSoftcap) {
        weigh_capped<T>(params, weights, rounded, [&](int column) {
          const RowOfBackward& row = rows[column_offset(column / 2, column)];
          return fmaf(row.max, kLog2E, row.log2_sum);
        });
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const RowOfBackward& row = rows[column_offset(i / 4, i)];
          float& weight = weights[i / 4][i % 4];
          weight = exp2_approximate(
              fmaf(fmaf(weight, params.logit_scale, -row.max), kLog2E, -row.log2_sum));
        }
      }
      // Dropped weights become negative.
      if (!kIsUnmasked && params.dropout.seed != nullptr) {
        const Dropping<true> dropping(params, batch, head);
        dropping.template for_each_pair<1, 8>(
            query, warp_key, [&](int, int n, int half, uint32_t halves) {
              float* const pair = weights[n] + 2 * half;
              negate_below(pair[0], pair[1], halves, dropping.least);
            });
      }
      excluded[0].apply(reinterpret_cast<Scores&>(weights), 0.f);
      if constexpr (kHasSoftcap) {
        excluded[0].clear_pairs(rounded);
        if (!kIsUnmasked && params.dropout.seed != nullptr) clear_dropped(rounded, weights);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) as_matrix_a<T, !kIsUnmasked>(rounded[i], weights, i);
      }
      memory.gradients_are_there(stage).wait(parity_of(step));
      start_wide_sum<T>(value_gradient, rounded, memory.gradients(stage));
      memory.weights_are_used().wait((step & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t eight[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const pair = weights[2 * i + j / 2] + j % 2 * 2;
          eight[j] = round_pair<__half>(pair[0] * kPassedWeight, pair[1] * kPassedWeight);
        }
        store_four(memory.weights() + i * Memory::kEightBytes + threadIdx.x % 128 * 16, eight);
      }
      __syncwarp();  // all lanes have written theirs
      if (lane == 0) memory.weights_are_there().arrive();
      start_scores(step + 1);
      wait_for_products<1>();
      touch(value_gradient);
      __syncwarp();
      if (lane == 0) memory.stage_is_used(stage).arrive();
    }
    wait_for_products<0>();
    touch(weights);
    store(value_gradient, Memory::kValueResultsAt, kIsUnmasked ? 1.f : params.dropout.factor,
          params.value_gradient, params.value_dim);
  } else {
    float key_gradient[kDim / 8][4] = {}, gradients[8][4];
    uint32_t rounded[4][4];
    using Scores = Tile<T, kQueries, kKeys>;
    const uint32_t first_score =
        FragmentsAcross<Scores>(Scores{memory.scores()}, 0).address ^ warp_in_group * 32;
    // Starts gradients of weights of the step that follows. After the last one they are not used.
    const auto start_gradients = [&](int step) {
      const int stage = step % kStages;
      if (tiles.are_left()) memory.gradients_are_there(stage).wait(parity_of(step));
      start_wide_scores<T, Memory::kValueDim>(gradients, memory.values(), memory.gradients(stage));
    };
    start_gradients(0);
#pragma unroll 1
    for (; tiles.are_left(); ++step) {
      const int stage = step % kStages;
      typename Excluding::Panels excluded;
      find_excluded(excluded, tiles.head, tiles.query);
      tiles.advance(params, batch, first_key);
      load_excluded();
      memory.queries_are_there(stage).wait(parity_of(step));
      memory.weights_are_there().wait(step & 1);
      Pack<__half, 8> eights[4];
      uint32_t any = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_four(eights[i].words,
                  memory.weights() + i * Memory::kEightBytes + threadIdx.x % 128 * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) any ^= eights[i].words[j];
      }
      wait_for_loads(any);
      if (lane == 0) memory.weights_are_used().arrive();
      wait_for_products<0>();
      touch(gradients);
      const RowOfBackward* const rows = rows_of(stage);
      bool is_finite = true;
#pragma unroll
      for (int column = 0; column < 16; ++column) {
        const float delta = rows[column_offset(column / 2, column)].delta;
        is_finite = is_finite && fabsf(delta) < INFINITY;
#pragma unroll
        for (int i = column % 2; i < 4; i += 2) {
          const float weight = eights[column / 4][column / 2 % 2 * 4 + i] * (1 / kPassedWeight);
          float& gradient = gradients[column / 2][i];
          gradient = score_gradient<!kIsUnmasked>(gradient, weight, delta, params.dropout.factor);
        }
      }
      // sm80/backward_tile.cuh says why.
      if (!is_finite) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          if (eights[i / 8][i % 8] == 0.f) gradients[i / 4][i % 4] = 0.f;
        }
      }
      excluded[0].apply(reinterpret_cast<Accumulators<1, 8>&>(gradients), 0.f);
      memory.scores_are_used().wait((step & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        as_matrix_a<T>(rounded[i], gradients, i);
        store_matrices_transposed(first_score + i * 16 * 128, rounded[i]);
      }
      publish_writes();
      __syncwarp();  // all lanes have written theirs
      if (lane == 0) memory.scores_are_there().arrive();
      start_wide_sum<T>(key_gradient, rounded, memory.queries(stage));
      start_gradients(step + 1);
      wait_for_products<1>();
      touch(key_gradient);
      __syncwarp();
      if (lane == 0) memory.stage_is_used(stage).arrive();
    }
    wait_for_products<0>();
    touch(gradients);
    store(key_gradient, Memory::kKeyResultsAt, params.scale, params.key_gradient, params.head_dim);
  }
#endif
}

}  // namespace megasoftmax
