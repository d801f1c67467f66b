#pragma once
// Gradients of attention on Hopper for many heads with head dimensions of up to 32, such as those
// of pair representations. A block takes whole heads, one after the other. So it writes gradients
// of queries itself, in 16 bits, and the copies of a head run while the one before ends.
//
// One warp copies. Each of the other warpgroups has 128 keys of a unit, which is a head or a part
// of its keys, and takes them 64 at a time with 64 queries. As in backward.cuh scores are
// transposed, and gradients of scores take the place of the bias in shared memory. The warpgroups
// take turns at the product for dQ of a step, while the others go on. Where a head has
// several units, a part of dQ waits in global memory for the next unit of the block, in
// the order of registers.

#include "../../common/math.cuh"
#include "../bias.cuh"
#include "../exclusion.cuh"
#include "../limits.h"
#include "../params.h"
#include "plan.h"
#include "ptx.cuh"
#include "tensor_map.h"

namespace megasoftmax {

template <bool kHasBias, int kIndex>
struct HopperHeadsMemory {
  static constexpr AttentionHopperHeadsTile kTile = kAttentionHopperHeadsTiles[kIndex];
  static constexpr int kWarpgroups = kTile.warpgroups, kWarps = 4 * kWarpgroups;
  static constexpr int kKeys = kTile.keys(), kQueries = kTile.kQueries, kDim = kTile.head_dim;
  static constexpr int kStages = 3;
  static constexpr int kRowBytes = 2 * kDim;  // of keys, values, queries, gradients of outputs

  // In this order: for two steps the bias, later gradients of scores, in panels of 64 keys; keys
  // and values of two units; queries and gradients of outputs of each stage; of each stage pairs of
  // rows and rows; barriers.
  static constexpr int kPanels = kKeys / 64, kPanelBytes = kQueries * 128;
  static constexpr int kScoreBytes = kPanels * kPanelBytes;
  static constexpr int kKeyBytes = kKeys * kRowBytes, kQueryBytes = kQueries * kRowBytes;
  static_assert(kQueriesOfPairs % kQueries == 0 && kQueries / 2 == 32);  // a lane votes on a pair
  static constexpr int kPairsBytes = kQueries / 2 * static_cast<int>(sizeof(PairOfRows));
  static constexpr int kRowsBytes =
      kPairsBytes + kQueries * static_cast<int>(sizeof(RowOfBackward));
  static constexpr int kKeysAt = 2 * kScoreBytes, kStagesAt = kKeysAt + 4 * kKeyBytes;
  static constexpr int kRowsAt = kStagesAt + kStages * 2 * kQueryBytes;
  static constexpr int kBarriersAt = kRowsAt + kStages * kRowsBytes;
  static constexpr int kBytes = kBarriersAt + 8 * (8 + 2 * kStages + (kHasBias ? 2 : 0));
  static_assert(kBytes <= least_shared_bytes(kHopperMajor, kHopperMajor));

  uint32_t address;

  __device__ uint32_t scores(int buffer) const { return address + buffer * kScoreBytes; }
  __device__ uint32_t keys(int buffer) const { return address + kKeysAt + 2 * buffer * kKeyBytes; }
  __device__ uint32_t values(int buffer) const { return keys(buffer) + kKeyBytes; }
  __device__ uint32_t queries(int stage) const {
    return address + kStagesAt + 2 * stage * kQueryBytes;
  }
  __device__ uint32_t gradients(int stage) const { return queries(stage) + kQueryBytes; }
  __device__ uint32_t rows(int stage) const { return address + kRowsAt + stage * kRowsBytes; }
  __device__ static PairOfRows* pairs(char* memory, int stage) {
    return reinterpret_cast<PairOfRows*>(memory + kRowsAt + stage * kRowsBytes);
  }
  __device__ static RowOfBackward* rows(char* memory, int stage) {
    return reinterpret_cast<RowOfBackward*>(pairs(memory, stage) + kQueries / 2);
  }
  __device__ Barrier barrier(int index) const { return {address + kBarriersAt + 8 * index}; }
  __device__ Barrier keys_are_there(int buffer) const { return barrier(buffer); }
  __device__ Barrier keys_are_used(int buffer) const { return barrier(2 + buffer); }
  __device__ Barrier scores_are_there(int buffer) const { return barrier(4 + buffer); }
  __device__ Barrier scores_are_used(int buffer) const { return barrier(6 + buffer); }
  __device__ Barrier stage_is_there(int stage) const { return barrier(8 + stage); }
  __device__ Barrier stage_is_used(int stage) const { return barrier(8 + kStages + stage); }
  __device__ Barrier bias_is_there(int buffer) const { return barrier(8 + 2 * kStages + buffer); }

