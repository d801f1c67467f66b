#pragma once
// Attention on Hopper for many heads that share a dense bias, such as the rows of a pair
// representation. A block keeps the bias of 128 queries and all keys, in registers or, beyond 512
// keys, half of it in shared memory. It takes the batches and heads that share the bias, its
// members, one after the other.
//
// One warp copies a member's queries, keys and values, as a whole and some members ahead, or beyond
// 512 keys 128 keys at a time through a ring. A mask of keys is one more step of the product of
// queries and keys, see rows_of_keys.cuh. Each of two warpgroups has 64 queries. It takes the
// keys in steps. While it makes the weights of a step, the products of the next keys run, and those
// of the weights before with their values. So does the end of a member with the begin of the next.
//
// Weights are relative to a reference of each query: at first the largest entry of its bias. So
// no step waits for a largest logit, and sums need no scaling. If the sum of weights of a row shows
// that the reference was far from its logits, the warp computes its rows again step by step, and
// takes the largest logits that it finds as references of the next member.

#include "../../common/math.cuh"
#include "../../common/reduce.cuh"
#include "../online_softmax.cuh"
#include "../params.h"
#include "../sm80/tile.cuh"
#include "forward_heads/copy.cuh"

namespace megasoftmax {

// References of two rows, see above. Infinite, where weights relative to it would lose digits: all
// are 0 then, and the rows are computed step by step.
struct References {
  float rows[2];

  __device__ float offset(int half) const { return rows[half] * kLog2E; }
  __device__ void set(int half, float logit) {
    rows[half] = fabsf(logit * kLog2E) <= kLargestOffset ? logit : INFINITY;
  }
  // Whether weights may have such a sum. NaN fails. Of float16 smaller weights would lose digits.
  template <class T>
  __device__ static bool are_fine(float sum) {
    constexpr float kLeast = std::is_same_v<T, __half> ? 0.125f : 0x1p-30f;
    return sum >= kLeast && sum <= 16384.f;
  }
};

// The bias of this lane's rows, -infinity beyond the last key: pairs of entries. If registers have
// a half, that is the left half of each step. The other one is in shared memory, where only this
// lane reads it.
template <class T, class Memory>
class BiasOfLane {
  static constexpr int kSteps = Memory::kCopies * Memory::kSteps;
  static constexpr int kN = Memory::kTile.step_keys / 8, kKeptN = Memory::kIsWhole ? kN : kN / 2;
  static constexpr int kCount = kSteps * kKeptN * 2;

