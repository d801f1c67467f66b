#pragma once
// dB = dS, or its sums over what shares an entry of the bias.

#include "backward_tile.cuh"

namespace megasoftmax {

// A gradient that has an entry for each score, [..., queries, keys]: number `entry` of its heads.

// In float32, from registers: eight lanes write, or add to, eight neighbours.
template <bool kAdds>
__device__ inline void store_bias_gradient(const AttentionBackwardParams& params,
                                           const ScoresOfWarp& gradients, int64_t entry,
                                           int first_query, int first_key) {
  const BackwardWarp warp;
  const int lane = thread_index_anew() % 32;
  const int query = first_query + warp.query + lane % 4 * 2, key = first_key + warp.key + lane / 4;
  float* const first = static_cast<float*>(params.bias_gradient) +
                       (entry * params.queries + query) * params.keys + key;
  const auto store = [&]<bool kIsWhole>() {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        if (!kIsWhole && query + n * 8 + right >= params.queries) continue;
        float* const row = first + int64_t{n * 8 + right} * params.keys;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = m * 16 + half * 8;
            if (!kIsWhole && key + at >= params.keys) continue;
            const float gradient = gradients[m][n][half * 2 + right];
            if constexpr (kAdds) {
              add_to_global(row + at, gradient);
            } else {
              row[at] = gradient;
            }
          }
        }
      }
    }
  };
  // A branch around each addition costs several: whole tiles have none.
  if (first_query + warp.query + 32 <= params.queries && first_key + warp.key + 32 <= params.keys) {
    store.template operator()<true>();
  } else {
    store.template operator()<false>();
  }
}

// Elements of a tile of scores for this lane: of column lane / 4 of eight, 8 neighbours of 32 rows,
// from number lane % 4 * 8 on.
template <class ScoreTile>
struct FragmentsAlong : Fragments<ScoreTile> {
  // Matrix i has rows 2 * (i ^ j) and the next of the j-th eight: so the chunks that a load takes
  // of eight rows lie in eight different banks.
  __device__ explicit FragmentsAlong(const ScoreTile& tile) {
    const int lane = thread_index_anew() % 32, j = lane / 2 % 4;
    this->address = tile.address + ScoreTile::offset(8 * j + 2 * (lane / 8 ^ j) + lane % 2, 0);
  }
  __device__ void load(uint32_t (&pairs)[4], int row, int column) const {
    this->load_transposed(pairs, row, column);
    const int j = thread_index_anew() % 4;  // matrix n ^ j holds pair n of this lane's eight
    const auto exchange = [](bool is_due, uint32_t& a, uint32_t& b) {
      const uint32_t difference = is_due ? a ^ b : 0;
      a ^= difference;
      b ^= difference;
    };
    exchange(j % 2 != 0, pairs[0], pairs[1]);
    exchange(j % 2 != 0, pairs[2], pairs[3]);
    exchange(j / 2 != 0, pairs[0], pairs[2]);
    exchange(j / 2 != 0, pairs[1], pairs[3]);
  }
};

// In 16 bits, from the block's tile: each warp 16 queries and 64 keys.
template <class T, class ScoreTile>
__device__ inline void store_bias_gradient(const AttentionBackwardParams& params,
                                           const ScoreTile& tile, int64_t entry, int first_query,
                                           int first_key) {
  T* const out = static_cast<T*>(params.bias_gradient) + entry * params.queries * params.keys;
  const int thread = thread_index_anew(), lane = thread % 32, warp = thread / 32;
  constexpr int kQueryBlocks = ScoreTile::kColumns / 16;
  const FragmentsAlong<ScoreTile> fragments(tile);
  const bool has_chunks = params.keys % 8 == 0, has_pairs = params.keys % 2 == 0;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const int column = warp % kQueryBlocks * 16 + block % 2 * 8;
    const int row = warp / kQueryBlocks * 64 + block / 2 * 32;
    uint32_t pairs[4];
    fragments.load(pairs, row, column);
    const int query = first_query + column + lane / 4, key = first_key + row + lane % 4 * 8;
    if (query >= params.queries || key >= params.keys) continue;
    T* const place = out + int64_t{query} * params.keys + key;
    if (has_chunks) {
      *reinterpret_cast<uint4*>(place) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* const pair = reinterpret_cast<const T*>(pairs + i);
      if (has_pairs) {
        if (key + 2 * i < params.keys) reinterpret_cast<uint32_t*>(place)[i] = pairs[i];
      } else {
        if (key + 2 * i < params.keys) place[2 * i] = pair[0];
        if (key + 2 * i + 1 < params.keys) place[2 * i + 1] = pair[1];
      }
    }
  }
}

