#pragma once
// The bias. It is added to the scaled product of queries and keys: a sum that started from a large
// bias would lose digits of the product. Hopper's forward adds a bias of keys that is not large
// with the last step of the product, see sm90/rows_of_keys.cuh. With a softcap it is added to what
// that makes of products.

#include "../common/vector.cuh"
#include "layout.h"
#include "sm80/tile.cuh"

namespace megasoftmax {

// The bias of a batch and head.
template <class T>
struct BiasRows {
  const void* first;
  DType type;
  int64_t query_stride, key_stride;

  __device__ BiasRows(const AttentionParams& params, int batch, int head)
      : type(params.bias.type),
        query_stride(params.bias.query_stride),
        key_stride(params.bias.column_stride) {
    int entry_batch, entry_head;
    params.entry_of_bias(batch, head, entry_batch, entry_head);
    const int64_t offset =
        entry_batch * params.bias.batch_stride + entry_head * params.bias.head_stride;
    first = type == DType::kFloat32
                ? static_cast<const void*>(static_cast<const float*>(params.bias.data) + offset)
                : static_cast<const T*>(params.bias.data) + offset;
  }
  // Whether rows are contiguous float32 and begin at multiples of 16 bytes.
  __device__ bool has_float_vectors() const {
    return type == DType::kFloat32 && key_stride == 1 && query_stride % 4 == 0 &&
           reinterpret_cast<uintptr_t>(first) % 16 == 0;
  }
  __device__ const T* row(int query) const {
    return static_cast<const T*>(first) + query * query_stride;
  }
  // The entry of a relative bias for a query and a key that lie so far apart.
  template <class Element>
  __device__ float at_distance(int distance) const {
    return to_float(static_cast<const Element*>(first)[distance * key_stride]);
  }
  __device__ float operator()(int query, int key) const {
    const int64_t offset = query * query_stride + key * key_stride;
    return type == DType::kFloat32 ? static_cast<const float*>(first)[offset]
                                   : to_float(static_cast<const T*>(first)[offset]);
  }
};

// The members of an entry of the bias, or a part of them. `index` counts parts of entries: the
// heads of an entry's batch lie side by side.
struct BiasMembers {
  int batch, head, part, begin, end;

  __device__ BiasMembers(const AttentionParams& params, int index)
      : BiasMembers(params, index % entries(params), index / entries(params), params.bias_parts) {}
  __device__ BiasMembers(const AttentionParams& params, int entry, int part, int parts)
      : part(part) {
    const int heads = static_cast<int>(params.bias_heads());
    head = entry % heads;
    batch = entry / heads;
    const int64_t members = params.members_of_bias();
    begin = static_cast<int>(members * part / parts);
    end = static_cast<int>(members * (part + 1) / parts);
  }
  __device__ static int entries(const AttentionParams& params) {
    return static_cast<int>(params.bias_heads() * params.bias_batches());
  }
  __device__ void place(const AttentionParams& params, int member, int& of_batch,
                        int& of_head) const {
    int rest;
    params.heads_per_bias.split(member, of_batch, rest);
    of_batch += batch * static_cast<int>(params.batches_per_bias.divisor);
    of_head = head * static_cast<int>(params.heads_per_bias.divisor) + rest;
  }
};

// A tile of a bias of any kind as float32 in shared memory. Of a relative one it has the first
// entry of each diagonal only.
template <int kQueries, int kKeys>
struct FloatBiasTile {
  static constexpr int kPitch = kKeys + kBiasPadding;

  float* values;
  bool is_relative;

