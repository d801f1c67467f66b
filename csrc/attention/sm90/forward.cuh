#pragma once
// Attention on Hopper, by products of warpgroups and tensor copies. sm80/forward.cuh has the
// formula.
//
// A block takes one tile of queries, or several one after the other. Its first warpgroup copies,
// ahead over the end of a tile, see forward/copy.cuh. Each other warpgroup has 64 queries. It
// starts the product with the next keys, then the product of the weights before with their values,
// and makes weights while the latter runs.

#include "../../common/vector.cuh"
#include "../bias.cuh"
#include "../dropping.cuh"
#include "../online_softmax.cuh"
#include "../parts.cuh"
#include "../sm80/tile.cuh"
#include "../softcap.cuh"
#include "forward/block.cuh"
#include "forward/copy.cuh"
#include "forward/find_and_fill.cuh"
#include "forward/memory.cuh"

namespace megasoftmax {

template <class T, HopperBias kBias, HopperMask kMask, int kIndex>
__global__ void __launch_bounds__(HopperMemory<kBias, kIndex>::kThreads, 1)
    attention_hopper_forward_kernel(const __grid_constant__ AttentionForwardParams params,
                                    const __grid_constant__ TensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Memory = HopperMemory<kBias, kIndex>;
  using Roles = HopperForward<T, kBias, kMask, kIndex>;
  constexpr bool kIsUnmasked = Roles::kIsUnmasked;
  extern __shared__ __align__(1024) char shared_memory[];
  const Memory memory{shared_address(shared_memory)};
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128)) - 1;

  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.query, &maps.key, &maps.value, &maps.output})
      prefetch_map(*map);
    if constexpr (is_dense(kBias)) prefetch_map(maps.bias);
    memory.init_barriers(kIsUnmasked, Roles::kMasksKeys);
  }
  if constexpr (Roles::kMasksKeys) {
    constexpr int kThreads = Memory::kThreads;
    const int thread = static_cast<int>(threadIdx.x);
    for (int at = 16 * thread; at < Memory::kOnesAt - Memory::kMaskedAt; at += 16 * kThreads)
      store_four(memory.masked(0) + at, {0, 0, 0, 0});
    RowsOfKeys<T, Memory::kKeys, Roles::kBiasesKeys>::store_ones(memory.ones());
    publish_writes();
  }
  if constexpr (Memory::kIsRows) {
    for (int at = 4 * static_cast<int>(threadIdx.x); at < Memory::kBiasRowBytes;
         at += 4 * Memory::kThreads)
      store_word(memory.zeros() + at, 0);
  }
  __syncthreads();
  using Tiles = typename Roles::Tiles;
  using Queries = typename Roles::Queries;
  constexpr int kDim = Memory::kDim, kKeys = Memory::kKeys, kQueries = Memory::kQueries;
  constexpr int kStages = Memory::kStages, kWarpgroups = Memory::kWarpgroups;
  constexpr bool kHasBias = is_bias(kBias), kHasTile = is_dense(kBias);
  WorkOfBlock work(params);
  if (warpgroup < 0) {
    give_registers<Memory::kTile.copier_registers>();
    Roles::copy(params, maps, memory, work);
    return;
  }
  take_registers<Memory::kTile.registers>();
  uint32_t first_step = 0;  // steps of the tiles of queries before
  constexpr int kN = kKeys / 8, kColumns = Memory::kValueDim / 8, kSteps = kKeys / 16;
  constexpr bool kMayPingPong =
      kKeys > kMaskTile && (kIsUnmasked || !kHasBias || (kHasTile && kWarpgroups == 2));
  // Registers have room for the next weights beside those that a product reads.
  constexpr bool kHasRoom =
      kWarpgroups == 2 && Memory::kValueDim < 256 && !(kHasTile && kKeys > kMaskTile);
  constexpr bool kCaps = kBias == HopperBias::kSoftcap;
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

  // Ping-pong at the products of queries and keys, once for each tile of keys, also those that a
  // warpgroup skips. So one warpgroup makes weights while another has products. Without it all make
  // weights at the same time, and then all wait for products.
  // With a mask of keys all warpgroups see the same tiles.
  const bool skips_tiles =
      params.block_mask.words != nullptr && params.block_mask.layout.bit_rows != 1;
  const bool is_ping_pong = kMayPingPong && (kHasTile || !skips_tiles);
  const auto wait_for_others = [&] {
    if (is_ping_pong) wait_in_ping_pong<kWarpgroups>(warpgroup);
  };
  const auto pass_to_next = [&] {
    if (is_ping_pong) pass_in_ping_pong<kWarpgroups>(warpgroup);
  };
  if (warpgroup == kWarpgroups - 1) pass_to_next();

  // Loaded once. Otherwise each tile would wait for it.
  const uint64_t seed = kIsUnmasked ? 0 : Dropping<false>::seed(params);
  int number;
  for (int done = 0; Roles::may_come(work, memory.queries_are_there(), done, number);
       work.advance()) {
    if (kIsUnmasked && !work.is_left()) continue;
    const int turn = done;
    const auto& assigned = Memory::assignment(shared_memory, turn);
    const Queries queries = Roles::queries_of(params, work, assigned);
    const int head = queries.head_of(warpgroup), group_query = queries.query_of(params, warpgroup);
    const int warp_query = group_query + 16 * warp_in_group;
    // By length, window and range: the keys that all queries of the warpgroup see, and the keys
    // that some of them see. Both are empty without queries.
    int all_visible_begin = 0, all_visible_end = 0;
    KeyRange seen{0, 0};
    if constexpr (!kIsUnmasked) {
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
    OnlineSoftmax<1> softmax(params.logit_scale);
    // With a softcap: no tile had products too large for the polynomial of two terms.
    [[maybe_unused]] bool are_small = true;

    const auto start_scores = [&](int stage) {
      const uint64_t a = matrix_at(memory.queries(turn, warpgroup), 16),
                     b = matrix_at(memory.keys(stage), 16);
      begin_products();
      start_product_of_rows<T, kDim>(scores[0], a, Memory::kQueryPanelBytes, b,
                                     Memory::kPanelBytes);
      if constexpr (Roles::kMasksKeys)
        start_product<T, true>(scores[0], rows_alike_at(memory.ones()),
                               matrix_at(memory.masked(stage), Memory::kMaskedPanelBytes), true);
      end_products();
    };
    const auto start_output = [&](int stage) {
      const uint64_t b = matrix_at(memory.values(stage), Memory::kPanelBytes);
      begin_products();
      start_sum_of_products<T>(output[0], weights, b);
      end_products();
    };
    // If registers have room, a tile of the bias is loaded while products run, and its place is
    // released at once. Else each half of the rows is loaded when its logits are made. Then the
    // tile is released after the vote of the warp on the largest logits: all lanes have read theirs
    // by then, and it takes no registers.
    constexpr bool kLoadsBiasAhead = kHasTile && Memory::kBiasStages == 1;
    [[maybe_unused]] Pack<T> bias[2][kN / 4];
    const auto wait_for_bias = [&](const Tiles& tiles) {
      const int stage = tiles.step % Memory::kBiasStages;
      memory.bias_is_there(stage, warpgroup).wait(tiles.step / Memory::kBiasStages & 1);
      return stage;
    };
    // Of rows that begin anywhere: where this lane's first entry lies in a tile. All rows of a lane
    // have one shift, because they are 8 apart.
    [[maybe_unused]] int place_of_row = 0;
    [[maybe_unused]] bool are_even = false;
    if constexpr (Memory::kIsRows) {
      const RowsAnywhere anywhere(params.bias);
      int bias_batch, bias_head;
      params.entry_of_bias(queries.batch, head, bias_batch, bias_head);
      const int64_t offset =
          bias_batch * params.bias.batch_stride + bias_head * params.bias.head_stride;
      place_of_row = (16 * warp_in_group + mine.row) * Memory::kBiasRowBytes +
                     2 * (anywhere.shift(offset, mine.row) + mine.column);
      are_even = ((anywhere.first + offset) | params.bias.query_stride) % 2 == 0;
    }
    // Loads words of a row that begins anywhere, 8 columns apart. Entries of an odd shift lie in
    // two words.
    const auto load_words = [&]<bool kMayBeOdd, int kCount>(int stage, int half, int first,
                                                            uint32_t (&words)[kCount]) {
      const bool is_query = warp_query + mine.row + 8 * half < params.queries;
      const uint32_t place =
          memory.bias(stage, warpgroup) + place_of_row + 8 * half * Memory::kBiasRowBytes;
      const uint32_t from = is_query ? place & ~3u : memory.zeros() + 2 * mine.column;
      uint32_t next[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        words[i] = load_word(from + 16 * (first + i));
        if constexpr (kMayBeOdd) next[i] = load_word(from + 16 * (first + i) + 4);
      }
#pragma unroll
      for (int i = 0; kMayBeOdd && i < kCount; ++i)
        words[i] = __funnelshift_r(words[i], next[i], place % 4 * 8);
    };
    const auto load_bias = [&](int stage, int half) {
      if constexpr (Memory::kIsRows) {
        const auto load = [&]<bool kMayBeOdd>() {
#pragma unroll
          for (int n = 0; n < kN; n += 4)
            load_words.template operator()<kMayBeOdd>(stage, half, n, bias[half][n / 4].words);
        };
        are_even ? load.template operator()<false>() : load.template operator()<true>();
      } else {
        using Panel = Tile<T, 64, 64>;
        const uint32_t first =
            memory.bias(stage, warpgroup) + Panel::offset(16 * warp_in_group + lane % 8, lane / 8);
#pragma unroll
        for (int n = 0; n < kN; n += 4)
          load_matrices(
              bias[half][n / 4].words,
              (first ^ n % 8 * 16) + half * 8 * Panel::kRowBytes + n / 8 * Memory::kBiasPanelBytes);
      }
    };
    const auto load_bias_ahead = [&](const Tiles& tiles) {
      const int stage = wait_for_bias(tiles);
      uint32_t words = 0;  // one of each load
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_bias(stage, half);
#pragma unroll
        for (int i = 0; i < kN; i += Memory::kIsRows ? 1 : 4)
          words |= bias[half][i / 4].words[i % 4];
      }
      wait_for_loads(words);
      release(memory.bias_is_used(stage, warpgroup));
    };
    // Turns scores of a half of the rows into logits.
    const auto add_bias_of = [&](const Tiles& tiles, int half) {
      if constexpr (!kLoadsBiasAhead)
        load_bias(half == 0 ? wait_for_bias(tiles) : tiles.step % Memory::kBiasStages, half);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[0][n][2 * half + i];
          score = fmaf(score, params.logit_scale, bias[half][n / 4][n % 4 * 2 + i]);
        }
      }
    };
    // As add_bias_of, of rows that begin anywhere. Registers have room for 8 words beside scores,
    // sums and weights.
    const auto add_rows_anywhere = [&](int stage, int half) {
      const auto add = [&]<bool kMayBeOdd>() {
        constexpr int kAtATime = kMayBeOdd ? 4 : 8;
#pragma unroll
        for (int first = 0; first < kN; first += kAtATime) {
          Pack<T, 2 * kAtATime> pack;
          load_words.template operator()<kMayBeOdd>(stage, half, first, pack.words);
#pragma unroll
          for (int i = 0; i < 2 * kAtATime; ++i) {
            float& score = scores[0][first + i / 2][2 * half + i % 2];
            score = fmaf(score, params.logit_scale, pack[i]);
          }
        }
      };
      are_even ? add.template operator()<false>() : add.template operator()<true>();
    };
    // Products leave little of the bandwidth of shared memory. So three warpgroups load the first
    // entries of a table while products run.
    constexpr bool kLoadsPairsAhead = Memory::kIsTable && kWarpgroups > 2;
    [[maybe_unused]] DiagonalPairs<kN, kIsUnmasked ? 6 : 4> pairs;
    const auto load_pairs_ahead = [&](const Tiles& tiles) {
      pairs.load(Memory::diagonals(shared_memory, wait_for_bias(tiles)),
                 64 * warpgroup + 16 * warp_in_group);
    };
    const auto add_all_bias_of = [&](const Tiles& tiles) {
      if constexpr (kLoadsPairsAhead) {
        pairs.add_to(scores[0], params.logit_scale);
      } else if constexpr (Memory::kIsTable) {
        const int stage = wait_for_bias(tiles);
        add_bias(scores, params.logit_scale,
                 DiagonalBias(Memory::diagonals(shared_memory, stage),
                              64 * warpgroup + 16 * warp_in_group));
      } else if constexpr (Memory::kIsRows && !kLoadsBiasAhead) {
        const int stage = wait_for_bias(tiles);
        add_rows_anywhere(stage, 0);
        add_rows_anywhere(stage, 1);
      } else {
        add_bias_of(tiles, 0);
        add_bias_of(tiles, 1);
      }
    };
    // Whether a tile's bias of keys is large. Then its scores become logits here.
    bool has_large_bias = false;
    const auto add_large_bias = [&](const Tiles& tiles) {
      if constexpr (Roles::kBiasesKeys) {
        const BiasRows<T> rows(params, queries.batch, head);
#pragma unroll
        for (int i = 0; i < 2 * kN; ++i) {
          const int key = tiles.key + mine.column + column_offset(i / 2, i % 2);
          const float bias = rows(0, min(key, params.keys - 1));
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& score = scores[0][i / 2][2 * half + i % 2];
            score = fmaf(score, params.logit_scale, bias);
          }
        }
      }
    };
    // Loads the bits that the mask excludes of this lane's rows of a tile, while products run.
    constexpr int kMaskWords = kKeys / 32;
    [[maybe_unused]] uint32_t masked[2][kMaskWords];
    const auto load_masked = [&](const Tiles& tiles) {
      if constexpr (!kIsUnmasked) {
        const BlockMaskLayout& layout = params.block_mask.layout;
        if (layout.bit_rows == 0) return;
        const uint32_t* const bits = params.block_mask.of(queries.batch, queries.head) +
                                     layout.bits() + static_cast<unsigned>(tiles.key) / 32;
        const int pitch = layout.bit_rows == 1 ? 0 : layout.words_of_bits();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = min(warp_query + mine.row + 8 * half, params.queries - 1);
          start_load(masked[half], bits + int64_t{row} * pitch);
        }
      }
    };
    // Finds what length, window, range and mask exclude of a step, while products run. Unmasked
    // launches find it later. `is_cut`: length, window or range exclude some. Returns whether
    // something may be excluded.
    const auto find_excluded = [&](const Tiles& tiles, bool is_cut, Excluded<1, kN>& excluded) {
      if constexpr (!kIsUnmasked) {
        if (is_cut) {
          const KeyRange* const rows =
              assigned.rows + 64 * warpgroup + 16 * warp_in_group + mine.row;
          const KeyRange ranges[2] = {rows[0], rows[8]};
          excluded.add_words([&](int half, int word) {
            return bits_outside(ranges[half], tiles.key + 32 * word);
          });
        }
        const BlockMaskLayout& layout = params.block_mask.layout;
        if (layout.bit_rows > 0) {
          excluded.add_words([&](int half, int word) { return masked[half][word]; });
        } else if (tiles.may_exclude()) {
          const int line = min(group_query / kMaskTile, layout.query_tiles - 1);
          const int tile = tiles.key / kMaskTile;
          const uint32_t seen =
              __ldg(params.block_mask.of(queries.batch, queries.head) + layout.seen_by_query() +
                    int64_t{line} * layout.words_of_keys() + tile / 32) >>
              tile % 32;
          excluded.add_words([&](int, int word) { return (seen >> word / 2 & 1) - 1; });
        }
        settle(excluded.words);
      }
      return is_cut || tiles.may_exclude();
    };
    // Turns products into weights, and scales the earlier sums, after finish_output has waited for
    // them.
    const auto weigh = [&]<bool kIsFirst>(const Tiles& tiles, bool excludes,
                                          Excluded<1, kN>& excluded, auto&& finish_output) {
      release(memory.keys_are_used(tiles.step % kStages));
      [[maybe_unused]] bool are_large = false;
      const auto make_logits = [&] {
        if constexpr (kCaps) are_large = cap_products<T>(params, scores);
        if constexpr (kHasBias) add_all_bias_of(tiles);
        if (has_large_bias) add_large_bias(tiles);
        if constexpr (Roles::kBiasesKeys) softmax.scale = has_large_bias ? 1.f : params.logit_scale;
        if (!excludes) return;
        if constexpr (kIsUnmasked) {
          excluded.template find<false, true>(params, queries.batch, queries.head, warp_query,
                                              tiles.key, true);
          excluded.apply(scores, -INFINITY);
        } else {
          excluded.apply_all(scores, -INFINITY);
        }
      };
      if constexpr (!kCaps) make_logits();
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
      const bool drops = !kIsUnmasked && params.dropout.is_given();
      const Dropping<false> dropping(params, queries.batch, queries.head, seed);
      if constexpr (!kHasRoom) finish_output();  // the next weights take its registers
      uint32_t next[kSteps][4];
      auto& tried = kHasRoom ? next : weights;
      const auto try_with = [&](auto exponents) {
        if (!drops) return softmax.template try_weights<T, false>(scores, tried, exponents, [] {});
        return softmax.template try_weights<T, true>(
            scores, tried, exponents, [&](int first, float (&some)[4][4]) {
              dropping.clear(some, 0, dropping.pairs(warp_query, tiles.key + 8 * first));
            });
      };
      bool are_right = false;
      if (!kIsFirst && softmax.can_reuse_max && !(kCaps && excludes)) {
        if constexpr (kCaps) {  // scores are capped while weights are made of them
          // All lanes go the same way. If the compiler did not know it, it would spill registers.
          if (uniform(static_cast<uint32_t>(are_small))) {
            are_right = are_small = try_with(CappedExponents<T, 1>(params.softcap));
          } else {
            are_right = try_with(CappedExponents<T, 2>(params.softcap));
          }
        } else {
          are_right = try_with(LinearExponents{(kHasBias ? 1.f : softmax.scale) * kLog2E});
        }
      }
      if (are_right) {
        release_bias();
        if constexpr (kHasRoom) {
          finish_output();
          // There are keys, so this is 0. The compiler does not know it. Otherwise it would put the
          // next weights into the same registers, and products would wait for each other.
          const uint32_t nothing = params.keys < 0;
#pragma unroll
          for (int i = 0; i < 4 * kSteps; ++i)
            weights[i / 4][i % 4] = xor_here(next[i / 4][i % 4], nothing);
        }
        return;
      }
      if constexpr (kCaps) make_logits();
      const float before[2] = {softmax.max[0][0], softmax.max[0][1]};
      factors[0] = factors[1] = 1.f;
      softmax.template weigh<kHasBias, Roles::kMasksKeys>(
          scores, [&](int, int half, float factor) { factors[half] = factor; },
          [&] {
            // Where a score or the bias is infinite or no number, -infinity may have become NaN.
            if (params.mask.data == nullptr) return;
            Excluded<1, kN> by_mask;
            by_mask.add_words([&](int, int word) {
              return excluded_bits(params, queries.batch, head, tiles.key + 32 * word);
            });
            by_mask.apply_all(scores, -INFINITY);
          });
      softmax.decide_reuse(before);
      if (kCaps && (are_large || !takes_small_tanh<T>(params.softcap)))
        softmax.can_reuse_max = false;
      release_bias();
      if constexpr (kHasRoom) finish_output();
      scale_output();
      if (drops) dropping.clear(scores, warp_query, tiles.key);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) as_matrix_a<T>(weights[step], scores[0], step);
    };

    if constexpr (kIsUnmasked) memory.queries_are_there().wait(done & 1);
    ++done;
    Tiles tiles = [&] {
      if constexpr (kIsUnmasked) {
        return Tiles(params, queries, assigned, first_step);
      } else {
        return Tiles(assigned.first_key, first_step);
      }
    }();
    const auto advance = [&] {
      if constexpr (kIsUnmasked) {
        tiles.advance(params, queries, assigned);
      } else {
        tiles.advance();
      }
    };
    const auto read_step = [&] {
      if constexpr (!kIsUnmasked) tiles.read(Memory::step(shared_memory, tiles.step % kStages));
      if constexpr (Roles::kBiasesKeys)
        has_large_bias = Memory::step(shared_memory, tiles.step % kStages) != 0;
    };
    // All lanes have waited before the release: a barrier that goes on without a lane would leave
    // that lane waiting for ever. And all lanes have read what is assigned.
    const auto release_by_all = [&](Barrier used) {
      __syncwarp();
      release(used);
    };
    // Skips tiles up to a key, which only other warpgroups see. It waits for them before it
    // releases them: otherwise it could release one twice before others have released it once.
    const auto pass_tiles = [&](int until) {
      for (; tiles.are_left() && tiles.key < until; advance()) {
        const uint32_t stage = tiles.step % kStages;
        wait_for_others();
        pass_to_next();
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
    // All lanes take the same steps, which the compiler does not see with a mask or a softcap: see
    // go_to.
    const auto step_of = [](const Tiles& tiles) {
      return kIsUnmasked && !kCaps ? tiles.step : uniform(tiles.step);
    };
    const auto is_cut = [&] {
      return tiles.key < all_visible_begin || tiles.key > all_visible_end;
    };
    // The next queries take the place of results: of the tile before, which are still being copied,
    // or of this tile.
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
      wait_for_others();
      start_scores(first % kStages);
      if constexpr (kLoadsBiasAhead) load_bias_ahead(tiles);
      if constexpr (kLoadsPairsAhead) load_pairs_ahead(tiles);
      read_step();
      Excluded<1, kN> excluded;
      const bool excludes = find_excluded(tiles, is_cut(), excluded);
      wait_for_products<0>();
      touch(scores[0]);
      pass_to_next();
      release_results_before();
      weigh.template operator()<true>(tiles, excludes, excluded, [] {});
      for (advance(); tiles.are_left() && tiles.key < seen.end; advance()) {
        const uint32_t step = step_of(tiles), stage = step % kStages, before = step - 1;
        load_masked(tiles);
        wait_for(keys_are_there, step);
        wait_for_others();
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
        pass_to_next();
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
    if constexpr (!kIsUnmasked) {
      memory.wait_until_tile_before_is_done(turn);
      release_by_all(memory.tile_is_done());
    }
    const auto release_results = [&] {
      if constexpr (Memory::kQueryStages == 1) {
        wait_for_copy_of_results();
        release_by_all(memory.queries_are_used());
      }
    };
    first_step = uniform(tiles.step);

    const int64_t first_row = params.row_index(queries.batch, head, warp_query);
    if (params.parts != nullptr) {
      // Computed again: kept, it would take a register of the products.
      const int again = kIsUnmasked ? work.number() : number;
      const TileOfQueries anew(params, kQueries, static_cast<int>(unknown(again)));
      store_parts(params, anew.split, first_row + mine.row, warp_query + mine.row, output[0],
                  softmax.max[0], softmax.sum[0]);
      release_results();
      continue;
    }
    const RowEnds row_ends(params, queries.batch, head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = mine.row + row_offset(0, 2 * half);
      const RowEnd row_end =
          row_ends.of(warp_query + row, softmax.max[0][half], sum_of_row(softmax.sum[0][half]));
      if (mine.column == 0 && warp_query + row < params.queries)
        row_end.store(params, first_row + row);
      factors[half] = row_end.factor * (kIsUnmasked ? 1.f : params.dropout.factor);
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
                           64 * panel, warp_query, head, queries.batch);
      end_stores();
    }
    release_results();
  }
  if (lane == 0) wait_for_reads_of_stores();
#endif
}

}  // namespace megasoftmax