// Added to sums in float32, from the block's tile: a warp takes 32 keys of a query together, since
// an addition costs what the lines of the cache cost that it touches.
template <class T, class ScoreTile>
__device__ inline void add_to_bias_gradient(const AttentionBackwardParams& params,
                                            const char* scores, int64_t entry, int first_query,
                                            int first_key) {
  constexpr int kChunks = 4, kParts = ScoreTile::kColumns / 8 / kChunks;
  const int thread = thread_index_anew(), lane = thread % 32, warp = thread / 32;
  const int row = warp / kParts * 32 + lane, first_chunk = warp % kParts * kChunks;
  const int query = first_query + first_chunk * 8, key = first_key + row;
  if (key >= params.keys) return;
  float* const first = static_cast<float*>(params.bias_gradient) +
                       (entry * params.queries + query) * params.keys + key;
  const auto add = [&]<bool kIsWhole>() {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const auto gradients = *reinterpret_cast<const Pack<T, 8>*>(
          scores + ScoreTile::offset(row, first_chunk + chunk));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (kIsWhole || query + chunk * 8 + i < params.queries)
          add_to_global(first + int64_t{chunk * 8 + i} * params.keys, gradients[i]);
      }
    }
  };
  if (query + kChunks * 8 <= params.queries) {
    add.template operator()<true>();
  } else {
    add.template operator()<false>();
  }
}

// Index of the bias head that (batch, head) reads.
__device__ inline int64_t entry_of_bias(const AttentionBackwardParams& params, int batch,
                                        int head) {
  int bias_batch, bias_head, rest;
  params.batches_per_bias.split(batch, bias_batch, rest);
  params.heads_per_bias.split(head, bias_head, rest);
  return bias_batch * (params.heads / params.heads_per_bias.divisor) + bias_head;
}

// What a step of the backward leaves of a dense or shared gradient: in float32 what registers hold.
__device__ inline void leave_bias_gradient(const AttentionBackwardParams& params,
                                           const ScoresOfWarp& gradients, int batch, int head,
                                           int first_query, int first_key) {
  if (params.bias.type != DType::kFloat32) return;
  if (params.bias_gradient_kind == BiasGradient::kDense) {
    store_bias_gradient<false>(params, gradients, entry_of_bias(params, batch, head), first_query,
                               first_key);
  } else if (params.bias_gradient_kind == BiasGradient::kShared) {
    store_bias_gradient<true>(params, gradients, entry_of_bias(params, batch, head), first_query,
                              first_key);
  }
}

// The same of a bias in 16 bits, from the block's tile, as products read it.
template <class T, class ScoreTile>
__device__ inline void leave_bias_gradient(const AttentionBackwardParams& params,
                                           const char* scores, int batch, int head, int first_query,
                                           int first_key) {
  if (params.bias.type == DType::kFloat32) return;
  if (params.bias_gradient_kind == BiasGradient::kDense) {
    store_bias_gradient<T>(params, ScoreTile{shared_address(scores)},
                           entry_of_bias(params, batch, head), first_query, first_key);
  } else if (params.bias_gradient_kind == BiasGradient::kShared) {
    add_to_bias_gradient<T, ScoreTile>(params, scores, entry_of_bias(params, batch, head),
                                       first_query, first_key);
  }
}

// Sums over queries; what a warp has of its keys is added with the last tile of a head, once by
// each of two warps, so that their order does not matter.
__device__ inline void add_to_key_sums(const AttentionBackwardParams& params,
                                       const ScoresOfWarp& gradients, float (&sums)[2][2],
                                       int batch, int head, int first_key, bool is_last) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][i / 2] += gradients[m][n][i];
    }
  }
  if (!is_last) return;
  const BackwardWarp warp;
  const int lane = thread_index_anew() % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sums[m][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int key = first_key + warp.key + m * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && key < params.keys)
        atomicAdd(static_cast<float*>(params.bias_gradient) +
                      (int64_t{batch} * params.heads + head) * params.keys + key,
                  sum);
      sums[m][half] = 0.f;
    }
  }
}

