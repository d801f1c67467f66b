#pragma once
// dB = dS, or sums of dS over what shares an entry of the bias. Each kind of gradient is a policy.
// A step of the backward offers it the gradients of a tile of scores twice: `take` gets what this
// warp holds in registers, in float32; `take_shared` gets the tile of the block in shared memory,
// in the type of the queries. Policies of a 16-bit bias use the latter.

#include "backward_tile.cuh"

namespace megasoftmax {

// A gradient with an entry for each score of a head of the bias: [..., queries, keys].
template <class Element>
__device__ inline Element* bias_gradient_at(const AttentionBackwardParams& params,
                                            int64_t bias_head, int query, int key) {
  return static_cast<Element*>(params.bias_gradient) +
         (bias_head * params.queries + query) * params.bias_pitch() + key;
}

struct NoBiasGradient {
  template <class... Arguments>
  __device__ static void take(const Arguments&...) {}
  template <class... Arguments>
  __device__ static void take_shared(const Arguments&...) {}
};

// Writes this warp's gradients of scores, or adds them, to those of a head, float32, from `query`
// and `key` on. Eight lanes have eight neighbours. Zeros are written where rows are padded.
template <bool kAdds, int kM, int kN>
__device__ __forceinline__ void store_gradients(const AttentionBackwardParams& params,
                                                float* of_head, int query, int key,
                                                const Accumulators<kM, kN>& gradients) {
  const FirstElement mine;
  const int first_query = query + mine.column, first_key = key + mine.row;
  float* const first = of_head + first_query * params.bias_pitch() + first_key;
  const int end = kAdds ? params.keys : static_cast<int>(params.bias_pitch());
  const auto store = [&]<bool kIsWhole>() {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const int column = column_offset(n, right);
        if (!kIsWhole && first_query + column >= params.queries) continue;
        float* const entries = first + column * params.bias_pitch();
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int i = right; i < 4; i += 2) {
            const int row = row_offset(m, i);
            if (!kIsWhole && first_key + row >= end) continue;
            if constexpr (kAdds) {
              add_to_global(entries + row, gradients[m][n][i]);
            } else {
              entries[row] = gradients[m][n][i];
            }
          }
        }
      }
    }
  };
  // A branch around each addition costs as much as several additions. Whole tiles have none.
  if (query + 8 * kN <= params.queries && key + 16 * kM <= params.keys) {
    store.template operator()<true>();
  } else {
    store.template operator()<false>();
  }
}

// A bias in float32: dense, or summed over what shares an entry.
template <bool kAdds>
struct FloatBiasGradient : NoBiasGradient {
  int64_t bias_head;

  template <int kM, int kN>
  __device__ void take(const AttentionBackwardParams& params, const FirstScore& at,
                       const Accumulators<kM, kN>& gradients) {
    const BackwardWarp warp(16 * kM);
    store_gradients<kAdds>(params, bias_gradient_at<float>(params, bias_head, 0, 0),
                           at.query + warp.query, at.key + warp.key, gradients);
  }
};

// A lane's elements of a tile of scores: column lane / 4 of eight, 8 neighbours of 32 rows, from
// lane % 4 * 8 on.
template <class ScoreTile>
struct FragmentsAlong : Fragments<ScoreTile> {
  // Matrix i has rows 2 * (i ^ j) and the next of the j-th eight: so the vectors that a load takes
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

// A dense bias in 16 bits: each warp writes 16 queries and 64 keys, or 8 and 32 if a tile has 32
// queries and 32 keys.
template <class ScoreTile>
struct DenseBiasGradient : NoBiasGradient {
  int64_t bias_head;

