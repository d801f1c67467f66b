#pragma once
// dB of a bias that batches or heads share, in float32 and always in the same order.
//
// A block owns a tile of some queries and keys of the bias and keeps its sums in registers. It
// takes the batches and heads that share the tile, its members, one after the other. They are cut
// into parts, so that blocks fill the GPU. A second launch adds the parts and rounds once.

#include "bias_gradient.cuh"

namespace megasoftmax {

template <class T, BiasKind kBias, int kIndex>
struct BiasGradientMemory {
  static constexpr AttentionBiasGradientTile kTile = kAttentionBiasGradientTiles[kIndex];
  static constexpr int kDim = kTile.head_dim, kKeys = kTile.keys(), kQueries = kTile.queries();
  static constexpr int kThreads = kTile.threads();
  static constexpr int kSide = kTile.side, kM = kSide / 16, kN = kSide / 8;
  static_assert(kTile.element_bytes == sizeof(T));
  using Scores = Accumulators<kM, kN>;
  using KeyTile = Tile<T, kKeys, kDim>;
  using QueryTile = Tile<T, kQueries, kDim>;
  using ScoreTile = Tile<T, kKeys, kQueries>;
  using Bias = SharedBias<T, kBias, kQueries, kKeys>;
  static constexpr BiasGradientLayout kLayout{kTile, kBias};
  static constexpr bool kHoldsBias = kTile.holds_bias();
  static_assert(sizeof(T) == 4 || ScoreTile::kBytes <= kLayout.bytes(1));
};

// Dropout has instances of its own, because it takes registers.
template <class T, BiasKind kBias, bool kDrops, int kIndex>
__global__ void __launch_bounds__(kAttentionBiasGradientTiles[kIndex].threads(),
                                  kAttentionBiasGradientTiles[kIndex].blocks_per_sm)
    attention_bias_gradient_kernel(const __grid_constant__ AttentionBackwardParams params) {
  if (!kIsAmpere) return;
  using Memory = BiasGradientMemory<T, kBias, kIndex>;
  using KeyTile = typename Memory::KeyTile;
  using QueryTile = typename Memory::QueryTile;
  constexpr auto kLayout = Memory::kLayout;
  constexpr int kKeys = Memory::kKeys, kQueries = Memory::kQueries;
  constexpr int kM = Memory::kM, kN = Memory::kN;
  extern __shared__ __align__(1024) char shared_memory[];

  // Tiles of a head lie side by side: blocks that run at a time read the same members.
  const int key_tiles = divide_up(params.keys, kKeys);
  const int tiles = key_tiles * divide_up(params.queries, kQueries);
  const int block = static_cast<int>(blockIdx.x), tile = block % tiles;
  const int first_key = tile % key_tiles * kKeys, first_query = tile / key_tiles * kQueries;
  const BiasMembers members(params, block / tiles);
  int member = members.begin, end = members.end;
  const BackwardWarp warp(Memory::kSide, Memory::kTile.query_warps);
  const int last_query = min(first_query + kQueries, params.queries) - 1;
  // Length and window exclude the same pairs of all members.
  Excluded<kM, kN> cut;
  if (first_key + kKeys > params.keys || first_query + kQueries > params.queries ||
      visible_keys(params, first_query).end < first_key + kKeys ||
      visible_keys(params, last_query).begin > first_key)
    cut.template find<true, true>(params, 0, 0, first_query + warp.query, first_key + warp.key,
                                  true);
  // Outside of the window the gradient is 0.
  if (visible_keys(params, last_query).end <= first_key ||
      visible_keys(params, first_query).begin >= first_key + kKeys)
    member = end;
  const bool is_outside = __all_sync(~0u, cut.are_all());
  const bool has_block_mask = params.block_mask.words != nullptr;
  // A mask of keys alone is copied with their step.
  const bool has_key_bits =
      has_block_mask && params.block_mask.layout.bit_rows == 1 && !params.visible.are_given();

  // A quarter of the warps copies keys, another one queries, values, and gradients of outputs. A
  // thread copies a 16-byte vector of some rows. It computes again which, because registers are
  // few. What is not there was cleared.
  constexpr int kCopiers = Memory::kThreads / 4, kVectors = KeyTile::kVectors;
  constexpr int kRowsAtATime = kCopiers / kVectors;
  constexpr int kCopies = (kKeys > kQueries ? kKeys : kQueries) / kRowsAtATime;
  int copies = 0;
  {
    const int role = static_cast<int>(threadIdx.x) / kCopiers;
    const int row = static_cast<int>(threadIdx.x) % kCopiers / kVectors;
    const int columns = role < 2 ? params.head_dim : params.value_dim;
    const int rows = role % 2 == 0 ? min(params.keys - first_key, kKeys)
                                   : min(params.queries - first_query, kQueries);
    if (static_cast<int>(threadIdx.x) % kVectors * KeyTile::kInVector < columns)
      copies = divide_up(max(rows - row, 0), kRowsAtATime);
  }
  const auto copy = [&](int member, int stage, bool is_first_half, bool is_second_half) {
    const int thread = thread_index_anew();
    const int role = static_cast<int>(uniform(static_cast<uint32_t>(thread / kCopiers)));
    int head, batch, key_head, rest;
    members.place(params, member, batch, head);
    params.heads_per_key_head.split(head, key_head, rest);
    const int at = kLayout.stages + stage * kLayout.stage_bytes;
    const uint32_t memory = shared_address(shared_memory) + at;
    if (role < 2 ? is_first_half : is_second_half) {
      const int first_row = thread % kCopiers / kVectors, vector = thread % kVectors;
      const T* row;
      int64_t step;
      uint32_t tile = memory;
      const auto find = [&](const Strided& tensor, int of_head, int first, int offset) {
        row = tensor.row<const T>(batch, of_head, first);
        step = tensor.query_stride;
        tile += offset;
      };
      if (role == 0) find(params.key, key_head, first_key, 0);
      if (role == 1) find(params.query, head, first_query, kLayout.queries);
      if (role == 2) find(params.value, key_head, first_key, kLayout.values);
      if (role == 3) find(params.output_gradient, head, first_query, kLayout.gradients);
      row += first_row * step + vector * KeyTile::kInVector;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if (i < copies)
          start_copy(tile + KeyTile::offset(first_row + i * kRowsAtATime, vector), row);
        row += kRowsAtATime * step;
      }
    }
    if (is_second_half)
      start_copy_of_rows<kQueries>(
          params, reinterpret_cast<RowOfBackward*>(shared_memory + at + kLayout.rows), batch, head,
          first_query);
    if (is_first_half && has_key_bits && thread == 0)
      start_copy(memory + kLayout.key_bits, params.block_mask.of(batch, head) +
                                                params.block_mask.layout.bits() +
                                                first_key / 128 * 4);
    end_copies();
  };

