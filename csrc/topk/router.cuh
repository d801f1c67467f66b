#pragma once
// The routers of mixtures of experts that choose by a score and a bias: s = sigmoid(z) or
// softmax(z), the k with the largest s + bias, and of these s, which may be divided by its sum.
//
// A tile of rows as in tile.cuh. Candidates are found by float16 approximations of what is chosen
// by, which stay in registers. The exact float32 number is computed for candidates only.

#include "tile.cuh"

namespace megasoftmax {

// What a router chooses by. Without a bias the logits order the scores.
enum class ChosenBy { kLogits, kSigmoidAndBias, kSoftmaxAndBias };

// Keys of what is chosen by, which is -inf where the logit is.
template <class T, ChosenBy kBy>
struct RouterKeys : TileKeys<float> {
  static constexpr bool kHasBias = kBy != ChosenBy::kLogits;
  static constexpr bool kIsSigmoid = kBy == ChosenBy::kSigmoidAndBias;

  const float* biases;
  int last;  // column of the row
  Exponent exponent;
  float max = 0.f, factor = 0.f;  // of a softmax

  __device__ explicit RouterKeys(const TopkForwardParams& params)
      : biases(static_cast<const float*>(params.selection_bias)),
        last(static_cast<int>(params.shape.columns) - 1),
        exponent(exponent_of<NoBias>(params)) {}

  __device__ float sigmoid(float x) const {
    return reciprocal_approximate(1.f + exp2_approximate(-x * exponent.c));
  }

  // Near what is chosen by, less a half for a sigmoid. -inf and NaN stay as they are. So does inf,
  // although its score is 1: such rows have no candidates.
  __device__ float near(float x, float bias) const {
    if constexpr (!kHasBias) return x;
    bias = fmaf(x, 0x1p-149f, bias);
    if constexpr (kIsSigmoid)
      return fmaf(tanh_approximate(x * (exponent.c * (kLn2 / 2))), 0.5f, bias);
    return fmaf(exponent(x, max), factor, bias);
  }
  // By how much one of two such numbers, rounded to float16, may be too small beside the other: by
  // kRelative of it, for rounding, and by kAbsolute, twice the error of half a tanh, or of 2^-149
  // of a logit. Both have room to spare.
  static constexpr float kRelative = 0x1p-10f, kAbsolute = kIsSigmoid ? 0x1p-10f : 0x1p-19f;

