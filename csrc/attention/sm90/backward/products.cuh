#pragma once
// A warpgroup of Hopper's backward: products of its 64 keys with the queries of a tile, weights,
// gradients of scores, and the sums of gradients of keys and values. It makes a part of dQ from all
// keys of the block.

#include "../../../common/math.cuh"
#include "../../bias.cuh"
#include "../../dropping.cuh"
#include "../../exclusion.cuh"
#include "../../sm80/tile.cuh"
#include "../../turns.cuh"
#include "../kept_bits.cuh"
#include "block.cuh"
#include "capped_weights.cuh"
#include "tile_steps.cuh"

namespace megasoftmax {

template <class T, HopperBias kBias, HopperMask kMask, bool kHasTurns, int kIndex>
template <int kSumColumns>
__device__ __forceinline__ void HopperBackward<T, kBias, kMask, kHasTurns, kIndex>::multiply(
    const AttentionBackwardParams& params, const BackwardTensorMaps& maps, const Memory& memory,
    const BiasGradientSums<kBias>& bias_sums, const Block& block, int warpgroup) {
  const int first_key = block.first_key, key_head = block.key_head, batch = block.batch;
  auto tiles = block.tiles;
  extern __shared__ __align__(1024) char shared_memory[];
  constexpr int kN = kQueries / 8, kSteps = kQueries / 16;
  constexpr bool kHasSoftcap = kBias == HopperBias::kSoftcap;
  constexpr bool kIsStaggered = Memory::kIsStaggered;
  static_assert(!kMasksKeys || !kHasSoftcap);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_in_group = static_cast<int>(threadIdx.x) / 32 % 4;
  const bool is_first_of_group = threadIdx.x % 128 == 0;
  const int group_key = first_key + 64 * warpgroup;
  const int warp_key = group_key + 16 * warp_in_group;
  // The 64 queries and columns of dQ that this warpgroup makes.
  const int query_panel = Memory::query_panel(warpgroup);
  const int column_panel = Memory::column_panel(warpgroup);
  char* const sums = shared_memory + Memory::kSumsAt + warpgroup * Memory::kSumBytes;

  float key_gradient[kDim / 8][4] = {}, value_gradient[Memory::kValueDim / 8][4] = {};
  float weights[kN][4], gradients[kN][4];
  // Weights are multiplied at once, if registers allow it.
  constexpr bool kIsEarly = kQueries <= 64 && (kDim < 128 || Memory::kTile.registers > 232);
  // With capped scores and 128 queries a tile registers are few. So products for gradients of
  // weights start after weights are multiplied.
  constexpr bool kIsLate = kHasSoftcap && kQueries > 64;
  uint32_t rounded_weights[kSteps][4], rounded_gradients[kSteps][4];

  // With masks of pairs, ranges and dropout a head dimension of 64 lacks registers.
  constexpr bool kHoldsColumns = !kHasSoftcap && (kIsUnmasked || kDim != 64);
  HeldColumns<kHoldsColumns ? Memory::kTile.held_key_steps : 0> held_keys;
  HeldColumns<kHoldsColumns ? Memory::kTile.held_value_steps : 0> held_values;
  const auto hold = [&]<int kHeldSteps>(HeldColumns<kHeldSteps>& held, uint32_t panels) {
#pragma unroll
    for (int i = 0; i < kHeldSteps; ++i)
      FragmentsDown<Tile<T, kKeys, 64>>({panels + i / 4 * Memory::kKeyPanelBytes},
                                        64 * warpgroup + 16 * warp_in_group)
          .load(held.steps[i], 0, i % 4 * 16);
  };
  // Starts products of this warpgroup's keys with queries, and of its values with gradients of
  // outputs.
  const auto start_scores = [&](uint32_t queries) {
    const uint32_t keys = memory.keys() + warpgroup * 64 * 128;
    begin_products();
    start_product_of_rows<T, kDim>(weights, held_keys, matrix_at(keys, 16), Memory::kKeyPanelBytes,
                                   matrix_at(queries, 16), Memory::kQueryPanelBytes);
    end_products();
  };
  const auto start_weight_gradients = [&](uint32_t output_gradients) {
    const uint32_t values = memory.values() + warpgroup * 64 * 128;
    begin_products();
    start_product_of_rows<T, Memory::kValueDim>(
        gradients, held_values, matrix_at(values, 16), Memory::kKeyPanelBytes,
        matrix_at(output_gradients, 16), Memory::kQueryPanelBytes);
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
  const auto start_query_gradient = [&](float (&sum)[kSumColumns / 8][4], uint32_t scores) {
    const uint64_t a = matrix_at(scores + query_panel * 64 * 128, 16),
                   b = matrix_at(memory.keys() + column_panel * Memory::kKeyPanelBytes, 16);
    begin_products();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      start_product<T, true>(sum, moved(a, step / 4 * Memory::kScorePanelBytes + step % 4 * 32),
                             moved(b, step * 16 * 128), step > 0);
    end_products();
  };
  ExcludedOfTile<kQueries, kIsUnmasked> excluding(params, batch, group_key, warp_key);
  // If all queries share the bits of a key, each warp writes the bits of its keys once for all
  // tiles of a head.
  const bool shares_bits =
      !kIsUnmasked && excluding.has_bits() && !params.block_mask.layout.has_bits_by_key();
  [[maybe_unused]] int head_of_bits = -1;
  const auto masked_of = [&](int stage, int panel, int half) -> uint2& {
    return Memory::masked(shared_memory, stage, warpgroup,
                          panel)[16 * warp_in_group + FirstElement().row + 8 * half];
  };
  const auto write_shared_bits = [&](int head) {
    typename ExcludedOfTile<kQueries, kIsUnmasked>::Masked masked;
    excluding.load_masked(masked, head, 0);
#pragma unroll
    for (int i = 0; i < kStages * Memory::kQueryPanels * 2; ++i)
      masked_of(i % kStages, i / kStages / 2, i / kStages % 2) = masked[i / kStages % 2];
    head_of_bits = head;
    __syncwarp();
  };
  // The pairs of rows of a stage.
  const auto pairs_of = [&](int stage) {
    return reinterpret_cast<const PairOfRows*>(shared_memory + Memory::kPairsAt +
                                               stage * Memory::kPairsBytes);
  };
  const auto are_plain = [&](int stage) {
    bool is_plain = true;
#pragma unroll
    for (int i = 0; i < kQueries / 2; i += 32)
      is_plain &= pairs_of(stage)[i + thread_index_anew() % 32].is_plain();
    return __all_sync(~0u, is_plain) != 0;
  };
  // Gradients of scores of this warpgroup's keys.
  using Panel = Tile<T, kQueries, 64>;
  const auto panel_of = [&](int buffer) {
    return Panel{memory.scores(buffer) + warpgroup * Memory::kScorePanelBytes};
  };
  // Which weights dropout keeps. The bits of a tile are read before the warpgroups meet, and those
  // of the next tile are written after that.
  const bool exchanges_bits = Memory::kExchangesBits && !kIsUnmasked && params.dropout.is_given();
  [[maybe_unused]] KeptBits::OfLane kept;
  const auto make_bits = [&] {
    if (exchanges_bits && tiles.are_left())
      memory.bits(warpgroup).make(Dropping<true>(params, batch, tiles.head), tiles.query, group_key,
                                  warp_in_group);
  };
  // Products leave little of the bandwidth of shared memory. So the offsets of the first columns
  // are loaded before weights are made, if registers have room: in a tile of 64 queries before
  // products start, else while they run.
  constexpr int kEightsAhead = is_bias(kBias) || kHasSoftcap ? 0 : 3;
  PairOfRows ahead[std::max(kEightsAhead, 1)];
  // Of this lane's two columns of 8: the offsets, and the deltas.
  const auto load_offsets = [&](int stage) {
    const PairOfRows* const pairs = pairs_of(stage) + FirstElement().column / 2;
#pragma unroll
    for (int i = 0; i < 2 * kEightsAhead; ++i)
      ahead[i / 2].offsets[i % 2] = pairs[4 * (i / 2)].offsets[i % 2];
  };
  const auto load_deltas = [&](int stage) {
    const PairOfRows* const pairs = pairs_of(stage) + FirstElement().column / 2;
#pragma unroll
    for (int i = 0; i < 2 * kEightsAhead; ++i)
      ahead[i / 2].deltas[i % 2] = pairs[4 * (i / 2)].deltas[i % 2];
  };
  // With a mask of keys: whether it excludes this lane's keys 0 and 8.
  [[maybe_unused]] bool is_masked[2] = {};
  // Clears the rows of keys and values that a mask of keys excludes, so that what was there makes
  // no NaN of a weight of 0.
  const auto clear_masked = [&] {
    if (params.block_mask.words == nullptr) return;
    const BlockMaskLayout& layout = params.block_mask.layout;
    const uint32_t bits =
        __ldg(params.block_mask.of(batch, tiles.head) + layout.bits() + warp_key / 32) >>
        warp_key % 32;
    const int row = FirstElement().row;
    is_masked[0] = (bits >> row & 1) != 0;
    is_masked[1] = (bits >> row >> 8 & 1) != 0;
    for (int i = lane; i < 16 * 8; i += 32) {
      if ((bits >> i / 8 & 1) == 0) continue;
      const uint32_t at = (64 * warpgroup + 16 * warp_in_group) * 128 + 16 * i;
#pragma unroll
      for (int panel = 0; panel < Memory::kPanels; ++panel)
        store_four(memory.keys() + panel * Memory::kKeyPanelBytes + at, {0, 0, 0, 0});
#pragma unroll
      for (int panel = 0; panel < Memory::kValuePanels; ++panel)
        store_four(memory.values() + panel * Memory::kKeyPanelBytes + at, {0, 0, 0, 0});
    }
    publish_writes();
    sync_warpgroups<kWarpgroups>();
  };
  // The bias of this lane's keys 0 and 8 in a head, and sums of the gradients of their scores.
  constexpr bool kHasKeyBias = kBias == HopperBias::kKeys;
  const bool sums_keys = kHasKeyBias && params.bias_gradient_kind == BiasGradient::kKeys;
  [[maybe_unused]] int head_of_bias = -1;
  [[maybe_unused]] float key_bias[2], key_sums[2];
  // Whether all biases of this warp's keys are at most kMostKeyBias or -infinity.
  [[maybe_unused]] bool is_key_bias_small = true;
  const auto end_head = [&] {
    if (!sums_keys || head_of_bias < 0) return;
    const int key = warp_key + FirstElement().row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(key_sums[half]);
      if (FirstElement().column == 0 && key + 8 * half < params.keys)
        static_cast<float*>(
            params.bias_gradient)[(batch * params.heads + head_of_bias) * params.keys + key +
                                  8 * half] = sum;
    }
  };
  const auto begin_head = [&](int head) {
    end_head();
    head_of_bias = head;
    const BiasRows<T> rows(params, batch, head);
    const int key = warp_key + FirstElement().row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      key_bias[half] = rows(0, min(key + 8 * half, params.keys - 1));
      key_sums[half] = 0.f;
    }
    const auto is_small = [](float bias) {
      return fabsf(bias) <= kMostKeyBias || bias == -INFINITY;
    };
    is_key_bias_small = __all_sync(~0u, is_small(key_bias[0]) && is_small(key_bias[1])) != 0;
  };
  // Loaded once. Otherwise each tile would wait for it.
  const uint64_t seed = kIsUnmasked || Memory::kExchangesBits ? 0 : Dropping<true>::seed(params);
  using Scores = Accumulators<1, kN>;
  // Turns products into weights, capped ones times slopes. Dropped weights become negative.
  const auto make_weights = [&](int stage, int step, int head, int query, bool is_plain) {
    if constexpr (kHasTile) memory.bias_is_there(step % 2).wait(step / 2 & 1);
    const auto add_bias_of_tile = [&] {
      if constexpr (kHasTile) {
        add_bias(reinterpret_cast<Scores&>(weights), params.logit_scale,
                 TileBias<T, true, Panel>(panel_of(step % 2), 0, 16 * warp_in_group));
      } else if constexpr (kHasTable) {
        add_bias(reinterpret_cast<Scores&>(weights), params.logit_scale,
                 DiagonalBias(Memory::diagonals(shared_memory, stage),
                              64 * warpgroup + 16 * warp_in_group));
      }
    };
    const float to_logit = is_bias(kBias) ? 1.f : params.logit_scale;
    const PairOfRows* const pairs = pairs_of(stage) + FirstElement().column / 2;
    const auto offset_of = [&](int column) {
      return column < 2 * kEightsAhead ? ahead[column / 2].offsets[column % 2]
                                       : pairs[4 * (column / 2)].offsets[column % 2];
    };
    if constexpr (kHasSoftcap) {
      weigh_capped<T>(params, weights, rounded_weights, offset_of);
    } else {
      const auto weigh = [&] {
        const float key_offsets[2] = {kHasKeyBias ? key_bias[0] * kLog2E : 0.f,
                                      kHasKeyBias ? key_bias[1] * kLog2E : 0.f};
#pragma unroll
        for (int column = 0; column < 2 * kN; ++column) {
          const float offset = offset_of(column);
#pragma unroll
          for (int i = column % 2; i < 4; i += 2) {
            float& weight = weights[column / 2][i];
            const float rest = kHasKeyBias ? key_offsets[i / 2] - offset : -offset;
            weight = exp2_approximate(fmaf(weight, to_logit * kLog2E, rest));
            if (kMasksKeys && is_masked[i / 2]) weight = 0.f;
          }
        }
      };
      // kArePlain: offsets are not large, but the bias of keys is. Otherwise differences of logits
      // are taken before anything else is rounded.
      const auto weigh_exactly = [&]<bool kArePlain>() {
        const RowOfBackward* const rows =
            params.rows_of_backward + params.row_index(batch, head, 0);
#pragma unroll
        for (int column = 0; column < 2 * kN; ++column) {
          float max = 0.f, log2_sum;
          if constexpr (kArePlain) {
            log2_sum = offset_of(column);
          } else {
            const RowOfBackward& row =
                rows[min(query + FirstElement().column + column_offset(column / 2, column),
                         params.queries - 1)];
            max = row.max;
            log2_sum = row.log2_sum;
          }
#pragma unroll
          for (int i = column % 2; i < 4; i += 2) {
            float& weight = weights[column / 2][i];
            const float relative = kHasKeyBias ? fmaf(weight, to_logit, key_bias[i / 2]) - max
                                               : fmaf(weight, to_logit, -max);
            weight = exp2_approximate(fmaf(relative, kLog2E, -log2_sum));
            if (kMasksKeys && is_masked[i / 2]) weight = 0.f;
          }
        }
      };
      // A bias of pairs is added in both branches, so that none parts it from the weights: the
      // compiler fills waits of one with instructions of the other.
      if (is_plain && is_key_bias_small) {
        add_bias_of_tile();
        weigh();
      } else if (!is_plain) {
        add_bias_of_tile();
        weigh_exactly.template operator()<false>();
      } else {
        weigh_exactly.template operator()<true>();
      }
    }
    if (kIsUnmasked || !params.dropout.is_given()) return;
    if constexpr (Memory::kExchangesBits) {
      kept.for_each([&](int n, int i, bool is_kept) {
        if (!is_kept) weights[n][i] = -weights[n][i];
      });
    } else {
      const Dropping<true> dropping(params, batch, head, seed);
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
    if constexpr (!kHasSoftcap) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        as_matrix_a<T, !kIsUnmasked>(rounded_weights[step], weights, step);
    }
    start_value_gradient(memory.gradients(stage));
  };
  // Turns gradients of weights into gradients of logits, or of capped products but for the scale.
  const auto find_score_gradients_of = [&](int stage, bool is_plain) {
    const PairOfRows* const pairs = pairs_of(stage) + FirstElement().column / 2;
    float check = 0.f;  // with masks, ranges or dropout: not 0 if a gradient is not finite
    with_dropout<kIsUnmasked>(params, [&]<bool kMayDrop>() {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const PairOfRows& pair = n < kEightsAhead ? ahead[n] : pairs[4 * n];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float delta = pair.deltas[i % 2];
          float& gradient = gradients[n][i];
          gradient =
              score_gradient<kMayDrop>(gradient, weights[n][i], delta, params.dropout.factor);
          if constexpr (!kIsUnmasked) check = fmaf(gradient, 0.f, check);
        }
      }
    });
    // sm80/backward_tile.cuh says why.
    if (kIsUnmasked ? !is_plain : check != 0.f) {
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i) {
        if (weights[i / 4][i % 4] == 0.f) gradients[i / 4][i % 4] = 0.f;
      }
    }
  };
  // Writes gradients of scores to where products of both warpgroups read them.
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
  if (kMasksKeys && tiles.are_left()) clear_masked();
  hold(held_keys, memory.keys());
  hold(held_values, memory.values());
  int step = 0;
  const bool adds_itself = !has_adding_warps(bias_sums);
  [[maybe_unused]] uint32_t* taken = nullptr;  // the turn of the step before
  const auto end_turn = [&] {
    if (!kHasTurns || taken == nullptr) return;
    wait_for_stores();
    publish_writes_to_others();
    pass_turn(taken);
  };
  const auto hand_over_sums = [&](int head, int query) {
    if (is_first_of_group) Memory::tile_of_sums(shared_memory, warpgroup) = make_int2(head, query);
    __syncwarp();
    if (lane == 0) memory.sums_are_there(warpgroup).arrive();
  };
  // Adds dQ of a step. Calls start_others(), which starts a group of products, while those of dQ
  // run.
  const auto add_query_gradient = [&](int step, int head, int query, auto&& start_others) {
    if constexpr (kIsStaggered) memory.gradients_are_there(step % 2).wait(step / 2 & 1);
    float query_gradient[kSumColumns / 8][4];
    start_query_gradient(query_gradient, memory.scores(step % 2));
    start_others();
    if (kHasTurns && adds_itself) {  // while products run, and by two warps
      uint32_t* const turn = turn_of<kQueries>(params, batch, head, query, warpgroup);
      if (is_first_of_group) end_turn();
      if (threadIdx.x % 128 == 32)
        wait_for_turn(turn, turns_before<kKeys, kQueries, kIsUnmasked, false>(params, batch, head,
                                                                              query, first_key));
      taken = turn;
    }
    if (kIsStaggered && adds_itself && is_first_of_group) wait_for_reads_of_stores();
    wait_for_products<1>();
    touch(value_gradient);
    touch(query_gradient);
    if (kIsStaggered && lane == 0) memory.scores_are_used(step % 2).arrive();
    // Waits until the place of the sums is free.
    if (!adds_itself) {
      memory.sums_are_used(warpgroup).wait((step & 1) ^ 1);
    } else if constexpr (kIsStaggered) {
      sync_warpgroup(warpgroup);
    }
#pragma unroll
    for (int side = 0; side < divide_up(kSumColumns, 32); ++side)
      store_sums(sums + side * Memory::kSumPanelBytes, query_gradient, side);
    publish_writes();
    if (!adds_itself) {
      hand_over_sums(head, query);
      if (exchanges_bits) sync_warpgroup(warpgroup);  // bits of the next tile are there
      return;
    }
    sync_warpgroup(warpgroup);
    if (!is_first_of_group) return;
    if (kHasTurns) publish_writes_to_others();
    start_sums<false>(maps, memory, warpgroup, head, query,
                      params.batch_of_sums(batch, first_key / kKeys));
  };
  [[maybe_unused]] int head_before = 0, query_before = 0;
  if (kIsStaggered && warpgroup > 0 && tiles.are_left()) memory.first_weights_are_there().wait(0);