 public:
  // Sets the references to the largest entries.
  __device__ __forceinline__ BiasOfLane(const AttentionParams& params, const BiasRows<T>& bias,
                                        const Memory& memory, int warp, int first_query,
                                        References& references) {
    float largest[2] = {-INFINITY, -INFINITY};
    const auto load_half = [&](int first_key) {
      load(params, bias, memory.results(warp), first_query, first_key);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const Pack<T, 2> pair{words_[i]};
        largest[i % 2] = fmaxf(largest[i % 2], fmaxf(pair[0], pair[1]));
      }
    };
    if constexpr (!Memory::kIsWhole) {
      load_half(kKeptN * 8);
      const uint32_t mine = memory.bias(warp, thread_index_anew() % 32);
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i)
        store_four(mine + place(i),
                   {words_[4 * i], words_[4 * i + 1], words_[4 * i + 2], words_[4 * i + 3]});
    }
    load_half(0);
    references.set(0, warp_max<4>(largest[0]));
    references.set(1, warp_max<4>(largest[1]));
  }
  // After rows were computed step by step, which can have the registers of a half.
  __device__ __forceinline__ void load_again(const AttentionParams& params, const BiasRows<T>& bias,
                                             const Memory& memory, int warp, int first_query) {
    if constexpr (!Memory::kIsWhole) {
      if (thread_index_anew() % 32 == 0) wait_for_reads_of_stores();
      __syncwarp();
      load(params, bias, memory.results(warp), first_query, 0);
    }
  }
  // What shared memory has of a step.
  struct Others {
    uint32_t words[Memory::kIsWhole ? 1 : kN];
  };
  __device__ __forceinline__ static Others load_others(uint32_t mine, int step) {
    Others others{};
    if constexpr (!Memory::kIsWhole) {
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        uint32_t vector[4];
        load_four(vector, mine + place(step * (kN / 4) + i));
#pragma unroll
        for (int j = 0; j < 4; ++j) others.words[4 * i + j] = vector[j];
      }
    }
    return others;
  }
  __device__ __forceinline__ float2 exponents(const Others& others, int step, int n, int half,
                                              const References& references) const {
    if (n >= kKeptN)
      return exponents_of(others.words[(n - kKeptN) * 2 + half], references.offset(half));
    // Unknown: otherwise floats would be kept.
    return exponents_of(unknown(words_[(step * kKeptN + n) * 2 + half]), references.offset(half));
  }

 private:
  uint32_t words_[kCount];

  // Of a vector in shared memory.
  __device__ static constexpr int place(int i) {
    return i / (kN / 4) * Memory::kBiasStepBytes + i % (kN / 4) * 32 * 16;
  }
  __device__ static float2 exponents_of(uint32_t word, float offset) {
    const Pack<T, 2> pair{word};
    return {fmaf(pair[0], kLog2E, -offset), fmaf(pair[1], kLog2E, -offset)};
  }
  // The first key of a group of 8, from first_key of `load` on.
  __device__ static constexpr int key_of(int group) {
    return (group / kKeptN * kN + group % kKeptN) * 8;
  }
  // Pairs of entries of each step, from its key `first_key` on, 0 beyond the last query.
  // `room`: shared memory for 32 entries of the warp's rows.
  __device__ __forceinline__ void load(const AttentionParams& params, const BiasRows<T>& bias,
                                       uint32_t room, int first_query, int first_key) {
    constexpr uint32_t kLowest = Pack<T, 2>::kLowestWord;
    const FirstElement mine;
    const uint16_t* rows[2];
    bool are_there[2], are_pairs = params.keys % 2 == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + mine.row + row_offset(0, 2 * half);
      are_there[half] = query < params.queries;
      rows[half] = reinterpret_cast<const uint16_t*>(bias.row(are_there[half] ? query : 0)) +
                   mine.column + first_key;
      are_pairs &= reinterpret_cast<uintptr_t>(rows[half]) % 4 == 0;
    }
    const int left = params.keys - mine.column - first_key;
    const auto column = [](int i) { return key_of(i / 2); };
    const bool are_vectors = params.keys % 8 == 0 && bias.query_stride % 8 == 0 &&
                             reinterpret_cast<uintptr_t>(bias.first) % 16 == 0;
    if (are_vectors) {
      load_vectors(params, bias, room, first_query, first_key);
    } else if (__all_sync(~0u, are_pairs)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        words_[i] = kLowest;
        load_if(column(i) < left, words_[i],
                reinterpret_cast<const uint32_t*>(rows[i % 2] + column(i)));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        uint32_t second = kLowest >> 16;
        words_[i] = second;
        load_if(column(i) < left, words_[i], rows[i % 2] + column(i));
        load_if(column(i) + 1 < left, second, rows[i % 2] + column(i) + 1);
        words_[i] |= second << 16;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) words_[i] = are_there[i % 2] ? words_[i] : 0;
  }
  // Of rows that begin at multiples of 16 bytes. A lane loads 8 entries at a time, which pass
  // through shared memory to the lanes that keep them.
  __device__ __forceinline__ void load_vectors(const AttentionParams& params,
                                               const BiasRows<T>& bias, uint32_t room,
                                               int first_query, int first_key) {
    using Rows = Tile<T, 16, 32>;
    constexpr uint32_t kLowest = Pack<T, 2>::kLowestWord;
    static_assert(kCount % 8 == 0);
    const int lane = thread_index_anew() % 32, group = lane % 4;
    uint32_t vectors[kCount / 4][4];
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const int row = lane / 4 + i % 2 * 8;
      const int key = first_key + key_of(i / 2 * 4 + group);
      const T* const entries = bias.row(min(first_query + row, params.queries - 1)) + key;
#pragma unroll
      for (int j = 0; j < 4; ++j) vectors[i][j] = kLowest;
      load_if(key < params.keys, vectors[i], reinterpret_cast<const uint4*>(entries));
    }
    const FragmentsDown<Rows> fragments({room}, 0);
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_four(room + Rows::offset(lane / 4 + half * 8, group), vectors[2 * i + half]);
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t matrices[4];
        load_matrices(matrices, fragments.address ^ 32 * j);