  const typename Memory::Bias bias{params, shared_memory};
  typename Memory::Scores held_bias = {};
  if (member < end) {
    int head, batch;
    members.place(params, member, batch, head);
    bias.template fill<Memory::kThreads>(batch, head, first_query, first_key);
    if constexpr (Memory::kHoldsBias) {
      wait_for_copies();
      __syncthreads();
      bias.template add_to<true>(held_bias, warp.query, warp.key);
      __syncthreads();  // steps take its place
    }
  }
  const int stages = params.stages;
  if (first_key + kKeys > params.keys || first_query + kQueries > params.queries ||
      min(params.head_dim, params.value_dim) < Memory::kDim) {
    for (int i = static_cast<int>(threadIdx.x) * 16; i < stages * kLayout.stage_bytes;
         i += Memory::kThreads * 16)
      *reinterpret_cast<uint4*>(shared_memory + kLayout.stages + i) = {};
    __syncthreads();  // before copies of others
  }
  if (stages == 1 && member < end) {
    copy(member, 0, true, false);
    copy(member, 0, false, true);
  }
  for (int ahead = 0; ahead < stages - 1; ++ahead) {
    member + ahead < end ? copy(member + ahead, ahead, true, true) : end_copies();
  }
  typename Memory::Scores sums = {};
  int stage = 0;
#pragma unroll 1
  for (; member < end; ++member) {
    wait_for_copies_before<kMostBiasGradientStages - 2>(stages == 1 ? 1 : stages - 2);
    __syncthreads();  // this step's copies are there, the step before is done
    if (stages > 1) {
      const int free = stage == 0 ? stages - 1 : stage - 1;
      member + stages - 1 < end ? copy(member + stages - 1, free, true, true) : end_copies();
    }
    char* const memory = shared_memory + kLayout.stages + stage * kLayout.stage_bytes;
    int head, batch;
    members.place(params, member, batch, head);
    Excluded<kM, kN> excluded = cut;
    bool is_idle = is_outside;
    if (has_block_mask && !is_outside) {
      const int key = first_key + warp.key;
      if (has_key_bits) {
        const uint32_t bits =
            reinterpret_cast<const uint32_t*>(memory + kLayout.key_bits)[key / 32 % 4] >> key % 32;
        if (bits != 0) excluded.add_keys(bits);
      } else {
        excluded.template find<true>(params, batch, head, first_query + warp.query, key, false);
      }
      is_idle = __all_sync(~0u, excluded.are_all());
    }
    const auto between = [&] {
      if (stages > 1) return;
      wait_for_copies();
      __syncthreads();  // values and gradients are there, keys and queries are used up
      if (member + 1 < end) copy(member + 1, 0, true, false);
    };
    if (is_idle) {
      between();
    } else {
      typename Memory::Scores weights = {}, gradients = {};
      const uint32_t at = shared_address(memory);
      const bool is_finite = find_score_gradients<T, kBias, !kDrops, false, Memory>(
          params, {batch, head, first_query, first_key},
          {at, at + kLayout.values, at + kLayout.queries, at + kLayout.gradients,
           reinterpret_cast<const RowOfBackward*>(memory + kLayout.rows)},
          warp, excluded, weights, gradients,
          [&](typename Memory::Scores& scores) {
            if constexpr (Memory::kHoldsBias) {
#pragma unroll
              for (int i = 0; i < 4 * kM * kN; ++i) {
                float& score = scores[i / (4 * kN)][i / 4 % kN][i % 4];
                score = fmaf(score, params.logit_scale, held_bias[i / (4 * kN)][i / 4 % kN][i % 4]);
              }
            } else {
              bias.template add_to<true>(scores, warp.query, warp.key);
            }
          },
          between);
      // add(is_counted) adds the entries for which is_counted is true.
      const auto add = [&](auto&& is_counted) {
#pragma unroll
        for (int i = 0; i < 4 * kM * kN; ++i) {
          const int m = i / (4 * kN), n = i / 4 % kN, j = i % 4;
          if (is_counted(m, n, j))
            sums[m][n][j] = fmaf(fabsf(weights[m][n][j]), gradients[m][n][j], sums[m][n][j]);
        }
      };
      if (!is_finite) {
        // The score of a weight of 0 has gradient 0, even if the gradient of the weight is not
        // finite.
        add([&](int m, int n, int j) { return !excluded.has(m, n, j) && weights[m][n][j] != 0.f; });
      } else if (!excluded.any()) {
        add([](int, int, int) { return true; });
      } else if (has_key_bits && !cut.any()) {
        add([&](int m, int, int j) { return !excluded.has(m, 0, j / 2 * 2); });
      } else {
        add([&](int m, int n, int j) { return !excluded.has(m, n, j); });
      }
    }
    if (stages == 1) {
      __syncthreads();  // values and gradients are used up
      if (member + 1 < end) copy(member + 1, 0, false, true);
    }
    if (++stage == stages) stage = 0;
  }
  const int64_t bias_entry = members.batch * params.bias_heads() + members.head;
  const auto store = [&](float* of_head) {
    store_gradients<false>(params, of_head, first_query + warp.query, first_key + warp.key, sums);
  };
  if (params.bias_parts > 1) {
    store(params.bias_part(members.part) + bias_entry * params.queries * params.bias_pitch());
  } else if (sizeof(T) == 4 || params.bias.type == DType::kFloat32) {
    store(bias_gradient_at<float>(params, bias_entry, 0, 0));
  } else if constexpr (sizeof(T) == 2) {
    using ScoreTile = typename Memory::ScoreTile;
    __syncthreads();  // all tiles are used up
    share_scores<T, ScoreTile>(shared_memory, sums, warp);
    __syncthreads();
    DenseBiasGradient<ScoreTile>{{}, bias_entry}.take_shared(
        params, {.query = first_query, .key = first_key}, shared_memory);
  }
}