// Sums along diagonals, each by one thread in one order. Each tile of keys has sums of its own:
// [batches, heads, tiles, kKeys - 1 + queries], of which number d is that of key - first key -
// query = d - (queries - 1).
template <class T, int kThreads, class ScoreTile>
__device__ inline void add_to_diagonals(const AttentionBackwardParams& params, const char* scores,
                                        int batch, int head, int tile, int first_query) {
  constexpr int kKeys = ScoreTile::kRows, kQueries = ScoreTile::kColumns;
  static_assert(kKeys + kQueries - 1 <= kThreads);
  const int thread = thread_index_anew();
  const int64_t tiles = divide_up(params.keys, kKeys), diagonals = kKeys - 1 + params.queries;
  float* const sums = static_cast<float*>(params.bias_gradient) +
                      ((int64_t{batch} * params.heads + head) * tiles + tile) * diagonals;
  // Key - query inside the tile.
  const int distance = thread - (kQueries - 1);
  if (distance >= kKeys) return;
  float sum = 0.f;
  const int begin = max(distance, 0), end = min(distance + kQueries, kKeys);
  for (int key = begin; key < end; ++key) {
    const int query = key - distance;
    sum += to_float(
        *reinterpret_cast<const T*>(scores + ScoreTile::offset(key, query / 8) + query % 8 * 2));
  }
  const int64_t diagonal = distance - first_query + params.queries - 1;
  if (diagonal >= 0) sums[diagonal] += sum;
}

// dB of a bias that batches or heads share: a block owns a tile of 64 queries and some keys of it,
// and takes all that share it in turn, always in the same order.
template <class T, BiasKind kBias, int kIndex>
__global__ void __launch_bounds__(kAttentionBackwardTiles[kIndex].threads(),
                                  kAttentionBackwardTiles[kIndex].blocks_per_sm)
    attention_bias_gradient_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using Memory = BackwardMemory<T, kBias, kIndex>;
  using KeyTile = typename Memory::KeyTile;
  using QueryTile = typename Memory::QueryTile;
  constexpr int kThreads = Memory::kThreads, kKeys = Memory::kKeys, kQueries = Memory::kQueries;
  extern __shared__ __align__(1024) char shared_memory[];
  const uint32_t memory = shared_address(shared_memory);
  auto* const rows = reinterpret_cast<RowOfBackward*>(shared_memory + Memory::kRows);

  int first_key, first_query, bias_head, bias_batch;
  {
    int tile;
    params.place(static_cast<int>(blockIdx.x), tile, bias_head, bias_batch);
    const int key_tiles = divide_up(params.keys, kKeys);
    first_key = tile % key_tiles * kKeys;
    first_query = tile / key_tiles * kQueries;
  }
  const int64_t entry =
      int64_t{bias_batch} * (params.heads / params.heads_per_bias.divisor) + bias_head;
  const int heads = static_cast<int>(params.heads_per_bias.divisor);
  const int members = heads * static_cast<int>(params.batches_per_bias.divisor);
  const auto place_of = [&](int member, int& head, int& batch) {
    batch = bias_batch * static_cast<int>(params.batches_per_bias.divisor) + member / heads;
    head = bias_head * heads + member % heads;
  };
  const int last_query = min(first_query + kQueries, params.queries) - 1;
  // Outside of a window nothing but 0 remains, which is there.
  if (visible_keys(params, last_query).end <= first_key ||
      visible_keys(params, first_query).begin >= first_key + kKeys)
    return;

  const auto copy = [&](int at, const Strided& tensor, int member, bool is_of_keys, int columns) {
    int head, batch, key_head, rest;
    place_of(member, head, batch);
    params.heads_per_key_head.split(head, key_head, rest);
    const int first = is_of_keys ? first_key : first_query;
    const T* const source = tensor.row<const T>(batch, is_of_keys ? key_head : head, first);
    if (is_of_keys) {
      KeyTile{memory + at}.template start_copy<kThreads>(source, tensor.query_stride,
                                                         params.keys - first, columns);
    } else {
      QueryTile{memory + at}.template start_copy<kThreads>(source, tensor.query_stride,
                                                           params.queries - first, columns);
    }
  };
  const auto copy_keys_and_queries = [&](int member) {
    copy(0, params.key, member, true, params.head_dim);
    copy(Memory::kStagesAt, params.query, member, false, params.head_dim);
    const int thread = thread_index_anew();
    if (thread < kQueries) {
      int head, batch;
      place_of(member, head, batch);
      const int64_t row =
          (int64_t{batch} * params.heads + head) * params.queries + first_query + thread;
      start_copy_of(shared_address(rows + member % 2 * kQueries + thread),
                    params.rows_of_backward + min(row, params.rows() - 1),
                    first_query + thread < params.queries ? 16 : 0);
    }
    end_copies();
  };
  const auto copy_values_and_gradients = [&](int member) {
    copy(Memory::kValues, params.value, member, true, params.value_dim);
    copy(Memory::kStagesAt + QueryTile::kBytes, params.output_gradient, member, false,
         params.value_dim);
    end_copies();
  };

  {
    const BiasRows<T> bias(params, bias_batch * static_cast<int>(params.batches_per_bias.divisor),
                           bias_head * heads);
    if constexpr (kBias == BiasKind::kTile) {
      typename Memory::BiasTile{memory + Memory::kBiasAt}.template start_copy<kThreads>(
          bias.row(first_query) + first_key, bias.query_stride, params.queries - first_query,
          params.keys - first_key);
    } else {
      const typename Memory::FloatBias tile{
          reinterpret_cast<float*>(shared_memory + Memory::kBiasAt), params.is_relative};
      tile.template fill<kThreads>(bias, first_query, first_key, params.queries, params.keys);
    }
  }
  const bool is_all_inside =
      first_key + kKeys <= params.keys && first_query + kQueries <= params.queries &&
      params.mask.data == nullptr && visible_keys(params, first_query).end >= first_key + kKeys &&
      visible_keys(params, last_query).begin <= first_key;
  ScoresOfWarp sums = {};
  copy_keys_and_queries(0);
  copy_values_and_gradients(0);