  // Entries beyond the tensor become 0. Aligned rows are copied asynchronously; call
  // wait_for_copies.
  template <int kThreads, class T>
  __device__ void fill(const BiasRows<T>& bias, int first_query, int first_key, int queries,
                       int keys) const {
    const int thread = thread_index_anew();
    if (is_relative) {
      for (int i = thread; i < kQueries + kKeys - 1; i += kThreads) {
        // A relative bias: the entry of any query and key of the diagonal.
        const int distance = i - (kQueries - 1) + first_key - first_query;
        const int query = max(-distance, 0), key = max(distance, 0);
        values[i] = query < queries && key < keys ? bias(query, key) : 0.f;
      }
      return;
    }
    if (bias.has_float_vectors()) {
      constexpr int kVectors = kKeys / 4, kRowsAtATime = kThreads / kVectors;
      static_assert(kPitch % 4 == 0 && kQueries % kRowsAtATime == 0);
      const int column = thread % kVectors * 4, first_row = thread / kVectors;
      const float* row = static_cast<const float*>(bias.first) +
                         (first_query + first_row) * bias.query_stride + first_key + column;
      const int bytes = min(max(keys - first_key - column, 0), 4) * 4;
      uint32_t place = shared_address(values + first_row * kPitch + column);
#pragma unroll 8
      for (int i = 0; i < kQueries; i += kRowsAtATime) {
        const bool is_inside = first_query + first_row + i < queries && bytes > 0;
        start_copy_of(place, is_inside ? row : bias.first, is_inside ? bytes : 0);
        row += kRowsAtATime * bias.query_stride;
        place += kRowsAtATime * kPitch * 4;
      }
      return;
    }
    constexpr int kRowsAtATime = kThreads / kKeys;
    const int column = thread % kKeys;
#pragma unroll 8
    for (int row = thread / kKeys; row < kQueries; row += kRowsAtATime) {
      const int query = first_query + row, key = first_key + column;
      values[row * kPitch + column] = query < queries && key < keys ? bias(query, key) : 0.f;
    }
  }
  // A row's first entry, and the distance to the first entry of the next row.
  __device__ const float* row(int query) const {
    return values + (is_relative ? kQueries - 1 : 0) + query * pitch();
  }
  __device__ int pitch() const { return is_relative ? -1 : kPitch; }
};

// A relative bias of a tile of scores as float32 in shared memory: an entry for each diagonal, from
// the diagonal of the last row and the first column on. Scores have queries in rows, or keys. Entry
// i of a second copy is entry i + 1, so that any two neighbours are an aligned pair in one of the
// copies.
template <bool kKeysInRows, int kRows, int kColumns>
struct DiagonalTile {
  static constexpr int kCount = kRows + kColumns - 1, kLastRow = kRows - 1;
  // Rows read the two copies alternately, which lie 16 banks apart.
  static constexpr int kPitch = divide_up(kCount, 32) * 32 + 16;
  static constexpr int kBytes = 2 * kPitch * 4;

  float* values;

  // Fills the tile by kThreads threads, which call `wait` before they write. Entries beyond the
  // tensor are never used.
  template <int kThreads, class T, class Wait>
  __device__ __forceinline__ void fill(int thread, const BiasRows<T>& bias, int first_query,
                                       int first_key, int queries, int keys, Wait&& wait) const {
    constexpr int kEach = divide_up(kCount, kThreads);
    float entries[kEach];
    const auto load = [&]<class Element>() {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int offset = thread + j * kThreads - kLastRow;
        const int distance = (kKeysInRows ? -offset : offset) + first_key - first_query;
        entries[j] = bias.template at_distance<Element>(min(max(distance, 1 - queries), keys - 1));
      }
    };
    // No branch between them: all loads are in flight at a time.
    bias.type == DType::kFloat32 ? load.template operator()<float>()
                                 : load.template operator()<T>();
    wait();
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = thread + j * kThreads;
      if (i >= kCount) continue;
      values[i] = entries[j];
      values[kPitch + i - 1] = entries[j];  // the first one to the padding of the first copy
    }
  }
};

// What a lane reads of a DiagonalTile, for scores from `row` of the tile on. An entry of a row is
// the entry 8 columns before of the row 8 before.
template <class Tile>
struct DiagonalBias {
  const float2* first;

  __device__ DiagonalBias(const Tile& tile, int row) {
    const FirstElement mine;
    const int i = mine.column - row - mine.row + Tile::kLastRow;
    first = reinterpret_cast<const float2*>(tile.values + (i % 2 == 0 ? i : Tile::kPitch + i - 1));
  }
  __device__ void load(int m, int n, float (&left)[4], float (&right)[4]) const {
    const float2 above = pair(n - 2 * m), below = pair(n - 2 * m - 1), next = pair(n - 2 * m + 1);
    left[0] = above.x;
    left[1] = above.y;
    left[2] = below.x;
    left[3] = below.y;
    right[0] = next.x;
    right[1] = next.y;
    right[2] = above.x;
    right[3] = above.y;
  }
  __device__ float2 pair(int n) const { return first[4 * n]; }
};

// DiagonalBias for kN * 8 columns of 16 rows. kAhead pairs are loaded at once, and the others when
// they are added. Pair i belongs to columns 8 * (i - 1) of the first row and to columns 8 * i
// of the row 8 further.
template <int kN, int kAhead>
struct DiagonalPairs {
  float2 ahead[kAhead];
  const float2* pairs;

  template <class Tile>
  __device__ __forceinline__ void load(const Tile& tile, int row) {
    pairs = DiagonalBias(tile, row).first - 4;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = pairs[4 * i];
  }
  // Turns scores into logits, see add_bias.
  __device__ __forceinline__ void add_to(float (&scores)[kN][4], float scale) const {
#pragma unroll
    for (int i = 0; i <= kN; ++i) {
      const float2 pair = i < kAhead ? ahead[i] : pairs[4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = i - 1 + half;
        if (n < 0 || n >= kN) continue;
        float* const score = scores[n] + 2 * half;
        score[0] = fmaf(score[0], scale, pair.x);
        score[1] = fmaf(score[1], scale, pair.y);
      }
    }
  }
};