#pragma unroll
        for (int k = 0; k < 4; ++k) words_[8 * i + 4 * j + k] = matrices[k];
      }
      __syncwarp();
    }
  }
};

// Fragments of 16 rows of a tensor in global memory, as those of a tile. What lies beyond the
// tensor is 0.
template <class T>
struct GlobalFragments {
  const T* first;
  int64_t row_stride;
  int rows, columns;  // of the tensor from `first` on

  __device__ GlobalFragments(const Strided& tensor, int batch, int head, int row, int rows,
                             int columns)
      : first(tensor.row<const T>(batch, head, row)),
        row_stride(tensor.query_stride),
        rows(rows - row),
        columns(columns) {}
  __device__ GlobalFragments anew() const { return *this; }
  template <bool kArePairs>
  __device__ GlobalFragments transposed_anew() const {
    return *this;
  }
  __device__ void load(uint32_t (&fragments)[4], int row, int column) const {
    const FirstElement mine;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own = row + mine.row + i / 2 * 8, from = column + mine.column + i % 2 * 8;
      fragments[i] = 0;
      load_if(own < rows && from < columns, fragments[i],
              reinterpret_cast<const uint32_t*>(first + own * row_stride + from));
    }
  }
  __device__ void load_transposed(uint32_t (&fragments)[4], int row, int column) const {
    const FirstElement mine;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own = row + mine.column + i % 2 * 8, from = column + mine.row + i / 2 * 8;
      const auto* const at = reinterpret_cast<const uint16_t*>(first + own * row_stride + from);
      uint32_t second = 0;
      fragments[i] = 0;
      load_if(own < rows && from < columns, fragments[i], at);
      load_if(own + 1 < rows && from < columns, second, at + row_stride);
      fragments[i] |= second << 16;
    }
  }
};

