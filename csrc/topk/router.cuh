#pragma once
// The routers of mixtures of experts that choose by a score and a bias: s = sigmoid(z) or
// softmax(z), the k with the largest s + bias, and of these s, which may be divided by its sum.
//
// A tile of rows as in tile.cuh. What is chosen by, float32, takes the place of the logits in
// shared memory; the scores of the k are made again of their logits, which the cache still has. So
// each logit is read once from memory, and k probabilities and columns are written.

#include "tile.cuh"

namespace megasoftmax {

template <class T, int kLongest>
__global__ void __launch_bounds__(kTileThreads, kLongest > 8 ? 5 : 6)
    topk_router_kernel(const __grid_constant__ TopkForwardParams params,
                       const __grid_constant__ TopkTiles tiles) {
  using Keys = TileKeys<float>;
  constexpr int kElements = kPackElements<T>, kParts = kElements / 4;
  constexpr int kLoads = kRouterVectors / kParts, kTogether = 8;  // loads of a thread at a time
  extern __shared__ __align__(16) char shared_memory[];
  auto* const tile = reinterpret_cast<Pack<float>*>(shared_memory);

  const int64_t first_row = int64_t{blockIdx.x} * tiles.rows_per_tile;
  const int rows =
      static_cast<int>(min(static_cast<int64_t>(tiles.rows_per_tile), params.rows - first_row));
  const int pitch = tile_pitch(kRouterVectors) << tiles.log2_lanes;
  const auto* const logits =
      static_cast<const T*>(params.scores.data) + first_row * (4 * tiles.vectors);
  const auto* const bias = static_cast<const Pack<float>*>(params.selection_bias);
  const float sign = params.scale < 0 ? -1.f : 1.f;
  const float c = params.scale * kLog2E;
  const auto sigmoid = [&](float x) {
    return reciprocal_approximate(1.f + exp2_approximate(-x * c));
  };
  // What orders the entries of a sigmoid without a bias are the logits.
  const bool has_sigmoids = params.sigmoid && bias != nullptr;
  {
    const int thread = static_cast<int>(threadIdx.x);
    const int log2_places = tiles.log2_places - (kParts == 2), mask = (1 << log2_places) - 1;
#pragma unroll 1
    for (int at_first = thread; at_first < kLoads * kTileThreads;
         at_first += kTogether * kTileThreads) {
      Pack<T> raw[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = at_first + i * kTileThreads, row = at >> log2_places, vector = at & mask;
        if (row < rows && vector * kParts < tiles.vectors)
          raw[i] =
              load_pack<T, kElements>(logits + (row * tiles.vectors / kParts + vector) * kElements);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = at_first + i * kTileThreads, row = at >> log2_places, vector = at & mask;
        if (row >= rows || vector * kParts >= tiles.vectors) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          Pack<float> added;
          if (has_sigmoids) added = bias[vector * kParts + part];
          float by[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float x = raw[i][part * 4 + j], z = x * sign;
            by[j] = !has_sigmoids ? z : z == -INFINITY ? z : sigmoid(x) + added[j];
          }
          tile[row * pitch + vector * kParts + part] = Pack<float>::round(by);
        }
      }
    }
    __syncthreads();
  }
  const int thread = thread_index_anew();
  const int lane = thread & (tiles.lanes - 1), row = thread >> tiles.log2_lanes;
  const TileRow<float, kLongest, kRouterVectors> mine{tile + row * pitch + lane, tiles, lane};
  mine.fill_behind_end();
  const auto over_lanes = [&](float value, auto&& merge) {
    for (int distance = 1; distance < tiles.lanes; distance *= 2)
      value = merge(value, __shfl_xor_sync(~0u, value, distance));
    return value;
  };
  const auto add = [](float a, float b) { return a + b; };
  const auto larger = [](float a, float b) { return fmaxf(a, b); };

  const Exponent exponent = exponent_of<NoBias>(params);
  MaxAndSum total{kLowest, 0.f};
  if (!params.sigmoid) {  // probabilities take the place of logits
#pragma unroll
    for (int i = 0; i < kRouterVectors; ++i) {
      const Pack<float> z = mine.vector(i);
      total.max = fmaxf(total.max, fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3])));
    }
    total.max = over_lanes(total.max, larger);
#pragma unroll
    for (int i = 0; i < kRouterVectors; ++i) {
      const Pack<float> z = mine.vector(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) total.sum += exponent(z[j], total.max);
    }
    total.sum = over_lanes(total.sum, add);
    const float factor = reciprocal_approximate(total.sum);
#pragma unroll
    for (int i = 0; i < kRouterVectors; ++i) {
      const int vector = (i << tiles.log2_lanes) + lane;
      if (vector >= tiles.vectors) continue;
      const Pack<float> z = mine.vector(i), added = bias[vector];
      float by[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        by[j] = z[j] == -INFINITY ? z[j] : fmaf(exponent(z[j], total.max), factor, added[j]);
      mine.vector(i) = Pack<float>::round(by);
    }
  }

  typename Keys::Key best[kLongest];
  float seen = 0.f;  // NaN where one of them is
  mine.select(
      params.k, best, [](float) {},
      [&](const Pack<float>& pack) { seen += (pack[0] + pack[1]) + (pack[2] + pack[3]); },
      [&] { return seen == seen; });

  const uint32_t of_lane = tiles.results_of_first_lane << lane & ((1u << params.k) - 1);
  const bool is_row = row < rows;
  float values[kLongest], largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kLongest; ++i) {
    values[i] = -INFINITY;
    if ((of_lane >> i & 1) == 0 || !is_row) continue;
    values[i] = to_float(logits[row * (4 * tiles.vectors) + Keys::position(best[i])]);
    largest = fmaxf(largest, values[i] * sign);
  }
  const RowStatistics statistics(total, fabsf(params.scale));
  if (!params.sigmoid) {
    if (lane == 0 && is_row) statistics.write(params, first_row + row);
  } else if (lane == 0 && is_row) {
    for (int i = 0; i < 3; ++i) params.statistics[i * params.rows + first_row + row] = 0.f;
  }
  // The largest of the k: others may be too small for a float beside that of the row.
  const float max = params.renormalize ? fmaxf(over_lanes(largest, larger), kLowest) : total.max;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kLongest; ++i) {
    if ((of_lane >> i & 1) == 0) continue;
    values[i] = params.sigmoid ? sigmoid(values[i]) : exponent(values[i] * sign, max);
    sum += values[i];
  }
  float factor = 1.f;
  if (params.renormalize) {
    sum = over_lanes(sum, add);
    factor = reciprocal_approximate(sum == 0.f ? 1.f : sum);
  } else if (!params.sigmoid) {
    factor = reciprocal_approximate(total.sum);
  }
  if (!params.sigmoid && !statistics.is_regular()) factor = NAN;
  write_tile<float>(params, tiles, values, factor, best, first_row, rows, row, lane);
}

}  // namespace megasoftmax
