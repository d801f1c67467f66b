#pragma once
// The k largest of short rows, as those of a mixture-of-experts router, by the formulas of
// forward.cuh without mask and bias.
//
// A block takes a tile of consecutive rows, which is contiguous, through shared memory in vectors
// of 16 bytes. 1, 2, 4 ... or 32 lanes own a row and take its vectors in turn, at most
// kMaxTileVectors each. The results leave through shared memory too, so that all of memory is read
// and written in whole sectors.
//
// By candidates.cuh lanes make keys of few logits only. Rows of kRankingLanes lanes or more list
// them in shared memory: the rank of a key is the number of larger keys. Fewer lanes keep their
// largest keys in registers, in order, and merge them by networks. Where candidates cannot serve,
// as in tiny rows, rows with NaN or rows of equals, lanes make keys of all logits: each further few
// are sorted and merged with the best, about 9 instructions per logit for k = 8.

#include "candidates.cuh"
#include "keys.cuh"
#include "network.cuh"
#include "plan.h"
#include "row.cuh"

namespace megasoftmax {

// Keys of 16-bit logits in 32 bits, of others in 64: the logit as in keys.cuh, then the position
// among those of the lane, the lower one first.
template <class T>
struct TileKeys {
  using Key = std::conditional_t<sizeof(T) == 2, uint32_t, uint64_t>;
  static constexpr int kElements = kPackElements<T>;

  // `first`: the position of the pack's first logit. Only keys of routers depend on columns.
  template <int kCount>
  __device__ static void of(const Pack<T, kCount>& pack, uint32_t first, int, Key* keys) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < pack.kWords; ++i) {
        const uint32_t bits = Halves<T>::normalized(pack.words[i]);
        const uint32_t pair = bits ^ (signs_of_halves(bits) | 0x80008000u);
        keys[2 * i] = pair * 0x10000u + (0xffffu - first - 2 * i);  // not on the pipe of max
        keys[2 * i + 1] = (pair & 0xffff0000u) | (0xffffu - first - 2 * i - 1);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) keys[i] = key_of(pack[i], static_cast<int>(first) + i);
    }
  }
  __device__ static Key of(T logit, int position, int = 0) {
    if constexpr (sizeof(T) == 2) {
      Pack<T, 2> pack;
      pack.words[0] = reinterpret_cast<const uint16_t&>(logit);
      Key keys[2];
      of(pack, position, 0, keys);
      return keys[0];
    } else {
      return key_of(logit, position);
    }
  }
  __device__ static int position(Key key) {
    return static_cast<int>(sizeof(T) == 2 ? 0xffffu - (key & 0xffffu)
                                           : ~static_cast<uint32_t>(key));
  }
  __device__ static Key with_position(Key key, int position) {
    const Key mask = sizeof(T) == 2 ? 0xffffu : 0xffffffffu;
    return (key & ~mask) | (~static_cast<uint32_t>(position) & mask);
  }
  __device__ static float logit(Key key) {
    if constexpr (sizeof(T) == 2) {
      const auto sign = static_cast<uint32_t>(static_cast<int32_t>(key) >> 31);
      return Pack<T, 2>{{~unknown(key ^ (sign & 0x7fff0000u))}}[1];  // unknown: in two operations
    } else {
      return logit_of(key);
    }
  }
};

// The vectors of a row that a lane has, and the keys of their elements.
template <class T, int kLongest, int kVectors, class Keys = TileKeys<T>>
struct TileRow {
  using Key = typename Keys::Key;
  static constexpr int kElements = kPackElements<T>;
  // Vectors that are sorted together.
  static constexpr int kStep = kLongest > kElements ? kLongest / kElements : 1;
  static_assert(kVectors % kStep == 0);

  Pack<T>* first;
  const TopkTiles& tiles;
  int lane;