#pragma unroll 1
  for (; tiles.are_left(); ++step) {
    const int stage = step % kStages, head = tiles.head, query = tiles.query;
    if (shares_bits && head != head_of_bits) write_shared_bits(head);
    if (kHasKeyBias && head != head_of_bias) begin_head(head);
    memory.stage_is_there(stage).wait(step / kStages & 1);
    constexpr bool kLoadsFirst = kEightsAhead > 0 && kQueries <= 64;
    if constexpr (kLoadsFirst) load_offsets(stage);
    start_scores(memory.queries(stage));
    if constexpr (!kIsLate) start_weight_gradients(memory.gradients(stage));
    tiles.advance(params, batch, first_key);
    // Rows of the bias come to the place of the gradients of the step before. Warps that bring them
    // take longer than copies, so they begin as soon as the last product and copy have read these,
    // while all products of this step run.
    if constexpr (Memory::kIsRows) {
      if (step > 0 && is_first_of_group) {
        wait_for_reads_of_stores();
        memory.scores_are_used((step - 1) % 2).arrive();
      }
    }
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
    if constexpr (kEightsAhead > 0 && !kLoadsFirst) load_offsets(stage);
    const bool is_plain = are_plain(stage);
    wait_for_products<kIsLate ? 0 : 1>();
    touch(weights);
    make_weights(stage, step, head, query, is_plain);
    if (kIsStaggered && step == 0 && warpgroup == 0 && lane == 0)
      memory.first_weights_are_there().arrive();
    exclude(excluded, weights);
    if constexpr (kHasSoftcap) {
#pragma unroll
      for (int panel = 0; panel < Memory::kQueryPanels; ++panel)
        excluded[panel].clear_pairs(
            reinterpret_cast<uint32_t (&)[4][4]>(rounded_weights[panel * 4]));
      if (!kIsUnmasked && params.dropout.is_given()) clear_dropped(rounded_weights, weights);
    }
    if constexpr (kEightsAhead > 0) load_deltas(stage);
    if constexpr (kIsEarly || kIsLate) multiply_weights_of(stage);
    if constexpr (kIsLate) start_weight_gradients(memory.gradients(stage));
    wait_for_products<kIsEarly ? 1 : 0>();
    if constexpr (kIsLate) touch(value_gradient);
    touch(gradients);
    find_score_gradients_of(stage, is_plain);
    if constexpr (kIsUnmasked) exclude(excluded, gradients);  // of few tiles
    if (sums_keys) {
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i) key_sums[i % 4 / 2] += gradients[i / 4][i % 4];
    }
    if constexpr (!kIsEarly && !kIsLate) multiply_weights_of(stage);
    if constexpr (kIsStaggered) memory.scores_are_used(step % 2).wait((step / 2 & 1) ^ 1);
    share_gradients(step % 2);
    publish_writes();
    if constexpr (kIsStaggered) {
      __syncwarp();
      if (lane == 0) memory.gradients_are_there(step % 2).arrive();
    } else {
      if (is_first_of_group) wait_for_reads_of_stores();
      // All gradients of scores are there. All are done with the step before, so its buffer is
      // free.
      sync_warpgroups<kWarpgroups>();
    }
    if constexpr (kHasTile) {
      if (!Memory::kIsRows && step > 0 && warpgroup == 0 && is_first_of_group)
        memory.scores_are_used((step - 1) % 2).arrive();
      if (params.bias_gradient_kind == BiasGradient::kDense && is_first_of_group) {
        start_store_of_box(maps.bias_gradient, panel_of(step % 2).address, group_key, query, head,
                           batch);
        if (!adds_itself) end_stores();  // else with the sums that follow
      }
    }
    if ((bias_sums.is_added || bias_sums.is_in_cluster) && warpgroup == 0 && is_first_of_group)
      memory.gradients_are_there(step % 2).arrive();
    const auto start_others = [&] {
      start_key_gradient(memory.queries(stage));
      if (kIsStaggered && exchanges_bits) sync_warpgroup(warpgroup);  // all have read theirs
      make_bits();
    };
    if constexpr (!kIsStaggered) {
      add_query_gradient(step, head, query, start_others);
    } else if (step > 0) {
      add_query_gradient(step - 1, head_before, query_before, start_others);
    } else {
      start_others();
      if (exchanges_bits) sync_warpgroup(warpgroup);
    }
    head_before = head;
    query_before = query;
    wait_for_products<0>();
    touch(value_gradient);
    touch(key_gradient);
    __syncwarp();  // all lanes have read its rows
    if (lane == 0) memory.stage_is_used(stage).arrive();
  }

  if (kIsStaggered && step > 0) {
    // An empty group stands for that of dK, and its end too is waited for.
    add_query_gradient(step - 1, head_before, query_before, end_products);
    wait_for_products<0>();
  }
  if (kHasTile && !Memory::kIsRows && step > 0 && warpgroup == 0 && is_first_of_group)
    memory.scores_are_used((step - 1) % 2).arrive();

  end_head();
  if (!adds_itself) {
    memory.sums_are_used(warpgroup).wait((step & 1) ^ 1);
    hand_over_sums(-1, 0);  // there are no more
    if (kHasTile && is_first_of_group) wait_for_reads_of_stores();
  } else {
    if (is_first_of_group) {
      wait_for_reads_of_stores();
      end_turn();
    }
    sync_warpgroup(warpgroup);
  }
  // Both results take the same rows of a tile, so that a warp overwrites only what it wrote.
  using Rows = Tile<T, 64, 64 * Memory::kPanels>;
  const auto store = [&]<int kColumns>(const float (&results)[kColumns][4], float factor,
                                       const Strided& tensor, int width) {
    store_rows<T, Rows>(sums, 16 * warp_in_group, results, {factor, factor},
                        tensor.row<T>(batch, key_head, group_key), tensor.query_stride,
                        params.keys - group_key, width);
  };
  store(value_gradient, kIsUnmasked ? 1.f : params.dropout.factor, params.value_gradient,
        params.value_dim);
  __syncwarp();  // its rows were read
  store(key_gradient, params.scale, params.key_gradient, params.head_dim);
}

}  // namespace megasoftmax
