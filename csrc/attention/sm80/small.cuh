#pragma once
// Many heads of few queries and keys that share a bias, or have none, as windows of vision models.
// A block keeps the bias and takes its members one after the other; the copies of the next one are
// in flight. A warp has 16 queries and all keys, some at a time. Each gradient is written once, and
// dB is summed in registers, in the order of the members.

#include <utility>

#include "../../common/vector.cuh"
#include "../bias.cuh"
#include "../exclusion.cuh"
#include "../layout.h"
#include "../online_softmax.cuh"
#include "tile.cuh"

namespace megasoftmax {

template <class T, int kIndex, bool kIsBackward>
struct SmallMemory {
  using Element = T;
  static constexpr AttentionSmallTile kTile = kAttentionSmallTiles[kIndex];
  static constexpr SmallLayout kLayout{kTile, kIsBackward};
  static constexpr int kDim = kTile.head_dim, kColumns = kDim / 8, kSide = kTile.side;
  static constexpr int kWarps = kTile.threads() / 32, kTensors = kIsBackward ? 4 : 3;
  using Rows = Tile<T, kSide, kDim>;  // of queries, keys, values, gradients of outputs
  static_assert(Rows::kBytes == kLayout.tile_bytes && kSide % 16 == 0);
  static_assert(kSmallStages == 2);  // copies go to the other one

  // Keys at a time, of which the last chunk may have fewer. Where registers hold sums of dB for
  // several chunks, these are smaller.
  static constexpr bool kIsOneChunk = kTile.holds_bias();
  static constexpr int kChunkKeys = kIsBackward && !kIsOneChunk ? 32 : 64;
  static constexpr int kChunks = divide_up(kSide, kChunkKeys);
  static constexpr int chunk_keys(int chunk) {
    return std::min(kSide - kChunkKeys * chunk, kChunkKeys);
  }
  template <int kChunk>
  using ScoreTile = Tile<T, kSide, divide_up(chunk_keys(kChunk), 32) * 32>;
  static constexpr int chunk_bytes(int chunk) { return tile_bytes(kSide, kChunkKeys * chunk); }
};

// Calls body.operator()<chunk>() for the chunks that have keys.
template <class Memory, class Body>
__device__ __forceinline__ void for_chunks(int keys, Body&& body) {
  [&]<int... kChunks>(std::integer_sequence<int, kChunks...>) {
    ((kChunks == 0 || Memory::kChunkKeys * kChunks < keys ? body.template operator()<kChunks>()
                                                          : void()),
     ...);
  }(std::make_integer_sequence<int, Memory::kChunks>{});
}

// A member that a block takes: the heads that share a bias first, then the batches.
struct SmallMember {
  int batch, head;
  int number;   // of the head, among those that share the bias
  int64_t row;  // of its first query, among the rows of all heads

  __device__ SmallMember(const AttentionParams& params, const BiasMembers& members) {
    members.place(params, members.begin, batch, head);
    number = head - members.head * static_cast<int>(params.heads_per_bias.divisor);
    row = params.row_index(batch, head, 0);
  }
  // Goes on to the next one. Returns whether that is in the next batch.
  __device__ bool advance(const AttentionParams& params) {
    const int heads = static_cast<int>(params.heads_per_bias.divisor);
    const bool is_next = ++number == heads;
    batch += is_next ? 1 : 0;
    head += is_next ? 1 - heads : 1;
    row += (is_next ? params.heads - heads + 1 : 1) * params.queries;
    number = is_next ? 0 : number;
    return is_next;
  }
};

// Whole rows of a tensor between global memory and a tile: the 16-byte vectors of a lane, in
// every kRowsAtATime-th row.
template <class Rows>
struct LaneOfRows {
  static constexpr int kRowsAtATime = 32 / Rows::kVectors;
  int row, column, place;  // of the first vector

  __device__ explicit LaneOfRows(int first_row) {
    const int lane = thread_index_anew() % 32, vector = lane % Rows::kVectors;
    row = first_row + lane / Rows::kVectors;
    column = vector * Rows::kInVector;
    place = static_cast<int>(Rows::offset(row, vector));
  }
  // The place of vector `i`, from that of the first one. The swizzle repeats after eight rows.
  template <class Integer>
  __device__ static Integer place_of(Integer first, int i) {
    constexpr int kTurns = 8 / kRowsAtATime;
    return (first ^ i % kTurns * kRowsAtATime % Rows::kVectors * 16) +
           i * kRowsAtATime * Rows::kRowBytes;
  }
};

// The copies of a warp: rows of one tensor of each member. The warps are shared out among the
// tensors.
template <class Memory>
class SmallCopies {
 public:
  using T = typename Memory::Element;
  using Rows = typename Memory::Rows;
  using Lane = LaneOfRows<Rows>;
  static constexpr int kRows = Memory::kSide / (Memory::kWarps / Memory::kTensors);
  static_assert(kRows % 8 == 0);