  // Row `row` of a tile. What lies behind its end is -inf, for now, which all of the row comes
  // before.
  __device__ TileRow(Pack<T>* tile, const TopkForwardParams& params, const TopkTiles& tiles,
                     int row, int lane)
      : first(tile + row * (tile_pitch(kVectors) << tiles.log2_lanes) + lane),
        tiles(tiles),
        lane(lane) {
    if (params.scale < 0) {
#pragma unroll 1
      for (int i = 0; i < kVectors; ++i) vector(i).flip_signs();
    }
    if (!tiles.is_ragged) return;
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) {
      if (!has(i)) vector(i) = Pack<T>::lowest();
    }
  }

  __device__ Pack<T>& vector(int i) const { return first[i << tiles.log2_lanes]; }
  // Whether the row has the vector.
  __device__ bool has(int i) const { return (i << tiles.log2_lanes) + lane < tiles.vectors; }
  // Of the whole row.
  __device__ T logit(int column) const { return reinterpret_cast<const T*>(first - lane)[column]; }
  // Of the lane's element at a position. What lies behind the row's end has columns too.
  __device__ int column(uint32_t position) const {
    return ((position / kElements << tiles.log2_lanes) + lane) * kElements + position % kElements;
  }

  // The best of the candidates of a row, by their ranks. Returns whether candidates are few enough,
  // and can serve at all; by whole warps.
  template <class Candidates>
  __device__ __forceinline__ bool rank(const Keys& keys, bool can_serve,
                                       const Candidates& candidates, Key (&best)[kLongest]) const {
    constexpr int kMost = most_ranked(kLongest);
    int up_to_lane = candidates.count();
    for (int distance = 1; distance < tiles.lanes; distance *= 2) {
      const int below = __shfl_up_sync(~0u, up_to_lane, distance, tiles.lanes);
      if (lane >= distance) up_to_lane += below;
    }
    const int count = __shfl_sync(~0u, up_to_lane, tiles.lanes - 1, tiles.lanes);
    if (!__all_sync(~0u, can_serve && count <= kMost)) return false;
    extern __shared__ __align__(16) char shared_memory[];
    Key* const list = reinterpret_cast<Key*>(shared_memory + tile_bytes(kVectors)) +
                      (thread_index_anew() >> tiles.log2_lanes) * ranked_pitch(kLongest);
    Key* const ranked = list + kMost;
    typename Candidates::Left left(candidates);
#pragma unroll 1
    for (int i = up_to_lane - candidates.count(); left.any(); ++i) {
      bool is_there;
      const int at = column(left.next(is_there));
      list[i] = keys.of(logit(at), at, at);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < count; i += tiles.lanes) {
      const Key key = list[i];
      int larger = 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j) larger += list[j] > key;
      if (larger < kLongest) ranked[larger] = key;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kLongest; ++i) best[i] = ranked[i];
    return true;
  }

  // Whether candidates are looked for.
  template <class Candidates>
  __device__ bool may_find() const {
    return Candidates::kCanSort || (Candidates::kCanRank && tiles.lanes >= kRankingLanes);
  }

  // The best keys of the whole row, in order. find(candidates) fills candidates of the lane, which
  // are TileCandidates, and tells whether they can serve.
  template <class Candidates, class Find>
  __device__ __forceinline__ void select(const Keys& keys, Key (&best)[kLongest],
                                         Find&& find) const {
    bool is_done = false;
    if constexpr (Candidates::kCanRank) {
      if (may_find<Candidates>()) {
        Candidates candidates;
        const bool can_serve = find(candidates);
        if (tiles.lanes >= kRankingLanes) {
          if (rank(keys, can_serve, candidates, best)) return;
        } else {
          is_done = __all_sync(~0u, can_serve && candidates.count() <= most_candidates(kLongest));
          if (is_done)
            candidates.select(best, [&](int position) {
              const int others =
                  (position & -kElements) * (tiles.lanes - 1);  // of other lanes, before it
              return keys.of(reinterpret_cast<const T*>(first)[position + others], position,
                             column(position));
            });
        }
      }
    }
    if (!is_done) {
#pragma unroll
      for (int i = 0; i < kVectors; i += kStep) {
        constexpr int kKeys = kStep * kElements;
        Key of_vectors[kKeys];
#pragma unroll
        for (int j = 0; j < kStep; ++j)
          keys.of(vector(i + j), (i + j) * kElements, column((i + j) * kElements),
                  of_vectors + j * kElements);
#pragma unroll
        for (int j = 0; j < kKeys; j += kLongest) {
          Key some[kLongest];
#pragma unroll
          for (int n = 0; n < kLongest; ++n) some[n] = of_vectors[j + n];
          sort(some);
          if (i + j == 0) {
#pragma unroll
            for (int n = 0; n < kLongest; ++n) best[n] = some[n];
          } else {
            merge_sorted(best, some);
          }
        }
      }
    }
    if (tiles.lanes > 1) {
#pragma unroll
      for (int i = 0; i < kLongest; ++i) {
        best[i] = Keys::with_position(best[i], column(Keys::position(best[i])));
      }
      for (int distance = 1; distance < tiles.lanes; distance *= 2) {
        Key others[kLongest];
#pragma unroll
        for (int i = 0; i < kLongest; ++i) others[i] = __shfl_xor_sync(~0u, best[i], distance);
        merge_sorted(best, others);
      }
    }
  }
};

