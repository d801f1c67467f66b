#pragma once
// Layouts of the shared memory of a block, in bytes. Kernels place their data by them, and plans
// ask whether a block has room. Plain host code.

#include <algorithm>

#include "../common/integers.h"
#include "limits.h"
#include "params.h"

namespace megasoftmax {

enum class BiasKind {
  kNone,
  kTile,     // 16-bit elements of the queries' type, rows at multiples of 16 bytes, dense keys
  kAny,      // any element type and strides, and any bias of float32 queries
  kSoftcap,  // a softcap, and any bias or none
};
// Whether there are instances without mask, ranges and dropout. A softcap has none, because each
// instance takes time to build.
constexpr bool may_be_unmasked(BiasKind kind) { return kind != BiasKind::kSoftcap; }
// Whether a tile of it is float32 in shared memory.
constexpr bool has_float_tile(BiasKind kind) {
  return kind == BiasKind::kAny || kind == BiasKind::kSoftcap;
}

// Padding between rows of a bias in float32, in elements. More does not help: the lanes of a warp
// then have as many bank conflicts, forward, or more, backward.
inline constexpr int kBiasPadding = 4;

constexpr int tile_bytes(int rows, int columns, int element_bytes = 2) {
  return rows * columns * element_bytes;
}

constexpr int bias_bytes(BiasKind kind, int queries, int keys) {
  return kind == BiasKind::kTile ? tile_bytes(queries, keys)
         : has_float_tile(kind)  ? queries * (keys + kBiasPadding) * 4
                                 : 0;
}

// Forward: queries, keys, values, bias.
struct ForwardLayout {
  int keys, values, bias, bias_bytes;

  constexpr ForwardLayout(const AttentionTile& tile, BiasKind kind)
      : keys(tile_bytes(tile.queries(), tile.head_dim, tile.element_bytes)),
        values(keys + tile_bytes(tile.keys, tile.head_dim, tile.element_bytes)),
        bias(values + tile_bytes(tile.keys, tile.head_dim, tile.element_bytes)),
        bias_bytes(megasoftmax::bias_bytes(kind, tile.queries(), tile.keys)) {}
  constexpr int bytes(int bias_stages) const { return bias + bias_stages * bias_bytes; }
};

// Backward: keys, values, weights, gradients of scores, rows of two steps, the bias; then queries
// and gradients of outputs of each stage.
struct BackwardLayout {
  int values, weights, scores, rows, bias, stages, stage_bytes;

  constexpr BackwardLayout(const AttentionBackwardTile& tile, BiasKind kind)
      : values(tile_bytes(tile.keys(), tile.head_dim, tile.element_bytes)),
        weights(2 * values),
        scores(weights + tile_bytes(tile.keys(), tile.queries, tile.element_bytes)),
        rows(scores + tile_bytes(tile.keys(), tile.queries, tile.element_bytes)),
        bias(rows + 2 * tile.queries * static_cast<int>(sizeof(RowOfBackward))),
        stages(divide_up(bias + bias_bytes(kind, tile.queries, tile.keys()), 1024) * 1024),
        stage_bytes(2 * tile_bytes(tile.queries, tile.head_dim, tile.element_bytes)) {}
  constexpr int bytes(int count) const { return stages + count * stage_bytes; }
};

// The gradient of a bias in order: the bias, unless registers hold it; then for each stage keys,
// values, queries, gradients of outputs, rows, and bits of a mask of 128 keys.
struct BiasGradientLayout {
  int bias, stages, values, queries, gradients, rows, key_bits, stage_bytes;