  // `number`: of the warp, among those of the tensor. `tile`: of the tensor, in the first stage.
  __device__ SmallCopies(const AttentionParams& params, const BiasMembers& members,
                         const Strided& tensor, int number, uint32_t tile, int rows, int columns)
      : member_(params, members), left_(members.end - members.begin), tile_(tile) {
    const Lane lane(number * kRows);
    tile_ += lane.place;
    next_ = tensor.row<const T>(member_.batch, member_.head, lane.row) + lane.column;
    row_step_ = Lane::kRowsAtATime * tensor.query_stride;
    head_step_ = tensor.head_stride;
    batch_step_ = tensor.batch_stride - (params.heads_per_bias.divisor - 1) * head_step_;
    count_ = lane.column < columns ? divide_up(max(rows - lane.row, 0), Lane::kRowsAtATime) : 0;
  }
  // Of the next member. What lies beyond the tensor is left as it was.
  __device__ __forceinline__ void start(const AttentionParams& params, int stage_offset) {
    if (left_ > 0) {
      const T* row = next_;
#pragma unroll
      for (int i = 0; i < kRows / Lane::kRowsAtATime; ++i, row += row_step_) {
        if (i < count_) start_copy(Lane::place_of(tile_, i) + stage_offset, row);
      }
      next_ += member_.advance(params) ? batch_step_ : head_step_;
      --left_;
    }
    end_copies();
  }

 private:
  SmallMember member_;
  const T* next_;
  int64_t row_step_, head_step_, batch_step_;
  int left_, count_;
  uint32_t tile_;
};

// The copies of this warp. A warp that is left over copies nothing.
template <class Memory, class Params>
__device__ __forceinline__ SmallCopies<Memory> copies_of_warp(const Params& params,
                                                              const BiasMembers& members,
                                                              uint32_t memory) {
  const int warp = uniform(thread_index_anew() / 32), role = warp % Memory::kTensors;
  const int number = warp / Memory::kTensors;
  const bool is_left_over = number == Memory::kWarps / Memory::kTensors;
  const auto of = [&](const Strided& tensor, int rows, int columns) {
    return SmallCopies<Memory>(params, members, tensor, is_left_over ? 0 : number,
                               memory + role * Memory::kLayout.tile_bytes, is_left_over ? 0 : rows,
                               columns);
  };
  if constexpr (Memory::kTensors == 4) {
    if (role == 3) return of(params.output_gradient, params.queries, params.value_dim);
  }
  return role == 0   ? of(params.query, params.queries, params.head_dim)
         : role == 1 ? of(params.key, params.keys, params.head_dim)
                     : of(params.value, params.keys, params.value_dim);
}

// What is the same for all members.
template <class Memory>
class SmallHead {
 public:
  using T = typename Memory::Element;
  using Rows = typename Memory::Rows;
  static constexpr auto kLayout = Memory::kLayout;

  const AttentionParams& params;
  char* const memory;     // shared
  const int first_query;  // of this warp

  // Clears what copies leave as it is. The bias is there after the next wait for copies and a
  // barrier.
  __device__ SmallHead(const AttentionParams& params, char* memory, const SmallMember& first)
      : params(params), memory(memory), first_query(thread_index_anew() / 32 * 16) {
    constexpr int kThreads = Memory::kTile.threads();
    for (int i = thread_index_anew() * 16; i < kLayout.results; i += kThreads * 16)
      *reinterpret_cast<uint4*>(memory + i) = {};
    __syncthreads();
    if constexpr (Memory::kIsOneChunk) {
      if (is_cut(0, Memory::kSide))
        cut_.template find<false, true>(params, 0, 0, first_query, 0, true);
    }
    if (params.bias.data == nullptr) return;
    const BiasRows<T> rows(params, first.batch, first.head);
    if constexpr (Memory::kTile.holds_bias()) {
      const FirstElement mine;
#pragma unroll
      for (int i = 0; i < Memory::kSide / 2; ++i) {
        const int query = first_query + mine.row + row_offset(0, i % 4);
        const int key = mine.column + column_offset(i / 4, i % 4);
        if (query < params.queries && key < params.keys) bias_[0][i / 4][i % 4] = rows(query, key);
      }
    } else {
      for_chunks<Memory>(params.keys, [&]<int kChunk>() {
        const typename Memory::template ScoreTile<kChunk> tile{
            shared_address(memory) + kLayout.bias + Memory::chunk_bytes(kChunk)};
        tile.template start_copy<kThreads>(rows.row(0) + Memory::kChunkKeys * kChunk,
                                           rows.query_stride, params.queries,
                                           params.keys - Memory::kChunkKeys * kChunk);
      });
    }
  }