  __device__ void take_shared(const AttentionBackwardParams& params, const FirstScore& at,
                              const char* scores) {
    using T = typename ScoreTile::Element;
    T* const out = bias_gradient_at<T>(params, bias_head, 0, 0);
    const int thread = thread_index_anew(), lane = thread % 32, warp = thread / 32;
    constexpr int kBlocks = ScoreTile::kColumns > 32 ? 2 : 1;  // of 8 queries
    constexpr int kWarpsOfQueries = ScoreTile::kColumns / (8 * kBlocks);
    const int first_column = warp % kWarpsOfQueries * kBlocks * 8;
    const int first_row = warp / kWarpsOfQueries * kBlocks * 32;
    const FragmentsAlong<ScoreTile> fragments(ScoreTile{shared_address(scores)});
#pragma unroll
    for (int block = 0; block < kBlocks * kBlocks; ++block) {
      const int column = first_column + block % kBlocks * 8;
      const int row = first_row + block / kBlocks * 32;
      uint32_t pairs[4];
      fragments.load(pairs, row, column);
      const int query = at.query + column + lane / 4, key = at.key + row + lane % 4 * 8;
      if (query >= params.queries || key >= params.keys) continue;
      *reinterpret_cast<uint4*>(out + query * params.bias_pitch() + key) = {pairs[0], pairs[1],
                                                                            pairs[2], pairs[3]};
    }
  }
};

// A bias in 16 bits, summed in float32 over what shares an entry. A warp takes 32 keys of a query
// together, because an addition costs as much as the cache lines that it touches.
template <class ScoreTile>
struct SharedBiasGradient : NoBiasGradient {
  int64_t bias_head;

  __device__ void take_shared(const AttentionBackwardParams& params, const FirstScore& at,
                              const char* scores) {
    // All warps have the same number of 16-byte vectors.
    constexpr int kParts = 128 / ScoreTile::kColumns, kVectors = ScoreTile::kColumns / 8 / kParts;
    const int thread = thread_index_anew(), lane = thread % 32, warp = thread / 32;
    const int row = warp / kParts * 32 + lane, first_vector = warp % kParts * kVectors;
    const int query = at.query + first_vector * 8, key = at.key + row;
    if (key >= params.keys) return;
    float* const first = bias_gradient_at<float>(params, bias_head, query, key);
    const auto add = [&]<bool kIsWhole>() {
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        const auto gradients = *reinterpret_cast<const Pack<typename ScoreTile::Element, 8>*>(
            scores + ScoreTile::offset(row, first_vector + vector));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (kIsWhole || query + vector * 8 + i < params.queries)
            add_to_global(first + (vector * 8 + i) * params.bias_pitch(), gradients[i]);
        }
      }
    };
    if (query + kVectors * 8 <= params.queries) {
      add.template operator()<true>();
    } else {
      add.template operator()<false>();
    }
  }
};

// Sums over queries for this warp's keys, in registers until the last tile of a head. Two warps
// have the same keys. Each adds once, so that their order does not matter.
template <int kM>
struct KeysBiasGradient : NoBiasGradient {
  float (&sums)[kM][2];
  bool is_last_of_head;

  template <int kN>
  __device__ void take(const AttentionBackwardParams& params, const FirstScore& at,
                       const Accumulators<kM, kN>& gradients) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][i / 2] += gradients[m][n][i];
      }
    }
    if (!is_last_of_head) return;
    const BackwardWarp warp(16 * kM);
    const FirstElement mine;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_row(sums[m][half]);
        const int key = at.key + warp.key + mine.row + row_offset(m, 2 * half);
        if (mine.column == 0 && key < params.keys)
          atomicAdd(static_cast<float*>(params.bias_gradient) +
                        (int64_t{at.batch} * params.heads + at.head) * params.keys + key,
                    sum);
        sums[m][half] = 0.f;
      }
    }
  }
};

// Sums along diagonals. One thread sums a diagonal, in a fixed order.
template <class ScoreTile>
struct DiagonalsBiasGradient : NoBiasGradient {
  __device__ static void take_shared(const AttentionBackwardParams& params, const FirstScore& at,
                                     const char* scores) {
    constexpr int kKeys = ScoreTile::kRows, kQueries = ScoreTile::kColumns;
    const int thread = thread_index_anew();
    float* const sums = diagonals_of<kKeys>(params, at.batch, at.head, at.key);
    // Key - query inside the tile.
    const int distance = thread - (kQueries - 1);
    if (distance >= kKeys) return;
    float sum = 0.f;
    const int begin = max(distance, 0), end = min(distance + kQueries, kKeys);
    for (int key = begin; key < end; ++key) {
      const int query = key - distance;
      sum += to_float(*reinterpret_cast<const typename ScoreTile::Element*>(
          scores + ScoreTile::place(key, query)));
    }
    const int64_t diagonal = distance - at.query + params.queries - 1;
    if (diagonal >= 0) sums[diagonal] += sum;
  }
};