  __device__ Key of(float x, int position, int column) const {
    float by = x;
    if constexpr (kHasBias) {
      const float bias = biases[min(column, last)];
      by = kIsSigmoid ? sigmoid(x) + bias : fmaf(exponent(x, max), factor, bias);
      by = x == -INFINITY ? x : by;
    }
    return TileKeys<float>::of(by, position);
  }
  __device__ void of(const Pack<T>& pack, int first, int column, Key* keys) const {
#pragma unroll
    for (int i = 0; i < kPackElements<T>; ++i) keys[i] = of(pack[i], first + i, column + i);
  }
};

// As many as shared memory has room for, or fewer, so that few registers are spilled.
template <class T, int kLongest>
inline constexpr int kRouterBlocksPerSm =
    blocks_with_registers((sizeof(T) == 4 ? 5 : 6) - (kLongest > 8), kTileThreads);

template <class T, int kLongest, ChosenBy kBy>
__global__ void __launch_bounds__(kTileThreads, kRouterBlocksPerSm<T, kLongest>)
    topk_router_kernel(const __grid_constant__ TopkForwardParams params,
                       const __grid_constant__ TopkTiles tiles) {
  using Keys = RouterKeys<T, kBy>;
  constexpr bool kIsSoftmax = kBy == ChosenBy::kSoftmaxAndBias;
  using Near = Pack<__half>;
  constexpr int kElements = kPackElements<T>, kVectors = kRouterElements / kElements;
  constexpr int kNearElements = kPackElements<__half>, kNear = kRouterElements / kNearElements;
  extern __shared__ __align__(16) char shared_memory[];
  auto* const tile = reinterpret_cast<Pack<T>*>(shared_memory);

  const int64_t first_row = int64_t{blockIdx.x} * tiles.rows_per_tile;
  const int rows =
      static_cast<int>(min(static_cast<int64_t>(tiles.rows_per_tile), params.rows - first_row));
  load_tile<T, kVectors>(params, tiles, first_row, rows, tile);
  const int thread = thread_index_anew();
  const int lane = thread & (tiles.lanes - 1), row = thread >> tiles.log2_lanes;
  const TileRow<T, kLongest, kVectors, Keys> mine(tile, params, tiles, row, lane);
  const auto over_lanes = [&](float value, auto&& merge) {
    for (int distance = 1; distance < tiles.lanes; distance *= 2)
      value = merge(value, __shfl_xor_sync(~0u, value, distance));
    return value;
  };
  const auto add = [](float a, float b) { return a + b; };
  const auto larger = [](float a, float b) { return fmaxf(a, b); };

  Keys keys(params);
  MaxAndSum total{kLowest, 0.f};
  if (kIsSoftmax) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const Pack<T> x[1] = {mine.vector(i)};
      total.max = fmaxf(total.max, largest_lane(x));
    }
    total.max = over_lanes(total.max, larger);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const Pack<T> x = mine.vector(i);
#pragma unroll
      for (int j = 0; j < kElements; ++j) total.sum += keys.exponent(x[j], total.max);
    }
    total.sum = over_lanes(total.sum, add);
    keys.max = total.max;
    keys.factor = reciprocal_approximate(total.sum);
  }

  typename Keys::Key best[kLongest];
  using Candidates = TileCandidates<__half, kLongest, kNear>;
  mine.template select<Candidates>(keys, best, [&](auto& candidates) {
    Near near[kNear];
    __half2 seen{};  // inf or NaN where one of them is
#pragma unroll
    for (int i = 0; i < kNear; ++i) {
      float of_near[kNearElements];
#pragma unroll
      for (int part = 0; part < kNearElements / kElements; ++part) {
        const int vector = i * (kNearElements / kElements) + part;
        const Pack<T> x = mine.vector(vector);
        Pack<float> added[kElements / 4] = {};
        if (Keys::kHasBias && mine.has(vector)) {
#pragma unroll
          for (int j = 0; j < kElements / 4; ++j)
            added[j] = load_pack<float, 4>(keys.biases + mine.column(vector * kElements) + 4 * j);
        }
#pragma unroll
        for (int j = 0; j < kElements; ++j)
          of_near[part * kElements + j] = keys.near(x[j], added[j / 4][j % 4]);
      }
      near[i] = Near::round(of_near);
#pragma unroll
      for (int word = 0; word < Near::kWords; ++word)
        seen = __hadd2(seen, Halves<__half>::pair(near[i].words[word]));
    }
    candidates.find_threshold(params.k, tiles.lanes, [&](int i) -> const Near& { return near[i]; });
    const bool are_near = __hblt2(seen, __half2half2(CUDART_INF_FP16)) && candidates.is_finite();
    candidates.lower_threshold(Keys::kRelative, Keys::kAbsolute);
#pragma unroll
    for (int i = 0; i < kNear; ++i) candidates.mark(i, near[i]);
    return are_near;
  });
  __syncwarp();  // lanes have turned signs in shared memory

  const uint32_t of_lane = tiles.results_of_first_lane << lane & ((1u << params.k) - 1);
  const bool is_row = row < rows;
  float values[kLongest], largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kLongest; ++i) {
    values[i] = -INFINITY;
    if ((of_lane >> i & 1) == 0) continue;
    values[i] = to_float(mine.logit(Keys::position(best[i])));
    largest = fmaxf(largest, values[i]);
  }
  const RowStatistics statistics(total, fabsf(params.scale));
  if (kIsSoftmax) {
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
    values[i] = kIsSoftmax ? keys.exponent(values[i], max) : keys.sigmoid(values[i]);
    sum += values[i];
  }
  float factor = 1.f;
  if (params.renormalize) {
    sum = over_lanes(sum, add);
    factor = reciprocal_approximate(sum == 0.f ? 1.f : sum);
  } else if (kIsSoftmax) {
    factor = reciprocal_approximate(total.sum);
  }
  if (kIsSoftmax && !statistics.is_regular()) factor = NAN;
  write_tile<float>(params, tiles, values, factor, best, first_row, rows, row, lane);
}

}  // namespace megasoftmax