// The bias of elements [m][n] and [m][n + 1] of a warp, from a tile of the bias with the type of
// memory. Scores begin at `query` and `key` of the tile. They have queries in rows, or keys.
template <class T, bool kKeysInRows, class Tile>
struct TileBias {
  std::conditional_t<kKeysInRows, FragmentsAcross<Tile>, FragmentsDown<Tile>> fragments;
  int query, key;

  __device__ TileBias(const Tile& tile, int query, int key)
      : fragments(tile, kKeysInRows ? 0 : query), query(query), key(key) {}
  __device__ void load(int m, int n, float (&left)[4], float (&right)[4]) const {
    Pack<T> pack;
    if constexpr (kKeysInRows) {
      fragments.load_transposed(pack.words, query + n * 8, key + m * 16);
    } else {
      fragments.load(pack.words, m * 16, key + n * 8);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      left[i] = pack[i];
      right[i] = pack[4 + i];
    }
  }
};

// What a lane reads of a tile of a bias in float32.
template <bool kKeysInRows, class FloatTile>
struct FloatBias {
  const float* first;  // of this lane
  int pitch;

  __device__ FloatBias(const FloatTile& tile, int query, int key) : pitch(tile.pitch()) {
    const FirstElement mine;
    first = tile.row(query + (kKeysInRows ? mine.column : mine.row)) + key +
            (kKeysInRows ? mine.row : mine.column);
  }
  __device__ void load(int m, int n, float (&left)[4], float (&right)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      left[i] = entry(row_offset(m, i), column_offset(n, i));
      right[i] = entry(row_offset(m, i), column_offset(n + 1, i));
    }
  }
  __device__ float entry(int row, int column) const {
    return first[kKeysInRows ? column * pitch + row : row * pitch + column];
  }
};

// Turns scores into logits: scale * score + bias, rounded once.
template <int kM, int kN, class Bias>
__device__ __forceinline__ void add_bias(Accumulators<kM, kN>& scores, float scale,
                                         const Bias& bias) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float left[4], right[4];
      bias.load(m, n, left, right);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[m][n][i] = fmaf(scores[m][n][i], scale, left[i]);
        scores[m][n + 1][i] = fmaf(scores[m][n + 1][i], scale, right[i]);
      }
    }
  }
}

// A tile of the bias in shared memory, as its kind allows.
template <class T, BiasKind kBias, int kQueries, int kKeys>
struct SharedBias {
  using Rows = Tile<T, kQueries, kKeys>;
  using FloatRows = FloatBiasTile<kQueries, kKeys>;

  const AttentionParams& params;
  char* memory;

  __device__ Rows rows() const { return {shared_address(memory)}; }
  __device__ FloatRows float_rows() const {
    return {reinterpret_cast<float*>(memory), params.is_relative};
  }

  // Fills the tile by all threads of a block; call wait_for_copies.
  template <int kThreads>
  __device__ void fill(int batch, int head, int query, int key) const {
    if (kBias == BiasKind::kSoftcap && params.bias.data == nullptr) return;
    const BiasRows<T> bias(params, batch, head);
    if constexpr (kBias == BiasKind::kTile) {
      rows().template start_copy<kThreads>(bias.row(query) + key, bias.query_stride,
                                           params.queries - query, params.keys - key);
    } else if constexpr (has_float_tile(kBias)) {
      float_rows().template fill<kThreads>(bias, query, key, params.queries, params.keys);
    }
  }
  // Turns this warp's scores into logits, from `query` and `key` of the tile on.
  template <bool kKeysInRows, int kM, int kN>
  __device__ void add_to(Accumulators<kM, kN>& scores, int query, int key) const {
    if (kBias == BiasKind::kSoftcap && params.bias.data == nullptr) {
#pragma unroll
      for (int i = 0; i < kM * kN * 4; ++i)
        scores[i / 4 / kN][i / 4 % kN][i % 4] *= params.logit_scale;
    } else if constexpr (kBias == BiasKind::kTile) {
      add_bias(scores, params.logit_scale, TileBias<T, kKeysInRows, Rows>(rows(), query, key));
    } else if constexpr (has_float_tile(kBias)) {
      add_bias(scores, params.logit_scale,
               FloatBias<kKeysInRows, FloatRows>(float_rows(), query, key));
    }
  }
};

}  // namespace megasoftmax