  constexpr BiasGradientLayout(const AttentionBiasGradientTile& tile, BiasKind kind)
      : bias(divide_up(bias_bytes(kind, tile.queries(), tile.keys()), 1024) * 1024),
        stages(tile.holds_bias() ? 0 : bias),
        values(tile_bytes(tile.keys(), tile.head_dim, tile.element_bytes)),
        queries(2 * values),
        gradients(queries + tile_bytes(tile.queries(), tile.head_dim, tile.element_bytes)),
        rows(gradients + tile_bytes(tile.queries(), tile.head_dim, tile.element_bytes)),
        key_bits(rows + tile.queries() * static_cast<int>(sizeof(RowOfBackward))),
        stage_bytes(divide_up(key_bits + 16, 1024) * 1024) {}
  constexpr int bytes(int count) const { return std::max(stages + count * stage_bytes, bias); }
};

// dQ in order: queries, gradients of outputs, keys, values, bias. If a step has fewer keys than the
// block has queries, keys take the place of values.
struct InOrderLayout {
  int gradients, keys, values, bias, bytes;

  constexpr InOrderLayout(int head_dim, int step_keys, BiasKind kind, int element_bytes)
      : gradients(tile_bytes(kInOrderQueries, head_dim, element_bytes)),
        keys(2 * gradients),
        values(step_keys < kInOrderQueries ? keys
                                           : keys + tile_bytes(step_keys, head_dim, element_bytes)),
        bias(values + tile_bytes(step_keys, head_dim, element_bytes)),
        bytes(bias + bias_bytes(kind, kInOrderQueries, step_keys)) {}
};

// Small heads: queries, keys and values of each stage, backward also gradients of outputs; the
// bias, unless registers hold it; backward, weights and gradients of scores; results. Scores lie in
// tiles of the keys that a warp takes at a time, filled up to 32.
struct SmallLayout {
  int tile_bytes, stage_bytes, bias, weights, scores, results, bytes;

  constexpr SmallLayout(const AttentionSmallTile& tile, bool is_backward)
      : tile_bytes(megasoftmax::tile_bytes(tile.side, tile.head_dim)),
        stage_bytes((is_backward ? 4 : 3) * tile_bytes),
        bias(kSmallStages * stage_bytes),
        weights(bias + (tile.holds_bias() ? 0 : score_bytes(tile))),
        scores(weights + (is_backward ? score_bytes(tile) : 0)),
        results(scores + (is_backward ? score_bytes(tile) : 0)),
        bytes(results + tile_bytes) {}
  static constexpr int score_bytes(const AttentionSmallTile& tile) {
    return megasoftmax::tile_bytes(tile.side, divide_up(tile.side, 32) * 32);
  }
};

// Decoding: a ring of keys and values for each warp. At the end the results of each warp's rows
// take its place, with the largest logit and the sum of weights.
struct DecodeLayout {
  int pitch, stage_bytes, bytes;

  constexpr explicit DecodeLayout(int head_dim)
      : pitch(head_dim + 4),
        stage_bytes(2 * tile_bytes(kDecodeKeys, head_dim)),
        bytes(decode_warps(head_dim) *
              std::max(kDecodeStages * stage_bytes, kMaxDecodeQueries * (pitch + 2) * 4)) {}
};

// Head dimensions above kMaxHeadDim: queries, keys and values of two steps, weights; for each row
// the factor of a step, and at the end the largest logit and the sum of weights; what 16 rows see.
struct WideLayout {
  static constexpr int kKeys = tile_bytes(kWideRows, kMaxWideHeadDim);
  static constexpr int kKeyBytes = tile_bytes(kWideKeys, kMaxWideHeadDim);
  static constexpr int kValues = kKeys + 2 * kKeyBytes;
  static constexpr int kValueBytes = tile_bytes(kWideKeys, kMaxWideValueDim);
  static constexpr int kWeights = kValues + 2 * kValueBytes;
  static constexpr int kFactors = kWeights + tile_bytes(kWideRows, kWideKeys);
  static constexpr int kEnds = kFactors + kWideRows * 4;
  static constexpr int kSeen = kEnds + kWideRows * 8;
  static constexpr int kBytes = kSeen + kWideRows / 16 * 8;
};

}  // namespace megasoftmax