// Rows from `first_row` on to shared memory.
template <class T, int kVectors>
__device__ __forceinline__ void load_tile(const TopkForwardParams& params, const TopkTiles& tiles,
                                          int64_t first_row, int rows, Pack<T>* tile) {
  const int pitch = tile_pitch(kVectors) << tiles.log2_lanes;  // from one row to the next
  const int thread = static_cast<int>(threadIdx.x);
  const auto* source =
      keep_in_register(static_cast<const Pack<T>*>(params.scores.data) + first_row * tiles.vectors);
  uint32_t shared = shared_address(tile);
  const int mask = (1 << tiles.log2_places) - 1;
  if (mask < kTileThreads) {  // a thread copies the same vector of several rows
    const int row = thread >> tiles.log2_places, vector = thread & mask;
    const int step = kTileThreads >> tiles.log2_places;
    int left = vector < tiles.vectors ? rows - row : 0;
    source += row * tiles.vectors + vector;
    shared += (row * pitch + vector) * 16;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (left > 0) start_copy(shared, source);
      left -= step;
      source += step * tiles.vectors;
      shared += step * pitch * 16;
    }
  } else {
#pragma unroll 1
    for (int at = thread; at < kVectors * kTileThreads; at += kTileThreads) {
      const int row = at >> tiles.log2_places, vector = at & mask;
      if (row < rows && vector < tiles.vectors)
        start_copy(shared + (row * pitch + vector) * 16, source + (row * tiles.vectors + vector));
    }
  }
  wait_for_copies();
  __syncthreads();
}

// Writes the k values, times a factor, and columns of the rows of a tile, in place of the tile.
template <class T, int kLongest, class Key>
__device__ __forceinline__ void write_tile(const TopkForwardParams& params, const TopkTiles& tiles,
                                           const float (&values)[kLongest], float factor,
                                           const Key (&best)[kLongest], int64_t first_row, int rows,
                                           int row, int lane) {
  extern __shared__ __align__(16) char shared_memory[];
  const int thread = thread_index_anew();
  __syncthreads();
  auto* const results = reinterpret_cast<float*>(shared_memory);
  int* const columns = reinterpret_cast<int*>(results + tiles.rows_per_tile * params.k);
  const uint32_t of_lane = tiles.results_of_first_lane << lane & ((1u << params.k) - 1);
#pragma unroll
  for (int i = 0; i < kLongest; ++i) {
    if ((of_lane >> i & 1) == 0) continue;
    results[row * params.k + i] = values[i] * factor;
    columns[row * params.k + i] = TileKeys<T>::position(best[i]);
  }
  __syncthreads();
  const int count = rows * params.k;
  const int64_t first = first_row * params.k;
  int64_t* const indices = params.indices + first;
  for (int i = 2 * thread; i + 1 < count; i += 2 * kTileThreads) {
    const int2 two = *reinterpret_cast<const int2*>(columns + i);
    __stcs(reinterpret_cast<longlong2*>(indices + i), longlong2{two.x, two.y});
  }
  if (count % 2 != 0 && thread == 0) indices[count - 1] = columns[count - 1];
  with_result_dtype<T>(params.probabilities_type, [&](auto tag) {
    using Out = decltype(tag);
    constexpr int kOut = kPackElements<Out>;
    auto* const out = static_cast<Out*>(params.probabilities) + first;
    for (int i = kOut * thread; i < count; i += kOut * kTileThreads) {
      float pack[kOut];
#pragma unroll
      for (int j = 0; j < kOut; ++j) pack[j] = i + j < count ? results[i + j] : 0.f;
      const auto rounded = Pack<Out>::round(pack);
      if (i + kOut <= count && is_aligned(out + i, 16)) {
        store_pack<true>(out + i, rounded);
      } else {
        store_partial(out + i, rounded, 0, min(count - i, kOut));
      }
    }
  });
}

