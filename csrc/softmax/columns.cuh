#pragma once
// p = exp(z - max z) / sum exp(z - max z) down each column of [length, inner],  z = scale * score;
// backward dz = p * (g - sum(g * p) + h), 0 where p is 0,  d scores = scale * dz.
//
// Strips lie in tiles, see columns_tile.cuh; a block, or several in a cluster, takes a tile: its
// threads go down the length together and add up at the end. Each input is read once and the output
// written once (bf16: 4 bytes per element forward, 6 backward), but for what shared memory cannot
// hold of long columns, which is read twice.

#include <initializer_list>

#include "../common/device.h"
#include "../common/launch.cuh"
#include "../common/registration.h"
#include "columns_tile.cuh"
#include "denominator.cuh"
#include "plan.h"

namespace megasoftmax {

template <class T, int kElements>
__global__ void __launch_bounds__(kColumnsThreads,
                                  (blocks_with_registers(kColumnsForwardBlocks, kColumnsThreads)))
    columns_forward_kernel(const __grid_constant__ ColumnsForwardParams params,
                           const __grid_constant__ ColumnsTiling tiling) {
  extern __shared__ __align__(16) char shared[];
  using Tile = ColumnsTile<T, kElements>;
  if (tiling.policy.blocks > 1) arrive_at_cluster();
  const Tile tile(tiling, params.shape);
  const auto* const scores = static_cast<const T*>(params.scores);
  auto* const slots = tile.slots(shared, 0);
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    tile.start_load(slots, scores, stage);
    __pipeline_commit();
  }

  const Exponent exponent{fabsf(params.scale) * kLog2E};
  const float missing = params.scale < 0 ? INFINITY : -INFINITY;
  MaxAndSum sums[kElements];
#pragma unroll
  for (int j = 0; j < kElements; ++j) sums[j] = {kLowest, 0.f};
  tile.for_arriving([&](int row) {
    typename Tile::Batch strips;
    tile.load(slots, scores, row, false, missing, strips);
    if (params.scale < 0) {
#pragma unroll
      for (int i = 0; i < Tile::kBatch; ++i) strips[i].flip_signs();
    }
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      float z[Tile::kBatch];
#pragma unroll
      for (int i = 0; i < Tile::kBatch; ++i) z[i] = strips[i][j];
      const float max =
          fmaxf(sums[j].max, reduce_pairwise(z, [](float a, float b) { return fmaxf(a, b); }));
#pragma unroll
      for (int i = 0; i < Tile::kBatch; ++i) z[i] = exponent(z[i], max);
      sums[j].sum = sums[j].sum * exponent(sums[j].max, max) +
                    reduce_pairwise(z, [](float a, float b) { return a + b; });
      sums[j].max = max;
    }
  });

  const float sign = params.scale < 0 ? -1.f : 1.f;
  tile.merge(sums, exponent, shared + Tile::kept_bytes(tiling.policy, 1),
             [&](MaxAndSum total, int64_t column, bool is_inside) {
               const Denominator denominator(total, exponent);
               if (params.log_sum_exp != nullptr && tile.rank == 0 && is_inside)
                 params.log_sum_exp[column] = denominator.log_sum_exp();
               return MaxAndSum{sign * total.max, denominator.factor};
             });

  const Exponent with_sign{params.scale * kLog2E};
  with_result_dtype<T>(params.probabilities_type, [&](auto tag) {
    for (int row = 0; row < tile.rows; row += Tile::kBatch) {
      typename Tile::Batch strips;
      tile.load(slots, scores, row, true, missing, strips);
      tile.template store<decltype(tag)>(params.probabilities, row, [&](int i, int j) {
        return with_sign(strips[i][j], sums[j].max) * sums[j].sum;
      });
    }
  });
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900  // where three spill
inline constexpr int kBackwardBlocks = kColumnsBackwardBlocks - 1;
#else
inline constexpr int kBackwardBlocks = kColumnsBackwardBlocks;
#endif