// Computes the rows of a warp of a member as the portable kernel does, and writes them.
template <class T, class Memory>
__device__ __forceinline__ void attend_step_by_step(const AttentionForwardParams& params,
                                                    const Memory& memory, int number,
                                                    const BiasRows<T>& bias, int batch, int head,
                                                    int tile_query, int first_query,
                                                    References& references) {
  using Rows = Tile<T, Memory::kKeys, Memory::kDim>;
  constexpr int kStepKeys = Memory::kIsWhole ? 16 : 32;
  const int stage = Memory::query_stage(number);
  int key_head, rest;
  params.heads_per_key_head.split(head, key_head, rest);
  const FirstElement mine;
  const int query = tile_query + first_query + mine.row;
  OnlineSoftmax<1> softmax(params.logit_scale);
  float output[1][Memory::kDim / 8][4] = {};
#pragma unroll 1
  for (int key = 0; key < params.keys; key += kStepKeys) {
    if constexpr (!Memory::kIsWhole) {
      const int next = key + kStepKeys + thread_index_anew() % 32;
      for (int column = 0; column < Memory::kDim && next < params.keys; column += 16) {
        if (column < params.head_dim)
          prefetch(params.key.row<const T>(batch, key_head, next) + column);
        if (column < params.value_dim)
          prefetch(params.value.row<const T>(batch, key_head, next) + column);
      }
    }
    float logits[1][kStepKeys / 8][4] = {};
    const auto multiply_with = [&](const auto& rows) {
      multiply_rows<T, Memory::kDim>(
          logits, FragmentsDown<Rows>({memory.queries(stage)}, first_query), rows);
    };
    // A ring has other keys by now.
    if constexpr (Memory::kIsWhole) {
      multiply_with(FragmentsAcross<Rows>({memory.keys(stage)}, key));
    } else {
      multiply_with(
          GlobalFragments<T>(params.key, batch, key_head, key, params.keys, params.head_dim));
    }
    uint32_t excluded = 0;
    if constexpr (Memory::kIsWhole) {
      excluded = excluded_bits(params, batch, head, key);
    } else if (params.block_mask.words != nullptr) {
      excluded =
          __ldg(params.block_mask.of(batch, head) + params.block_mask.layout.bits() + key / 32) >>
          key % 32;
    }
#pragma unroll
    for (int i = 0; i < kStepKeys / 2; ++i) {
      const int offset = mine.column + column_offset(i / 4, i % 4);
      const int row = min(query + row_offset(0, i % 4), params.queries - 1);
      float& logit = logits[0][i / 4][i % 4];
      logit = key + offset >= params.keys || (excluded >> offset & 1) != 0
                  ? -INFINITY
                  : fmaf(logit, params.logit_scale, to_float(bias.row(row)[key + offset]));
    }
    softmax.template step<true>(logits, output);
    if constexpr (Memory::kIsWhole) {
      multiply_weights<T>(output, logits, FragmentsDown<Rows>({memory.values(stage)}, key));
    } else {
      multiply_weights<T>(
          output, logits,
          GlobalFragments<T>(params.value, batch, key_head, key, params.keys, params.value_dim));
    }
  }
  const RowEnds row_ends(params, batch, head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = sum_of_row(softmax.sum[0][half]);
    const int row = query + row_offset(0, 2 * half);
    const RowEnd row_end = row_ends.of(softmax.max[0][half], sum);
    if (row >= params.queries) continue;  // its reference stays that of a bias of 0
    if (sum != 0.f) references.set(half, softmax.max[0][half]);
    if (mine.column == 0) row_end.store(params, params.row_index(batch, head, row));
    T* const results = params.output.row<T>(batch, head, row) + mine.column;
#pragma unroll
    for (int n = 0; n < Memory::kDim / 8; ++n) {
      if (8 * n < params.value_dim)
        *reinterpret_cast<uint32_t*>(results + 8 * n) = round_pair<T>(
            output[0][n][2 * half] * row_end.factor, output[0][n][2 * half + 1] * row_end.factor);
    }
  }
}