template <class T, int kLongest, int kVectors>
__global__ void __launch_bounds__(kTileThreads)
    topk_tile_kernel(const __grid_constant__ TopkForwardParams params,
                     const __grid_constant__ TopkTiles tiles) {
  using Keys = TileKeys<T>;
  using Key = typename Keys::Key;
  constexpr int kElements = kPackElements<T>;
  extern __shared__ __align__(16) char shared_memory[];
  auto* const tile = reinterpret_cast<Pack<T>*>(shared_memory);

  const int64_t first_row = int64_t{blockIdx.x} * tiles.rows_per_tile;
  const int rows =
      static_cast<int>(min(static_cast<int64_t>(tiles.rows_per_tile), params.rows - first_row));
  load_tile<T, kVectors>(params, tiles, first_row, rows, tile);
  const int thread = thread_index_anew();
  const int lane = thread & (tiles.lanes - 1), row = thread >> tiles.log2_lanes;
  // Rows behind the end are computed too, on whatever shared memory holds.
  const TileRow<T, kLongest, kVectors> mine(tile, params, tiles, row, lane);

  const Exponent exponent = exponent_of<NoBias>(params);
  MaxAndSum total{kLowest, 0.f};
  const auto add = [&](const Pack<T>& pack) {
    float e[kElements];
#pragma unroll
    for (int j = 0; j < kElements; ++j) e[j] = exponent(pack[j], total.max);
    total.sum += reduce_pairwise(e, [](float a, float b) { return a + b; });
  };
  Key best[kLongest];
  using Candidates = TileCandidates<T, kLongest, kVectors>;
  mine.template select<Candidates>(Keys{}, best, [&](auto& candidates) {
    candidates.find_threshold(params.k, tiles.lanes,
                              [&](int i) -> const Pack<T>& { return mine.vector(i); });
    total.max = fmaxf(candidates.max_of_all(), kLowest);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const Pack<T> pack = mine.vector(i);
      add(pack);
      candidates.mark(i, pack);
    }
    return total.sum == total.sum;
  });

  if (!mine.template may_find<Candidates>()) {
    total.max = fmaxf(Keys::logit(best[0]), kLowest);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) add(mine.vector(i));
  }
  for (int distance = 1; distance < tiles.lanes; distance *= 2)
    total.sum += __shfl_xor_sync(~0u, total.sum, distance);

  const RowStatistics statistics(total, fabsf(params.scale));
  if (lane == 0 && row < rows) statistics.write(params, first_row + row);
  float values[kLongest];
#pragma unroll
  for (int i = 0; i < kLongest; ++i) {
    values[i] = Keys::logit(best[i]);
    if (!params.candidates) values[i] = exponent(values[i], total.max);
  }
  float factor = fabsf(params.scale);
  if (!params.candidates) {
    if (params.renormalize) {
      total.sum = 0.f;
#pragma unroll
      for (int i = 0; i < kLongest; ++i) total.sum += i < params.k ? values[i] : 0.f;
    }
    factor = statistics.is_regular() ? reciprocal_approximate(total.sum) : NAN;
  }

  write_tile<T>(params, tiles, values, factor, best, first_row, rows, row, lane);
}

}  // namespace megasoftmax