  template <int kChunk, int kN>
  __device__ __forceinline__ Excluded<1, kN> excluded_of(const SmallMember& member) const {
    constexpr int kFirstKey = Memory::kChunkKeys * kChunk;
    Excluded<1, kN> excluded;
    if constexpr (Memory::kIsOneChunk) excluded = cut_;
    const bool has_cut = !Memory::kIsOneChunk && is_cut(kFirstKey, 8 * kN);
    if (has_cut || params.block_mask.words != nullptr)
      excluded.template find<false>(params, member.batch, member.head, first_query, kFirstKey,
                                    has_cut);
    return excluded;
  }
  // This warp's logits.
  template <int kChunk, int kN>
  __device__ __forceinline__ void find_logits(Accumulators<1, kN>& logits, uint32_t queries,
                                              uint32_t keys) const {
    multiply_rows<T, Memory::kDim>(logits, FragmentsDown<Rows>({queries}, first_query),
                                   FragmentsAcross<Rows>({keys}, Memory::kChunkKeys * kChunk));
    if constexpr (Memory::kTile.holds_bias()) {
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i) {
        float& logit = logits[0][i / 4][i % 4];
        logit = fmaf(logit, params.scale, bias_[0][i / 4][i % 4]);
      }
    } else {
      using Bias = typename Memory::template ScoreTile<kChunk>;
      const uint32_t at = shared_address(memory) + kLayout.bias + Memory::chunk_bytes(kChunk);
      add_bias(logits, params.scale, TileBias<T, false, Bias>({at}, first_query, 0));
    }
  }
  // Writes this warp's 16 rows of results, times a factor. Whole rows pass through its part of a
  // tile.
  __device__ __forceinline__ void store(const float (&results)[1][Memory::kColumns][4],
                                        const float (&factors)[2], const Strided& tensor,
                                        const SmallMember& member, int rows, int columns) const {
    char* const tile = memory + kLayout.results;
    __syncwarp();  // what was there was read
    store_to_tile<Rows>(tile, first_query, results[0], 0, [&](float first, float second, int half) {
      return round_pair<T>(first * factors[half], second * factors[half]);
    });
    __syncwarp();
    using Lane = LaneOfRows<Rows>;
    const Lane lane(first_query);
    T* row = tensor.row<T>(member.batch, member.head, lane.row) + lane.column;
    if (lane.column >= columns) return;
#pragma unroll
    for (int i = 0; i < 16 / Lane::kRowsAtATime; ++i) {
      if (lane.row + i * Lane::kRowsAtATime < rows)
        *reinterpret_cast<uint4*>(row) =
            *reinterpret_cast<const uint4*>(tile + Lane::place_of(lane.place, i));
      row += Lane::kRowsAtATime * tensor.query_stride;
    }
  }

 private:
  // Whether length or window excludes some of the keys.
  __device__ bool is_cut(int first_key, int count) const {
    return first_query + 16 > params.queries || first_key + count > params.keys ||
           params.window_left >= 0 || params.window_right >= 0;
  }

  // What length and window exclude of all members, where that is one chunk.
  Excluded<1, Memory::kSide / 8> cut_;
  // 0 beyond the tensor.
  Accumulators<1, Memory::kTile.holds_bias() ? Memory::kSide / 8 : 1> bias_ = {};
};

