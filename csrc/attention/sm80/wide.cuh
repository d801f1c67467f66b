#pragma once
// Attention of head dimensions beyond kMaxHeadDim, forward, as in multi-head latent attention:
// DeepSeek-V2, https://arxiv.org/abs/2405.04434.
//
// A block owns 64 rows, the queries of all heads that share keys, and takes 32 keys after the
// other. Four warps make the weights of 16 rows each, while the other four copy the next keys and
// values. Then each of the eight warps adds to 64 columns of the output. Values that are the first
// columns of the keys are read once, as keys.

#include "decode.cuh"

namespace megasoftmax {

template <class T, bool kHasBias>
__global__ void __launch_bounds__(kWideThreads, 1)
    attention_wide_kernel(const __grid_constant__ AttentionForwardParams params) {
  if (!kIsAmpere) return;
  // Queries, keys and values lie in panels of 64 columns, one after the other.
  using QueryPanel = Tile<T, kWideRows, 64>;
  using KeyPanel = Tile<T, kWideKeys, 64>;
  using Weights = Tile<T, kWideRows, kWideKeys>;
  using Layout = WideLayout;
  constexpr int kM = kWideRows / 16, kN = kWideKeys / 8, kCopiers = kWideThreads - 32 * kM;
  constexpr int kLanesOfRow = kCopiers / kWideKeys;
  static_assert(kMaxWideValueDim <= kWideThreads / 32 * 64 && kCopiers % kWideKeys == 0);
  extern __shared__ __align__(1024) char shared_memory[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const bool makes_weights = warp < kM;
  const uint32_t memory = shared_address(shared_memory);
  auto* const factors = reinterpret_cast<float*>(shared_memory + Layout::kFactors);
  auto* const ends = reinterpret_cast<PartEnd*>(shared_memory + Layout::kEnds);
  auto* const seen = reinterpret_cast<KeyRange*>(shared_memory + Layout::kSeen);
  const FirstElement mine(threadIdx.x);
  if (params.parts != nullptr) let_next_launch_begin();
  int split, first_row, key_head, batch;
  {
    int tile, row_tile;
    params.order.place(static_cast<int>(blockIdx.x), tile, key_head, batch);
    params.row_tiles.split(tile, split, row_tile);
    first_row = row_tile * kWideRows;
  }
  const int lane_row = first_row + 16 * warp + mine.row;

  // Queries. Beyond rows and columns they are 0.
  const int panels = divide_up(params.head_dim, 64);
  for (int i = thread; i < kWideRows * panels * 8; i += kWideThreads) {
    const int row = i % kWideRows, vector = i / kWideRows;
    const DecodeRow place(params, key_head, first_row + row);
    const T* const source = params.query.row<const T>(batch, place.head, place.query);
    const bool is_inside = place.is_row && vector * 8 < params.head_dim;
    start_copy_of(memory + vector / 8 * QueryPanel::kBytes + QueryPanel::offset(row, vector % 8),
                  is_inside ? source + vector * 8 : source, is_inside ? 16 : 0);
  }

  // What the rows of a lane see, and the part of this split of the keys that any row sees.
  KeyRange visible[2] = {{0, 0}, {0, 0}};
  if (makes_weights) {
    KeyRange of_warp, by_all;
    find_visible(params, batch, key_head, lane_row, visible, of_warp, by_all);
    if (lane == 0) seen[warp] = of_warp;
  }
  __syncthreads();
  int begin, end;
  {
    KeyRange all = seen[0];
#pragma unroll
    for (int i = 1; i < kM; ++i) all = {min(all.begin, seen[i].begin), max(all.end, seen[i].end)};
    const KeyRange part =
        part_of<kWideKeys>(params, {all.begin / kWideKeys * kWideKeys, all.end}, split);
    begin = part.begin;
    end = part.end;
  }

  const Strided &key_rows = params.key, &value_rows = params.value;
  const bool are_in_keys =
      value_rows.data == key_rows.data && value_rows.batch_stride == key_rows.batch_stride &&
      value_rows.head_stride == key_rows.head_stride &&
      value_rows.query_stride == key_rows.query_stride && params.value_dim <= params.head_dim;
  const auto keys_of = [&](int step) {
    return memory + Layout::kKeys + step % 2 * Layout::kKeyBytes;
  };
  const auto values_of = [&](int step) {
    return are_in_keys ? keys_of(step) : memory + Layout::kValues + step % 2 * Layout::kValueBytes;
  };
  const auto start_copy = [&](int step) {
    const int key = begin + step * kWideKeys;
    if (makes_weights || key >= end) return;
    const int row = (thread - 32 * kM) / kLanesOfRow, first_vector = thread % kLanesOfRow;
    const bool is_key = key + row < params.keys;
    const auto copy = [&](uint32_t shared, const Strided& tensor, int columns) {
      const T* const source = tensor.row<const T>(batch, key_head, is_key ? key + row : key);
      for (int vector = first_vector; vector < divide_up(columns, 64) * 8; vector += kLanesOfRow) {
        const bool is_inside = is_key && vector * 8 < columns;
        start_copy_of(shared + vector / 8 * KeyPanel::kBytes + KeyPanel::offset(row, vector % 8),
                      is_inside ? source + vector * 8 : source, is_inside ? 16 : 0);
      }
    };
    copy(keys_of(step), key_rows, params.head_dim);
    if (!are_in_keys) copy(values_of(step), value_rows, params.value_dim);
  };
  start_copy(0);

  const bool has_columns = 64 * warp < params.value_dim;
  float output[kM][8][4] = {};
  OnlineSoftmax<1> softmax(params.logit_scale);
#pragma unroll 1
  for (int step = 0; begin + step * kWideKeys < end; ++step) {
    wait_for_copies();
    __syncthreads();  // keys and values are there; those before, and their weights, are used up
    start_copy(step + 1);
    if (makes_weights) {
      float scores[1][kN][4] = {};
      [[maybe_unused]] float biases[1][kN][4] = {};
      Excluded<1, kN> excluded;
      find_excluded<T, kHasBias>(params, batch, key_head, lane_row, begin + step * kWideKeys, end,
                                 params.mask_block, visible, excluded, biases);
      const FragmentsDown<QueryPanel> query_fragments(QueryPanel{memory}, 16 * warp);
      const FragmentsAcross<KeyPanel> key_fragments(KeyPanel{keys_of(step)}, 0);
      for (int panel = 0; panel < panels; ++panel) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t rows[4];
          query_fragments.load(rows, panel * kWideRows, i * 16);
#pragma unroll
          for (int n = 0; n < kN; n += 2) {
            uint32_t pair[4];
            key_fragments.load(pair, panel * kWideKeys + n * 8, i * 16);
            multiply_add<T>(scores[0][n], rows, pair[0], pair[1]);
            multiply_add<T>(scores[0][n + 1], rows, pair[2], pair[3]);
          }
        }
      }
      if (params.softcap.is_given()) cap_products<T>(params, scores);
      if constexpr (kHasBias) add_biases(scores, params.logit_scale, biases);
      excluded.apply(scores, -INFINITY);
      float factor[2] = {1.f, 1.f};
      softmax.template weigh<kHasBias>(scores,
                                       [&](int, int half, float scaled) { factor[half] = scaled; });
      store_to_tile<Weights>(
          shared_memory + Layout::kWeights, 16 * warp, scores[0], 0,
          [](float first, float second, int) { return round_pair<T>(first, second); });
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (mine.column == 0)
          factors[16 * warp + mine.row + row_offset(0, 2 * half)] = factor[half];
    }
    __syncthreads();  // weights are there
    if (!has_columns) continue;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = factors[mine.row + row_offset(m, 2 * half)];
        if (!__any_sync(~0u, factor != 1.f)) continue;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          output[m][n][2 * half] *= factor;
          output[m][n][2 * half + 1] *= factor;
        }
      }
    }
    multiply_tiles<T, kWideKeys>(
        output, FragmentsDown<Weights>(Weights{memory + Layout::kWeights}, 0),
        FragmentsDown<KeyPanel>(KeyPanel{values_of(step) + warp * KeyPanel::kBytes}, 0), 0);
  }
  wait_for_copies();
  if (makes_weights) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(softmax.sum[0][half]);
      if (mine.column == 0)
        ends[16 * warp + mine.row + row_offset(0, 2 * half)] = {softmax.max[0][half], sum};
    }
  }
  __syncthreads();
  if (!has_columns) return;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = mine.row + row_offset(m, 2 * half);
      const DecodeRow place(params, key_head, first_row + row);
      if (!place.is_row) continue;
      const bool is_first = warp == 0 && mine.column == 0;
      const int64_t row_of_all = params.row_index(batch, place.head, place.query);
      const auto for_each_pair = [&](auto&& store) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int column = 64 * warp + mine.column + column_offset(n, 0);
          if (column < params.value_dim)
            store(column, output[m][n][2 * half], output[m][n][2 * half + 1]);
        }
      };
      if (params.parts != nullptr) {
        if (is_first) params.part_end(split, row_of_all) = ends[row];
        float* const part = params.part(split, row_of_all);
        for_each_pair([&](int column, float first, float second) {
          *reinterpret_cast<float2*>(part + column) = {first, second};
        });
        continue;
      }
      const RowEnd row_end =
          RowEnds(params, batch, place.head).of(place.query, ends[row].max, ends[row].sum);
      if (is_first) row_end.store(params, row_of_all);
      T* const out = params.output.row<T>(batch, place.head, place.query);
      for_each_pair([&](int column, float first, float second) {
        *reinterpret_cast<uint32_t*>(out + column) =
            round_pair<T>(first * row_end.factor, second * row_end.factor);
      });
    }
  }
}

}  // namespace megasoftmax