#pragma unroll 1
  for (int member = 0; member < members; ++member) {
    wait_for_older_copies<1>();
    __syncthreads();  // keys and queries are there
    Excluded<2, 4> excluded;
    if (!is_all_inside) {
      int head, batch;
      place_of(member, head, batch);
      const BackwardWarp warp;
      excluded.template find<true>(params, batch, head, first_query + warp.query,
                                   first_key + warp.key);
    }
    ScoresOfWarp scores = {}, gradients = {};
    find_score_gradients<T, kBias, Memory>(
        params, shared_memory, 0, rows + member % 2 * kQueries, excluded, scores, gradients, [&] {
          wait_for_copies();
          __syncthreads();  // values and gradients are there, keys and queries are used up
          if (member + 1 < members) copy_keys_and_queries(member + 1);
        });
#pragma unroll
    for (int i = 0; i < 32; ++i)
      sums[i / 16][i / 4 % 4][i % 4] += gradients[i / 16][i / 4 % 4][i % 4];
    __syncthreads();  // values and gradients are used up
    if (member + 1 < members) copy_values_and_gradients(member + 1);
  }
  if (params.bias.type == DType::kFloat32) {
    store_bias_gradient<false>(params, sums, entry, first_query, first_key);
  } else {
    share_scores<T, typename Memory::ScoreTile>(shared_memory + Memory::kScores, sums);
    __syncthreads();
    store_bias_gradient<T>(params, typename Memory::ScoreTile{memory + Memory::kScores}, entry,
                           first_query, first_key);
  }
}

// The gradient of a relative bias from sums of diagonals, an entry per thread.
static __global__ void __launch_bounds__(256)
    attention_diagonals_kernel(const __grid_constant__ AttentionBackwardParams params, int tile,
                               float* table) {
  const int entries = params.queries + params.keys - 1;
  const int64_t bias_heads = params.heads / params.heads_per_bias.divisor;
  const int64_t bias_batches = params.batches / params.batches_per_bias.divisor;
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= bias_batches * bias_heads * entries) return;
  const int64_t of_table = i / entries;
  const int entry = static_cast<int>(i - of_table * entries);
  const int64_t first_head = of_table % bias_heads * params.heads_per_bias.divisor;
  const int64_t first_batch = of_table / bias_heads * params.batches_per_bias.divisor;
  const int tiles = divide_up(params.keys, tile), diagonals = tile - 1 + params.queries;
  float sum = 0.f;
  for (int64_t batch = first_batch; batch < first_batch + params.batches_per_bias.divisor;
       ++batch) {
    for (int64_t head = first_head; head < first_head + params.heads_per_bias.divisor; ++head) {
      const float* const sums = static_cast<const float*>(params.bias_gradient) +
                                (batch * params.heads + head) * tiles * diagonals;
      for (int t = max(entry - diagonals + tile, 0) / tile; t < tiles && t * tile <= entry; ++t)
        sum += sums[int64_t{t} * diagonals + entry - t * tile];
    }
  }
  table[i] = sum;
}

}  // namespace megasoftmax