// A warpgroup with 64 queries.
template <class T, bool kHasMask, int kIndex>
__device__ __forceinline__ void attend_members(
    const AttentionForwardParams& params, const HeadsForwardMaps& maps,
    const HopperHeadsForwardMemory<kHasMask, kIndex>& memory, int warpgroup) {
  using Memory = HopperHeadsForwardMemory<kHasMask, kIndex>;
  constexpr int kStages = Memory::kStages, kDim = Memory::kDim, kRowBytes = Memory::kRowBytes;
  constexpr int kStepKeys = Memory::kTile.step_keys, kN = kStepKeys / 8;
  constexpr int kSteps = Memory::kSteps, kStepsOfMember = Memory::kCopies * kSteps;
  using Turn = StageInTurn<kStages>;
  using Bias = BiasOfLane<T, Memory>;
  extern __shared__ __align__(1024) char shared_memory[];
  // Read anew where they are needed: registers are few.
  const auto lane = [] { return thread_index_anew() % 32; };
  const auto warp = [] { return uniform(thread_index_anew() / 32) - 4; };
  const WorkOfHeads<Memory> work(params);
  const auto bias_rows = [&] {
    int batch, head;
    work.place(params, 0, batch, head);
    return BiasRows<T>(params, batch, head);
  };

  References references;
  Bias bias(params, bias_rows(), memory, warp(), work.first_query + 16 * warp(), references);
  const float scale = params.logit_scale * kLog2E;
  float scores[2][kN][4], output[kDim / 8][4] = {}, sums[2] = {}, factors[2] = {};
  uint32_t weights[2][kN / 2][4] = {};
  bool is_done_step_by_step = true;  // the member before, or there is none

  const auto start_scores = [&]<int kStep>(int query_stage, int stage) {
    constexpr int kKey = kStep * kStepKeys;
    auto& results = scores[kStep % 2];
    const uint64_t keys = rows_at<kDim>(memory.keys(stage));
    start_product_of_rows<T, kDim>(
        results, rows_at<kDim>(memory.queries(query_stage) + 64 * kRowBytes * warpgroup), 0,
        moved(keys, kKey * kRowBytes), 0);
    if constexpr (kHasMask) {
      start_product<T, true>(results, rows_alike_at(memory.ones()),
                             moved(matrix_at(memory.masked(stage), 16),
                                   kKey / 64 * Memory::kMaskedPanelBytes + kKey % 64 * 2),
                             true);
    }
  };
  const auto start_output = [&]<int kStep>(int stage) {
    start_sum_of_products<T, kRowBytes>(
        output, weights[kStep % 2],
        moved(rows_at<kDim>(memory.values(stage)), kStep * kStepKeys * kRowBytes));
  };
  const auto make_weights = [&]<int kStepOfMember>(const typename Bias::Others& others) {
    constexpr int kStep = kStepOfMember % kSteps;
    auto& results = scores[kStep % 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float pairs[kN];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 added = bias.exponents(others, kStepOfMember, n, half, references);
        float &first = results[n][2 * half], &second = results[n][2 * half + 1];
        first = exp2_approximate(fmaf(first, scale, added.x));
        second = exp2_approximate(fmaf(second, scale, added.y));
        pairs[n] = first + second;
      }
      // Pairwise: a long chain of additions would keep the weights in registers.
      sums[half] += reduce_pairwise(pairs, [](float x, float y) { return x + y; });
    }
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) as_matrix_a<T>(weights[kStep % 2][i], results, i);
  };
  // All weights of a member are made.
  const auto end_sums = [&](int number) {
    int batch, head;
    work.place(params, number, batch, head);
    const bool sees_nothing =
        kHasMask && Memory::sees_nothing(shared_memory, Memory::query_stage(number)) != 0;
    bool are_fine = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half] = sum_of_row(sums[half]);
      are_fine &= References::are_fine<T>(sums[half]) || (sees_nothing && sums[half] == 0.f);
    }
    is_done_step_by_step = !__all_sync(~0u, are_fine);
    if (is_done_step_by_step) {
      attend_step_by_step(params, memory, number, bias_rows(), batch, head, work.first_query,
                          16 * warp(), references);
      bias.load_again(params, bias_rows(), memory, warp(), work.first_query + 16 * warp());
    } else {
      // Of the four lanes with the same two rows two have one each.
      const int half = lane() % 2;
      const int row = work.first_query + 16 * warp() + FirstElement().row + 8 * half;
      const RowEnd row_end = RowEnds(params, batch, head)
                                 .of(half == 0 ? references.rows[0] : references.rows[1],
                                     half == 0 ? sums[0] : sums[1]);
      if (lane() % 4 < 2 && row < params.queries)
        row_end.store(params, params.row_index(batch, head, row));
      const float other = __shfl_xor_sync(~0u, row_end.factor, 1);
      factors[0] = half == 0 ? row_end.factor : other;
      factors[1] = half == 0 ? other : row_end.factor;
    }
    sums[0] = sums[1] = 0.f;
  };
  // All products with what it holds are done.
  const auto give_back = [&](int stage) {
    __syncwarp();
    if (lane() == 0) memory.stage_is_used(stage).arrive();
  };
  // All products of a member are done.
  const auto end_output = [&](int number) {
    if (is_done_step_by_step) return;
    const int own = warp();
    if (lane() == 0) wait_for_reads_of_stores();
    __syncwarp();
    const FragmentsDown<Tile<T, 16, kDim>> results({memory.results(own)}, 0);
#pragma unroll
    for (int i = 0; i < 4 * (kDim / 8); ++i) output[i / 4][i % 4] *= factors[i % 4 / 2];
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t matrices[4];
      as_matrix_a<T>(matrices, output, i);
      store_matrices(results.address ^ 32 * i, matrices);
    }
    publish_writes();
    __syncwarp();
    if (lane() == 0) {
      int batch, head;
      work.place(params, number, batch, head);
      start_store_of_box(maps.output, memory.results(own), 0, work.first_query + 16 * own, head,
                         batch);
      end_stores();
    }
  };

  const int count = work.count();
  memory.stage_is_there(0).wait(0);
  begin_products();
  start_scores.template operator()<0>(0, 0);
  end_products();
  wait_for_products<0>();
  touch(scores[0]);
  [[maybe_unused]] Turn turn_of_ring;
  // Of a member. Before the first one and after the last one, products have whatever is there.
  const auto take_step = [&]<int kStepOfMember>(int number) __attribute__((always_inline)) {
    constexpr int kStep = kStepOfMember % kSteps;
    constexpr bool kIsFirst = kStepOfMember == 0, kIsLast = kStepOfMember + 1 == kStepsOfMember;
    constexpr bool kEndsCopy = kStep + 1 == kSteps;
    const Turn turn = Memory::kIsWhole ? Turn::of(number) : turn_of_ring;
    const Turn next = kEndsCopy ? turn.next() : turn;
    if (kEndsCopy && (!kIsLast || number + 1 < count))
      memory.stage_is_there(next.stage).wait(next.parity);
    begin_products();
    start_output.template operator()<(kStep + kSteps - 1) % kSteps>(kStep == 0 ? turn.before()
                                                                               : turn.stage);
    start_scores.template operator()<(kStep + 1) % kSteps>(
        Memory::query_stage(number + (kIsLast ? 1 : 0)), next.stage);
    end_products();
    const auto others =
        Bias::load_others(Memory::kIsWhole ? 0 : memory.bias(warp(), lane()), kStepOfMember);
    if (kStepOfMember > 1) {
      wait_for_products<1>();
      touch(scores[kStep % 2]);
      if (kStep == 1) give_back(turn.before());
    }
    make_weights.template operator()<kStepOfMember>(others);
    if (kIsLast) end_sums(number);
    if (kIsFirst || kIsLast) {
      wait_for_products<0>();
      touch(scores[(kStep + 1) % 2]);
      touch(output);
    }
    if (kEndsCopy) turn_of_ring = next;
  };
  for (int number = 0;; ++number) {
    take_step.template operator()<0>(number);
    if (number > 0) {
      give_back((Memory::kIsWhole ? Turn::of(number) : turn_of_ring).before());
      end_output(number - 1);
    }
    if (number == count) break;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) output[i / 4][i % 4] = 0.f;
    [&]<int... kStep>(std::integer_sequence<int, kStep...>) __attribute__((always_inline)) {
      (take_step.template operator()<kStep + 1>(number), ...);
    }(std::make_integer_sequence<int, kStepsOfMember - 1>{});
  }
  if (lane() == 0) wait_for_reads_of_stores();
}

template <class T, bool kHasMask, int kIndex>
__global__ void __launch_bounds__(kAttentionHopperHeadsForwardTiles[kIndex].threads(), 1)
    attention_hopper_heads_forward_kernel(const __grid_constant__ AttentionForwardParams params,
                                          const __grid_constant__ HeadsForwardMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Memory = HopperHeadsForwardMemory<kHasMask, kIndex>;
  extern __shared__ __align__(1024) char shared_memory[];
  const Memory memory{shared_address(shared_memory)};
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128)) - 1;
  if (threadIdx.x == 0) memory.init_barriers();
  memory.template init_mask<T>();
  __syncthreads();
  if (warpgroup < 0) {
    give_registers<Memory::kTile.copier_registers>();
    const int warp = static_cast<int>(uniform(threadIdx.x / 32));
    if (warp == 0) copy_members<T>(params, maps, memory);
    if (Memory::kHasMaskWarp && warp == 1) write_masks<T>(params, memory);
    return;
  }
  take_registers<Memory::kTile.registers>();
  attend_members<T>(params, maps, memory, warpgroup);
#endif
}

}  // namespace megasoftmax