// Adds up the parts of dB. A thread has four entries. With more parts than kMostBiasPartsOfThread,
// the warps of a block have the same entries, and each adds some of the parts.
inline constexpr int kThreadsOfBiasParts = 256, kMostBiasPartsOfThread = 8;
__host__ __device__ inline int entries_of_bias_part_block(const AttentionBackwardParams& params) {
  return 4 * (params.bias_parts > kMostBiasPartsOfThread ? 32 : kThreadsOfBiasParts);
}
template <class T>
__global__ void __launch_bounds__(kThreadsOfBiasParts)
    attention_bias_parts_kernel(const __grid_constant__ AttentionBackwardParams params) {
  if (!kIsAmpere) return;
  wait_for_launch_before();
  let_next_launch_begin();
  constexpr int kWarps = kThreadsOfBiasParts / 32;
  __shared__ float4 of_warps[kWarps][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int entries = entries_of_bias_part_block(params);
  const bool shares = params.bias_parts > kMostBiasPartsOfThread;
  const int64_t count = params.bias_entries();
  const int64_t first =
      int64_t{blockIdx.x} * entries + (shares ? lane : static_cast<int>(threadIdx.x)) * 4;
  float4 sum = {};
  const auto add = [&](const float4& other) {
    sum.x += other.x;
    sum.y += other.y;
    sum.z += other.z;
    sum.w += other.w;
  };
  if (first < count) {
#pragma unroll 4
    for (int part = shares ? warp : 0; part < params.bias_parts; part += shares ? kWarps : 1)
      add(__ldcs(reinterpret_cast<const float4*>(params.bias_part(part) + first)));
  }
  if (shares) {
    of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int other = 1; other < kWarps; ++other) add(of_warps[other][lane]);
  }
  if (first >= count) return;
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  const auto store = [&]<class Out>() {
    *reinterpret_cast<Pack<Out, 4>*>(static_cast<Out*>(params.bias_gradient) + first) =
        Pack<Out, 4>::round(sums);
  };
  if (sizeof(T) == 4 || params.bias.type == DType::kFloat32) {
    store.template operator()<float>();
  } else if constexpr (sizeof(T) == 2) {
    store.template operator()<T>();
  }
}

}  // namespace megasoftmax