  // Called by one thread before others use the barriers.
  __device__ void init_barriers() const {
    for (int buffer = 0; buffer < 2; ++buffer) {
      keys_are_there(buffer).init(1);
      keys_are_used(buffer).init(kWarps);
      scores_are_there(buffer).init(kWarps);
      scores_are_used(buffer).init(4);
      if (kHasBias) bias_is_there(buffer).init(1);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      stage_is_there(stage).init(1);
      stage_is_used(stage).init(kWarps);
    }
    publish_barriers();
  }
};

// The units of a block: of its heads the keys from the first one on. Blocks that run at a time take
// batches that share a bias.
template <int kKeys>
struct UnitsOfBlock {
  int item = static_cast<int>(blockIdx.x);  // counts heads
  int number = 0, first_key = 0;            // of the unit

  __device__ bool are_left(const AttentionParams& params) const {
    return item < params.batches * params.heads;
  }
  __device__ bool is_last_of_head(const AttentionParams& params) const {
    return first_key + kKeys >= params.keys;
  }
  __device__ void advance(const AttentionParams& params) {
    ++number;
    const bool is_last = is_last_of_head(params);
    first_key = is_last ? 0 : first_key + kKeys;
    item += is_last ? static_cast<int>(gridDim.x) : 0;
  }
  __device__ void place(const AttentionParams& params, int& batch, int& head) const {
    params.order.batches.split(item, head, batch);
  }
};

// Writes two rows of a lane of 16 rows of results: those of `row` and eight further. Four lanes
// exchange what they have of a row, so that each has 16 bytes.
template <class T>
__device__ __forceinline__ void store_rows_of_lane(const float (&results)[4][4], float factor,
                                                   T* row, int64_t row_stride, int rows,
                                                   int columns) {
  const int lane = thread_index_anew() % 4;
  const bool is_odd = lane % 2 != 0, is_upper = lane / 2 != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n)
      words[n] = round_pair<T>(results[n][2 * half] * factor, results[n][2 * half + 1] * factor);
    // Exchanges words of neighbours, then pairs of words of lanes two apart.
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      const uint32_t other = __shfl_xor_sync(~0u, is_odd ? words[n] : words[n + 1], 1);
      (is_odd ? words[n] : words[n + 1]) = other;
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t other = __shfl_xor_sync(~0u, is_upper ? words[n] : words[n + 2], 2);
      (is_upper ? words[n] : words[n + 2]) = other;
    }
    if (8 * half < rows && 8 * lane < columns)
      *reinterpret_cast<uint4*>(row + 8 * half * row_stride + 8 * lane) =
          make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The copying warp.