// Calls body(policy) for the gradient that blocks of keys make in a launch.
template <BiasKind kBias, class ScoreTile, int kM, class Body>
__device__ __forceinline__ void with_bias_gradient(const AttentionBackwardParams& params,
                                                   const FirstScore& at, float (&key_sums)[kM][2],
                                                   bool is_last_of_head, Body&& body) {
  if constexpr (kBias != BiasKind::kNone) {
    constexpr bool kIsAlwaysFloat = sizeof(typename ScoreTile::Element) == 4;
    const bool is_float =
        kIsAlwaysFloat || (has_float_tile(kBias) && params.bias.type == DType::kFloat32);
    const auto bias_head = [&] {
      int batch, head;
      params.entry_of_bias(at.batch, at.head, batch, head);
      return batch * params.bias_heads() + head;
    };
    const BiasGradient kind = params.bias_gradient_kind;
    // A switch would become a table of jumps, which costs registers.
    const auto take_dense = [&]<bool kAdds, class Of16Bits>() {
      if constexpr (kIsAlwaysFloat) {
        body(FloatBiasGradient<kAdds>{{}, bias_head()});
      } else {
        is_float ? body(FloatBiasGradient<kAdds>{{}, bias_head()})
                 : body(Of16Bits{{}, bias_head()});
      }
    };
    if (kind == BiasGradient::kDense)
      take_dense.template operator()<false, DenseBiasGradient<ScoreTile>>();
    if (kind == BiasGradient::kShared)
      take_dense.template operator()<true, SharedBiasGradient<ScoreTile>>();
    if (kind == BiasGradient::kKeys) body(KeysBiasGradient<kM>{{}, key_sums, is_last_of_head});
    if (kind == BiasGradient::kDiagonals) body(DiagonalsBiasGradient<ScoreTile>{});
  }
}

// The gradient of a relative bias from sums of diagonals. kDiagonalLanes lanes of a warp sum an
// entry and take its tiles alternately, so that many loads are in flight.
inline constexpr int kDiagonalLanes = 4;
template <int kKeys>
__global__ void __launch_bounds__(256)
    attention_diagonals_kernel(const __grid_constant__ AttentionBackwardParams params) {
  if (!kIsAmpere) return;
  constexpr int kEntries = 32 / kDiagonalLanes;  // of a warp
  constexpr int kAtATime = 4;                    // of those that share an entry
  const int entries = params.queries + params.keys - 1;
  const int64_t bias_heads = params.bias_heads();
  const int64_t count = params.bias_batches() * bias_heads * entries;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t place = (int64_t{blockIdx.x} * 256 + threadIdx.x) / 32 * kEntries + lane % kEntries;
  const int64_t i = min(place, count - 1);
  const int64_t of_table = i / entries;
  const int entry = static_cast<int>(i - of_table * entries);
  const int heads = static_cast<int>(params.heads_per_bias.divisor);
  const int batches = static_cast<int>(params.batches_per_bias.divisor), sharers = batches * heads;
  const int64_t first_head = of_table % bias_heads * heads;
  const int64_t first_batch = of_table / bias_heads * batches;
  const int tiles = divide_up(params.keys, kKeys), diagonals = kKeys - 1 + params.queries;
  const int first = max(entry - diagonals + kKeys, 0) / kKeys + lane / kEntries;
  const int end = min(tiles, entry / kKeys + 1);
  float sum = 0.f;
  for (int sharer = 0; sharer < sharers; sharer += kAtATime) {
    const float* sums[kAtATime];
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      const int number = min(sharer + j, sharers - 1);
      const int64_t batch = first_batch + number / heads, head = first_head + number % heads;
      sums[j] = static_cast<const float*>(params.bias_gradient) +
                (batch * params.heads + head) * tiles * diagonals + entry;
    }
#pragma unroll 2
    for (int t = first; t < end; t += kDiagonalLanes) {
#pragma unroll
      for (int j = 0; j < kAtATime; ++j) {
        const float of_tile = sums[j][int64_t{t} * (diagonals - kKeys)];
        sum += sharer + j < sharers ? of_tile : 0.f;
      }
    }
  }
#pragma unroll
  for (int distance = kEntries; distance < 32; distance *= 2)
    sum += __shfl_xor_sync(~0u, sum, distance);
  if (lane < kEntries && place < count) params.table_gradient[i] = sum;
}

}  // namespace megasoftmax