template <class T, int kElements>
__global__ void __launch_bounds__(kColumnsThreads,
                                  (blocks_with_registers(kBackwardBlocks, kColumnsThreads)))
    columns_backward_kernel(const __grid_constant__ ColumnsBackwardParams params,
                            const __grid_constant__ ColumnsTiling tiling) {
  extern __shared__ __align__(16) char shared[];
  using Tile = ColumnsTile<T, kElements>;
  if (tiling.policy.blocks > 1) arrive_at_cluster();
  const Tile tile(tiling, params.shape);
  const auto* const gradient = static_cast<const T*>(params.gradient);
  const auto* const probabilities = static_cast<const T*>(params.probabilities);
  auto *const g_slots = tile.slots(shared, 0), *const p_slots = tile.slots(shared, 1);
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    tile.start_load(g_slots, gradient, stage);
    tile.start_load(p_slots, probabilities, stage);
    __pipeline_commit();
  }

  MaxAndSum dots[kElements] = {};
  tile.for_arriving([&](int row) {
    typename Tile::Batch g, p;
    tile.load(g_slots, gradient, row, false, 0.f, g);
    tile.load(p_slots, probabilities, row, false, 0.f, p);
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
#pragma unroll
      for (int i = 0; i < Tile::kBatch; ++i)
        dots[j].sum += p[i][j] != 0.f ? p[i][j] * g[i][j] : 0.f;
    }
  });

  tile.merge(dots, Exponent{1.f}, shared + Tile::kept_bytes(tiling.policy, 2),
             [&](MaxAndSum total, int64_t column, bool is_inside) {
               if (params.log_sum_exp_gradient != nullptr && is_inside)
                 total.sum -= params.log_sum_exp_gradient[column];
               return total;
             });

  with_result_dtype<T>(params.scores_gradient_type, [&](auto tag) {
    for (int row = 0; row < tile.rows; row += Tile::kBatch) {
      typename Tile::Batch g, p;
      tile.load(g_slots, gradient, row, true, 0.f, g);
      tile.load(p_slots, probabilities, row, true, 0.f, p);
      tile.template store<decltype(tag)>(params.scores_gradient, row, [&](int i, int j) {
        return p[i][j] != 0.f ? p[i][j] * (g[i][j] - dots[j].sum) * params.scale : 0.f;
      });
    }
  });
}

// So that every GPU has room for a block, whatever the shape.
constexpr bool columns_fit_every_gpu(int element_bytes, int strip_elements) {
  const int strip_bytes = element_bytes * strip_elements;
  for (const Gpu& gpu : kGpus) {
    for (int64_t length = 1; length <= 1 << 20; length *= 4) {
      for (const int64_t inner : {strip_elements, 24, 4096}) {
        for (const int inputs : {1, 2}) {
          const ColumnsPolicy policy =
              columns_policy({1, length, inner}, strip_elements, strip_bytes, inputs,
                             columns_batch(strip_bytes), gpu.max_cluster > 1, gpu.shared_bytes);
          if (inputs * policy.kept_strips * kColumnsThreads * strip_bytes +
                  policy.sum_bytes(strip_elements) >
              gpu.shared_bytes)
            return false;
        }
      }
    }
  }
  return true;
}
static_assert(columns_fit_every_gpu(2, 8) && columns_fit_every_gpu(2, 2) &&
              columns_fit_every_gpu(2, 1) && columns_fit_every_gpu(4, 4) &&
              columns_fit_every_gpu(4, 1));

template <class T, int kElements, class Params>
cudaError_t launch_columns(void (*kernel)(Params, ColumnsTiling), int inputs, cudaStream_t stream,
                           const Params& params) {
  using Tile = ColumnsTile<T, kElements>;
  const ColumnsShape& shape = params.shape;
  const auto policy_for = [&](const Device& device) {
    return columns_policy(shape, kElements, sizeof(typename Tile::StripT), inputs, Tile::kBatch,
                          device.max_cluster > 1, device.shared_bytes);
  };
  ColumnsTiling tiling;
  tiling.policy = policy_for(current_device());
  if (tiling.policy.blocks > 1) tiling.policy = policy_for(device_at_hand(stream));
  tiling.strips_per_row = Divider(shape.inner / kElements);
  tiling.strips = shape.outer * tiling.strips_per_row.divisor;
  const int64_t tiles = divide_up<int64_t>(tiling.strips, tiling.policy.lanes);
  const int blocks = tiling.policy.blocks;
  return launch(kernel, dim3(static_cast<unsigned>(tiles * blocks)), dim3(kColumnsThreads),
                Tile::shared_bytes(tiling.policy, inputs),
                blocks > 1 ? Together::kInClusters : Together::kNot, blocks, stream, params,
                tiling);
}

// Calls body.operator()<elements of a strip>(): the widest that rows and inputs are multiples of.
template <class T, class Body>
cudaError_t with_strip(int64_t inner, std::initializer_list<const void*> inputs, Body&& body) {
  uintptr_t bits = static_cast<uintptr_t>(inner) * sizeof(T);
  for (const void* input : inputs) bits |= reinterpret_cast<uintptr_t>(input);
  if (bits % 16 == 0) return body.template operator()<kPackElements<T>>();
  if constexpr (sizeof(T) == 2) {
    if (bits % 4 == 0) return body.template operator()<2>();
  }
  return body.template operator()<1>();
}

template <class T>
cudaError_t launch_columns_forward(const ColumnsForwardParams& params, cudaStream_t stream) {
  return with_strip<T>(params.shape.inner, {params.scores}, [&]<int kElements>() {
    return launch_columns<T, kElements>(columns_forward_kernel<T, kElements>, 1, stream, params);
  });
}

template <class T>
cudaError_t launch_columns_backward(const ColumnsBackwardParams& params, cudaStream_t stream) {
  return with_strip<T>(params.shape.inner, {params.gradient, params.probabilities},
                       [&]<int kElements>() {
                         return launch_columns<T, kElements>(columns_backward_kernel<T, kElements>,
                                                             2, stream, params);
                       });
}

}  // namespace megasoftmax