template <class T, bool kHasBias, int kIndex>
__device__ __forceinline__ void copy_heads(const AttentionBackwardParams& params,
                                           const NarrowTensorMaps& maps,
                                           const HopperHeadsMemory<kHasBias, kIndex>& memory) {
  using Memory = HopperHeadsMemory<kHasBias, kIndex>;
  extern __shared__ __align__(1024) char shared_memory[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int step = 0;
  for (UnitsOfBlock<Memory::kKeys> unit; unit.are_left(params); unit.advance(params)) {
    const int key_buffer = unit.number % 2;
    int head, batch;
    unit.place(params, batch, head);
    memory.keys_are_used(key_buffer).wait((unit.number / 2 & 1) ^ 1);
    if (lane == 0) {
      const Barrier there = memory.keys_are_there(key_buffer);
      there.arrive_and_expect(2 * Memory::kKeyBytes);
      for (int i = 0; i < Memory::kWarpgroups; ++i) {
        const int offset = i * 128 * Memory::kRowBytes, row = unit.first_key + 128 * i;
        start_copy_of_box(memory.keys(key_buffer) + offset, maps.key, there, 0, row, head, batch);
        start_copy_of_box(memory.values(key_buffer) + offset, maps.value, there, 0, row, head,
                          batch);
      }
    }
    for (int query = 0; query < params.queries; query += Memory::kQueries, ++step) {
      const int stage = step % Memory::kStages, buffer = step % 2;
      const int rows = min(Memory::kQueries, params.queries - query);
      __syncwarp();  // lanes wait for the same phases
      memory.stage_is_used(stage).wait((step / Memory::kStages & 1) ^ 1);
      if (rows < Memory::kQueries) {  // weights of what lies beyond the last query are 0
        for (int i = rows + lane; i < Memory::kQueries; i += 32)
          Memory::rows(shared_memory, stage)[i] = {0.f, INFINITY, 0.f};
        publish_writes();
        __syncwarp();
      }
      if (lane == 0) {
        const Barrier there = memory.stage_is_there(stage);
        const int row_bytes = rows * static_cast<int>(sizeof(RowOfBackward));
        there.arrive_and_expect(2 * Memory::kQueryBytes + Memory::kPairsBytes + row_bytes);
        start_copy_of_box(memory.queries(stage), maps.query, there, 0, query, head, batch);
        start_copy_of_box(memory.gradients(stage), maps.output_gradient, there, 0, query, head,
                          batch);
        start_copy_of_bytes(memory.rows(stage),
                            params.pairs_of_rows + params.pair_index(batch, head, query),
                            Memory::kPairsBytes, there);
        start_copy_of_bytes(memory.rows(stage) + Memory::kPairsBytes,
                            params.rows_of_backward + params.row_index(batch, head, query),
                            row_bytes, there);
      }
      if constexpr (kHasBias) {
        memory.scores_are_used(buffer).wait((step / 2 & 1) ^ 1);
        if (lane != 0) continue;
        const Barrier there = memory.bias_is_there(buffer);
        int bias_batch, bias_head;
        params.entry_of_bias(batch, head, bias_batch, bias_head);
        there.arrive_and_expect(Memory::kScoreBytes);
        for (int i = 0; i < Memory::kPanels; ++i)
          start_copy_of_box(memory.scores(buffer) + i * Memory::kPanelBytes, maps.bias, there,
                            unit.first_key + 64 * i, query, bias_head, bias_batch);
      }
    }
  }
}

// A warpgroup with 128 keys.
template <class T, bool kHasBias, int kIndex>
__device__ __forceinline__ void multiply_heads(const AttentionBackwardParams& params,
                                               const HopperHeadsMemory<kHasBias, kIndex>& memory,
                                               int warpgroup) {
  using Memory = HopperHeadsMemory<kHasBias, kIndex>;
  constexpr int kDim = Memory::kDim, kQueries = Memory::kQueries, kN = kQueries / 8;
  constexpr int kStages = Memory::kStages, kRowBytes = Memory::kRowBytes;
  constexpr int kHalfBytes = 64 * kRowBytes;
  extern __shared__ __align__(1024) char shared_memory[];
  // Read anew where they are needed: registers are few.
  const auto lane = [] { return thread_index_anew() % 32; };
  const auto warp = [] { return thread_index_anew() / 32 % 4; };
  using Scores = Accumulators<1, kN>;
  using Panel = Tile<T, kQueries, 64>;

  // If registers allow it, weights are multiplied at once, and products of the second half start
  // before those of the first are done.
  constexpr bool kIsAhead = Memory::kTile.registers > 160;
  float weights[kN][4], gradients[kN][4];
  uint32_t rounded[kN / 2][4], rounded_gradients[kN / 2][4];
  int step = 0;
#pragma unroll 1
  for (UnitsOfBlock<Memory::kKeys> unit; unit.are_left(params); unit.advance(params)) {
    const int buffer_of_keys = unit.number % 2;
    const int first_key = unit.first_key + 128 * warpgroup;
    const uint32_t own_keys = memory.keys(buffer_of_keys) + 2 * warpgroup * kHalfBytes;
    const auto keys = [&](int half) { return own_keys + half * kHalfBytes; };
    const auto values = [&](int half) { return keys(half) + Memory::kKeyBytes; };
    int batch, head;
    unit.place(params, batch, head);
    // Bits 2 * half and the next: whether this lane's keys 0 and 8 are excluded. Bit 4: whether
    // one of the warp is.
    uint32_t masked = 0;
    memory.keys_are_there(buffer_of_keys).wait(unit.number / 2 & 1);
    for (int half = 0; half < 2; ++half) {
      const int warp_key = first_key + 64 * half + 16 * warp();
      uint32_t bits = 0;  // of the warp's keys
      if (warp_key < params.keys && params.block_mask.words != nullptr)
        bits = __ldg(params.block_mask.of(batch, head) + params.block_mask.layout.bits() +
                     warp_key / 32) >>
               warp_key % 32;
      // An excluded key that is NaN would make 0 * NaN.
      for (int i = lane(); i < 16 * 4; i += 32) {
        if ((bits >> i / 4 & 1) == 0) continue;
        const uint32_t at = 16 * warp() * kRowBytes + 16 * i;
        store_four(keys(half) + at, {0, 0, 0, 0});
        store_four(values(half) + at, {0, 0, 0, 0});
      }
      const int left = params.keys - warp_key;
      if (left < 16) bits |= ~0u << max(left, 0);
      masked |= ((bits >> FirstElement().row & 1) | (bits >> FirstElement().row >> 7 & 2))
                << 2 * half;
    }
    if (params.block_mask.words != nullptr) {
      publish_writes();
      sync_warpgroup(warpgroup);
    }
    if (__any_sync(~0u, masked != 0)) masked |= 16;

    // The gradient of the queries of a step, from all keys of the unit, or of this and earlier
    // units.
    const auto make_query_gradient = [&](int of_step, int query) {
      const int buffer = of_step % 2;
      int batch, head;
      unit.place(params, batch, head);
      float sum[kDim / 8][4];
      const bool has_part = unit.first_key > 0, is_part = !unit.is_last_of_head(params);
      const auto part = [&](int n) {
        return reinterpret_cast<float4*>(params.query_gradient_parts) +
               (int64_t{blockIdx.x} * divide_up(params.queries, kQueries) + query / kQueries) *
                   (kQueries * kDim / 4) +
               thread_index_anew() % 128 + 128 * n;
      };
      memory.scores_are_there(buffer).wait(of_step / 2 & 1);
      const uint64_t b = narrow_matrix_at(memory.keys(buffer_of_keys));
      uint64_t a = matrix_at(memory.scores(buffer), 16);
      touch(sum);
      begin_products();
#pragma unroll
      for (int panel = 0; panel < Memory::kPanels; ++panel) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          start_product<T, true>(sum, moved(a, panel * Memory::kPanelBytes + 32 * i),
                                 moved(b, (4 * panel + i) * 16 * kRowBytes), panel + i > 0);
      }
      end_products();
      wait_for_products<0>();
      touch(sum);
      __syncwarp();
      if (lane() == 0) memory.scores_are_used(buffer).arrive();
      if (has_part) {  // every warp arrived at these scores after it had written its part
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          const float4 four = __ldcg(part(n));
          sum[n][0] += four.x, sum[n][1] += four.y, sum[n][2] += four.z, sum[n][3] += four.w;
        }
      }
      if (is_part) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
          __stcg(part(n), make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]));
        return;
      }
      const int row = query + 16 * warp() + FirstElement().row;
      store_rows_of_lane<T>(sum, params.scale, params.query_gradient.row<T>(batch, head, row),
                            params.query_gradient.query_stride, params.queries - row,
                            params.head_dim);
    };
    const auto make_last_query_gradient = [&](int query) {
      if (query > 0 && (step - 1) % Memory::kWarpgroups == warpgroup)
        make_query_gradient(step - 1, query - kQueries);
    };

    float key_gradient[2][kDim / 8][4] = {}, value_gradient[2][kDim / 8][4] = {};