template <class T, int kIndex>
__global__ void __launch_bounds__(kAttentionSmallTiles[kIndex].threads(),
                                  kAttentionSmallTiles[kIndex].forward_blocks)
    attention_small_forward_kernel(const __grid_constant__ AttentionForwardParams params) {
  if (!kIsAmpere) return;
  using Memory = SmallMemory<T, kIndex, false>;
  using Rows = typename Memory::Rows;
  constexpr auto kLayout = Memory::kLayout;
  extern __shared__ __align__(1024) char shared_memory[];
  const uint32_t memory = shared_address(shared_memory);
  const BiasMembers members(params, static_cast<int>(blockIdx.x));
  SmallMember member(params, members);
  const SmallHead<Memory> small_head(params, shared_memory, member);
  const int first_query = small_head.first_query;
  auto copies = copies_of_warp<Memory>(params, members, memory);
  copies.start(params, 0);
#pragma unroll 1
  for (int left = members.end - members.begin, at = 0; left > 0; --left) {
    wait_for_copies();
    __syncthreads();  // this member's copies are there, the one before is done
    copies.start(params, kLayout.stage_bytes - at);
    if (Memory::kIsOneChunk || first_query < params.queries) {
      const uint32_t queries = memory + at, keys = queries + kLayout.tile_bytes;
      OnlineSoftmax<1> softmax(params.scale);
      float output[1][Memory::kColumns][4] = {};
      for_chunks<Memory>(params.keys, [&]<int kChunk>() {
        constexpr int kN = Memory::chunk_keys(kChunk) / 8;
        const auto excluded = small_head.template excluded_of<kChunk, kN>(member);
        Accumulators<1, kN> scores = {};
        small_head.template find_logits<kChunk>(scores, queries, keys);
        excluded.apply(scores, -INFINITY);
        if constexpr (kChunk == 0) {
          softmax.template weigh<true>(scores, [](int, int, float) {});
        } else {
          softmax.template step<true>(scores, output);
        }
        multiply_weights<T>(
            output, scores,
            FragmentsDown<Rows>({keys + kLayout.tile_bytes}, Memory::kChunkKeys * kChunk));
      });
      const FirstElement mine;
      const RowEnds row_ends(params, member.batch, member.head);
      float factors[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = first_query + mine.row + row_offset(0, 2 * half);
        const RowEnd row_end =
            row_ends.of(query, softmax.max[0][half], sum_of_row(softmax.sum[0][half]));
        if (mine.column == 0 && query < params.queries) row_end.store(params, member.row + query);
        factors[half] = row_end.factor;
      }
      small_head.store(output, factors, params.output, member, params.queries, params.value_dim);
    }
    member.advance(params);
    at = kLayout.stage_bytes - at;
  }
}

// What this lane's two rows need: weights are 2^(log2(e) * (logit - max) - log2_sum). Loads are in
// flight until `finish`. `output`: this lane's vectors of both rows, to find delta with, where a
// warp does not see all keys at once.
template <class Memory>
struct SmallRows {
  using T = typename Memory::Element;
  static constexpr int kVectors = Memory::kIsOneChunk ? 0 : Memory::Rows::kVectors / 4;
  float max[2], log2_sum[2], delta[2];
  Pack<T> output[2][kVectors == 0 ? 1 : kVectors];

  __device__ SmallRows(const AttentionBackwardParams& params, const SmallMember& member,
                       int first_query) {
    const int lane = thread_index_anew() % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = min(first_query + lane / 4 + 8 * half, params.queries - 1);
      max[half] = params.statistics[member.row + query] -
                  RowEnds(params, member.batch, member.head).bias_of(query);
      log2_sum[half] = params.statistics[params.rows() + member.row + query];
      const T* const row = params.output.row<const T>(member.batch, member.head, query);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int column = (lane % 4 + 4 * i) * 8;
        output[half][i] = {};
        if (column < params.value_dim)
          output[half][i] = *reinterpret_cast<const Pack<T>*>(row + column);
      }
    }
  }
  // `gradients`: the tile of those of outputs. log2_sum is infinite for a row without a visible
  // key.
  __device__ __forceinline__ void finish(const char* gradients, int first_query) {
    const int lane = thread_index_anew() % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      log2_sum[half] = log2_sum[half] == -INFINITY ? INFINITY : log2_sum[half] * kLog2E;
      if constexpr (kVectors == 0) continue;
      delta[half] = 0.f;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const auto gradient = *reinterpret_cast<const Pack<T>*>(
            gradients + Memory::Rows::offset(first_query + lane / 4 + 8 * half, lane % 4 + 4 * i));
#pragma unroll
        for (int j = 0; j < 8; ++j)
          delta[half] = fmaf(output[half][i][j], gradient[j], delta[half]);
      }
      delta[half] = sum_of_row(delta[half]);
    }
  }
  // Delta of whole rows of weights. The gradient of a weight of 0 is not used if it is not finite.
  template <int kN>
  __device__ __forceinline__ void find_delta(const Accumulators<1, kN>& weights,
                                             Accumulators<1, kN>& gradients) {
    const auto find = [&] {
      delta[0] = delta[1] = 0.f;
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i)
        delta[i % 4 / 2] =
            fmaf(weights[0][i / 4][i % 4], gradients[0][i / 4][i % 4], delta[i % 4 / 2]);
      delta[0] = sum_of_row(delta[0]);
      delta[1] = sum_of_row(delta[1]);
    };
    find();
    if (is_finite()) return;