#pragma unroll 1
    for (int query = 0;; query += kQueries, ++step) {
      const bool is_left = query < params.queries;
      if (kIsAhead || !is_left) make_last_query_gradient(query);
      if (!is_left) break;
      const int stage = step % kStages, buffer = step % 2;
      memory.stage_is_there(stage).wait(step / kStages & 1);
      const PairOfRows* const pairs = Memory::pairs(shared_memory, stage) + thread_index_anew() % 4;
      const PairOfRows own = Memory::pairs(shared_memory, stage)[lane()];
      // Not so if an offset is NaN or a delta is not finite.
      const bool is_plain = __all_sync(~0u, own.is_plain()) != 0;
      const auto start_scores = [&]<int kHalf>() {
        begin_products();
        start_product_of_rows<T, kDim>(weights, narrow_matrix_at(keys(kHalf)), 0,
                                       narrow_matrix_at(memory.queries(stage)), 0);
        end_products();
        begin_products();
        start_product_of_rows<T, kDim>(gradients, narrow_matrix_at(values(kHalf)), 0,
                                       narrow_matrix_at(memory.gradients(stage)), 0);
        end_products();
      };
      const auto multiply = [&]<int kHalf>() {
        if constexpr (kHalf == 0 || !kIsAhead) start_scores.template operator()<kHalf>();
        const Panel panel{memory.scores(buffer) + (2 * warpgroup + kHalf) * Memory::kPanelBytes};
        if (kHasBias && kHalf == 0) memory.bias_is_there(buffer).wait(step / 2 & 1);
        wait_for_products<1>();
        touch(weights);
        if constexpr (kHalf == 1 && kIsAhead) {
          touch(value_gradient[0]);
          touch(key_gradient[0]);
        }
        if constexpr (kHasBias)
          add_bias(reinterpret_cast<Scores&>(weights), params.logit_scale,
                   TileBias<T, true, Panel>(panel, 0, 16 * warp()));
        const float to_logit = kHasBias ? 1.f : params.logit_scale;
        if (is_plain) {
#pragma unroll
          for (int i = 0; i < 4 * kN; ++i) {
            float& weight = weights[i / 4][i % 4];
            weight = exp2_approximate(
                fmaf(weight, to_logit * kLog2E, -pairs[4 * (i / 4)].offsets[i % 2]));
          }
        } else {
          const RowOfBackward* const rows =
              Memory::rows(shared_memory, stage) + FirstElement().column;
#pragma unroll
          for (int i = 0; i < 4 * kN; ++i) {
            float& weight = weights[i / 4][i % 4];
            const RowOfBackward& row = rows[column_offset(i / 4, i % 4)];
            weight =
                exp2_approximate(fmaf(fmaf(weight, to_logit, -row.max), kLog2E, -row.log2_sum));
          }
        }
        if (masked & 16) {
#pragma unroll
          for (int i = 0; i < 4 * kN; ++i) {
            if (masked >> (2 * kHalf + i % 4 / 2) & 1) weights[i / 4][i % 4] = 0.f;
          }
        }
        const auto multiply_weights = [&] {
#pragma unroll
          for (int i = 0; i < kN / 2; ++i) as_matrix_a<T>(rounded[i], weights, i);
          begin_products();
          start_sum_of_products<T, kRowBytes>(value_gradient[kHalf], rounded,
                                              narrow_matrix_at(memory.gradients(stage)));
          end_products();
        };
        if constexpr (kIsAhead) {
          multiply_weights();
          wait_for_products<1>();
        } else {
          wait_for_products<0>();
        }
        touch(gradients);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            gradients[n][i] = (gradients[n][i] - pairs[4 * n].deltas[i % 2]) * weights[n][i];
        }
        // sm80/backward_tile.cuh says why.
        if (!is_plain) {
#pragma unroll
          for (int i = 0; i < 4 * kN; ++i) {
            if (weights[i / 4][i % 4] == 0.f) gradients[i / 4][i % 4] = 0.f;
          }
        }
        if constexpr (!kIsAhead) multiply_weights();
        if (!kHasBias && kHalf == 0) memory.scores_are_used(buffer).wait((step / 2 & 1) ^ 1);
        const uint32_t first = FragmentsAcross<Panel>(panel, 0).address ^ warp() * 32;
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          as_matrix_a<T>(rounded_gradients[i], gradients, i);
          store_matrices_transposed(first + i * 16 * 128, rounded_gradients[i]);
        }
        begin_products();
        start_sum_of_products<T, kRowBytes>(key_gradient[kHalf], rounded_gradients,
                                            narrow_matrix_at(memory.queries(stage)));
        end_products();
        if constexpr (kHalf == 0 && kIsAhead) {
          start_scores.template operator()<1>();
          return;
        }
        wait_for_products<0>();
        touch(value_gradient[kHalf]);
        touch(key_gradient[kHalf]);
      };
      multiply.template operator()<0>();
      if constexpr (!kIsAhead) make_last_query_gradient(query);
      multiply.template operator()<1>();
      publish_writes();
      __syncwarp();
      if (lane() == 0) {
        memory.scores_are_there(buffer).arrive();
        memory.stage_is_used(stage).arrive();
      }
    }
    __syncwarp();
    if (lane() == 0) memory.keys_are_used(buffer_of_keys).arrive();
    unit.place(params, batch, head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row =
          unit.first_key + 128 * warpgroup + 64 * half + 16 * warp() + FirstElement().row;
      const auto store = [&](const float (&results)[kDim / 8][4], float factor,
                             const Strided& tensor, int columns) {
        store_rows_of_lane<T>(results, factor, tensor.row<T>(batch, head, row), tensor.query_stride,
                              params.keys - row, columns);
      };
      store(value_gradient[half], 1.f, params.value_gradient, params.value_dim);
      store(key_gradient[half], params.scale, params.key_gradient, params.head_dim);
    }
  }
}

template <class T, bool kHasBias, int kIndex>
__global__ void __launch_bounds__(kAttentionHopperHeadsTiles[kIndex].threads(), 1)
    attention_hopper_heads_backward_kernel(const __grid_constant__ AttentionBackwardParams params,
                                           const __grid_constant__ NarrowTensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Memory = HopperHeadsMemory<kHasBias, kIndex>;
  extern __shared__ __align__(1024) char shared_memory[];
  const Memory memory{shared_address(shared_memory)};
  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128)) - 1;
  if (threadIdx.x == 0) memory.init_barriers();
  __syncthreads();
  wait_for_launch_before();
  let_next_launch_begin();
  if (warpgroup < 0) {
    give_registers<Memory::kTile.kCopierRegisters>();
    if (threadIdx.x < 32) copy_heads<T>(params, maps, memory);
    return;
  }
  take_registers<Memory::kTile.registers>();
  multiply_heads<T>(params, memory, warpgroup);
#endif
}

}  // namespace megasoftmax