#pragma unroll
    for (int i = 0; i < 4 * kN; ++i) {
      if (weights[0][i / 4][i % 4] == 0.f) gradients[0][i / 4][i % 4] = 0.f;
    }
    find();
  }
  // Of all rows of the warp.
  __device__ bool is_finite() const {
    return __all_sync(~0u, fabsf(delta[0]) < INFINITY && fabsf(delta[1]) < INFINITY) != 0;
  }
  // Subtracts the gradient of the log-sum-exp, and stores those of options of the logits.
  __device__ __forceinline__ void add_options(const AttentionBackwardParams& params,
                                              const SmallMember& member, int first_query) {
    if (params.lse_gradient == nullptr && params.sink_gradient == nullptr) return;
    const FirstElement mine;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + mine.row + row_offset(0, 2 * half);
      if (query >= params.queries) continue;
      const int64_t row = member.row + query;
      if (params.lse_gradient != nullptr) delta[half] -= params.lse_gradient[row];
      if (params.sink_gradient != nullptr && mine.column == 0)
        RowEnds(params, member.batch, member.head).store_gradient(params, row, delta[half]);
    }
  }
};

template <class T, int kIndex>
__global__ void __launch_bounds__(kAttentionSmallTiles[kIndex].threads(),
                                  kAttentionSmallTiles[kIndex].backward_blocks)
    attention_small_backward_kernel(const __grid_constant__ AttentionBackwardParams params) {
  if (!kIsAmpere) return;
  using Memory = SmallMemory<T, kIndex, true>;
  using Rows = typename Memory::Rows;
  constexpr auto kLayout = Memory::kLayout;
  constexpr int kColumns = Memory::kColumns, kSide = Memory::kSide;
  extern __shared__ __align__(1024) char shared_memory[];
  const uint32_t memory = shared_address(shared_memory);
  const BiasMembers members(params, static_cast<int>(blockIdx.x));
  SmallMember member(params, members);
  const SmallHead<Memory> small_head(params, shared_memory, member);
  const int first_query = small_head.first_query;
  auto copies = copies_of_warp<Memory>(params, members, memory);
  copies.start(params, 0);
  float bias_gradient[kSide / 8][4] = {};
#pragma unroll 1
  for (int left = members.end - members.begin, at = 0; left > 0; --left) {
    SmallRows<Memory> rows(params, member, first_query);
    wait_for_copies();
    __syncthreads();  // this member's copies are there, the one before is done
    copies.start(params, kLayout.stage_bytes - at);
    const uint32_t queries = memory + at, keys = queries + kLayout.tile_bytes;
    const uint32_t values = keys + kLayout.tile_bytes, outputs = values + kLayout.tile_bytes;
    const auto store = [&](const float (&results)[1][kColumns][4], float factor,
                           const Strided& tensor, int count, int columns) {
      small_head.store(results, {factor, factor}, tensor, member, count, columns);
    };
    if (Memory::kIsOneChunk || first_query < params.queries) {
      rows.finish(shared_memory + at + 3 * kLayout.tile_bytes, first_query);
      if (!Memory::kIsOneChunk) rows.add_options(params, member, first_query);
      float query_gradient[1][kColumns][4] = {};
      for_chunks<Memory>(params.keys, [&]<int kChunk>() {
        constexpr int kN = Memory::chunk_keys(kChunk) / 8;
        const auto excluded = small_head.template excluded_of<kChunk, kN>(member);
        Accumulators<1, kN> weights = {}, gradients = {};
        small_head.template find_logits<kChunk>(weights, queries, keys);
#pragma unroll
        for (int i = 0; i < 4 * kN; ++i) {
          float& weight = weights[0][i / 4][i % 4];
          weight = exp2_approximate(
              fmaf(weight - rows.max[i % 4 / 2], kLog2E, -rows.log2_sum[i % 4 / 2]));
        }
        excluded.apply(weights, 0.f);
        multiply_rows<T, Memory::kDim>(
            gradients, FragmentsDown<Rows>({outputs}, first_query),
            FragmentsAcross<Rows>({values}, Memory::kChunkKeys * kChunk));
        if constexpr (Memory::kIsOneChunk) {
          rows.find_delta(weights, gradients);
          rows.add_options(params, member, first_query);
        }
#pragma unroll
        for (int i = 0; i < 4 * kN; ++i) {
          float& gradient = gradients[0][i / 4][i % 4];
          gradient = weights[0][i / 4][i % 4] * (gradient - rows.delta[i % 4 / 2]);
        }
        // Of one chunk delta is not finite where such a gradient is not.
        if constexpr (!Memory::kIsOneChunk) excluded.apply(gradients, 0.f);
        if (!rows.is_finite()) {
#pragma unroll
          for (int i = 0; i < 4 * kN; ++i) {
            if (weights[0][i / 4][i % 4] == 0.f) gradients[0][i / 4][i % 4] = 0.f;
          }
        }
#pragma unroll
        for (int i = 0; i < 4 * kN; ++i)
          bias_gradient[Memory::kChunkKeys / 8 * kChunk + i / 4][i % 4] +=
              gradients[0][i / 4][i % 4];
        const auto share = [&](int tiles, const Accumulators<1, kN>& scores) {
          store_to_tile<typename Memory::template ScoreTile<kChunk>>(
              shared_memory + tiles + Memory::chunk_bytes(kChunk), first_query, scores[0], 0,
              [](float first, float second, int) { return round_pair<T>(first, second); });
        };
        share(kLayout.weights, weights);
        share(kLayout.scores, gradients);
        multiply_weights<T>(query_gradient, gradients,
                            FragmentsDown<Rows>({keys}, Memory::kChunkKeys * kChunk));
      });
      store(query_gradient, params.scale, params.query_gradient, params.queries, params.head_dim);
    }
    __syncthreads();                    // weights and gradients of all scores are there
    const int first_key = first_query;  // of this warp
    for_chunks<Memory>(params.keys, [&]<int kChunk>() {
      if (!Memory::kIsOneChunk &&
          (first_key / Memory::kChunkKeys != kChunk || first_key >= params.keys))
        return;
      using ScoreTile = typename Memory::template ScoreTile<kChunk>;
      const auto multiply = [&](int scores, uint32_t tile, float factor, const Strided& tensor,
                                int columns) {
        float sums[1][kColumns][4] = {};
        multiply_transposed<T, kSide>(
            sums, FragmentsAcross<ScoreTile>({memory + scores + Memory::chunk_bytes(kChunk)}, 0),
            FragmentsDown<Rows>({tile}, 0), first_key - Memory::kChunkKeys * kChunk, 0);
        store(sums, factor, tensor, params.keys, columns);
      };
      multiply(kLayout.weights, outputs, 1.f, params.value_gradient, params.value_dim);
      multiply(kLayout.scores, queries, params.scale, params.key_gradient, params.head_dim);
    });
    member.advance(params);
    at = kLayout.stage_bytes - at;
  }
  if (params.bias_gradient == nullptr) return;
  const auto store = [&]<class Out>(Out* entries) {
    const FirstElement mine;
    const int64_t pitch = params.bias_pitch();
    entries += (members.batch * params.bias_heads() + members.head) * params.queries * pitch;
#pragma unroll
    for (int i = 0; i < kSide / 2; ++i) {
      const int query = first_query + mine.row + row_offset(0, i % 4);
      const int key = mine.column + column_offset(i / 4, i % 4);
      if (query < params.queries && key < pitch)
        entries[query * pitch + key] = from_float<Out>(bias_gradient[i / 4][i % 4]);
    }
  };
  if (params.bias_parts > 1) {
    store(params.bias_part(members.part));
  } else if (params.bias.type == DType::kFloat32) {
    store(static_cast<float*>(params.bias_gradient));
  } else {
    store(static_cast<T*>(params.bias_gradient));
  }
}

}  // namespace megasoftmax
