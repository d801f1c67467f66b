#pragma once
// Plans a launch, once: which regime serves it, and how its rows lie over blocks. Plain host code.

#include <algorithm>

#include "layout.h"
#include "regimes.h"

namespace megasoftmax {

// What kernels need, and how they run.
template <class Params, class Plan>
struct RowLaunch {
  Params params;
  Plan plan;

  // Of plan.workspace_bytes, which need not be set to anything. It must stay until the launch.
  void set_workspace(void* workspace) { plan.schedule.workspace = workspace; }
};

struct Plan {
  Rows kind;
  Rows requested;            // may be two kinds, one of which is `kind`
  int regime;                // in kForwardRegimes or kBackwardRegimes
  Shape owners;              // of rows; backward with a bias gradient an owner has several
  int64_t vectors;           // that a row can need at most
  int vector_bytes;          // that shared memory keeps of a vector
  int threads;               // of a block
  int64_t blocks_per_head;   // for the owners of a head, times the blocks of a row
  int64_t queries_per_tile;  // see queries_per_tile in layout.h
  int multiprocessors;       // for launches whose blocks run together
  int shared_bytes;          // of a block, besides what kernels declare themselves
  int64_t workspace_bytes;
  Schedule schedule;
};

// Columns that the widest row sees, without idle limits.
inline int64_t visible_columns(const Shape& shape, const Window& window) {
  if (window.left < 0) return shape.columns;
  const int64_t from_diagonal = window.right < 0 ? shape.queries : window.right + 1;
  return std::min(shape.columns, window.left + from_diagonal);
}

// The most vectors that a row can need.
inline int64_t vectors_of_rows(const Shape& shape, const Window& window, bool may_drop,
                               int pack_elements) {
  const int64_t visible = visible_columns(shape, window);
  // The first vector begins at a cache line. With dropout it begins at a block of columns, of the
  // earlier row of a pair.
  const int64_t before = may_drop ? kDropoutColumns - 1 + kDropoutRowDistance
                                  : int64_t{kLineVectors - 1} * pack_elements;
  return max_visible_vectors(shape.columns, std::min(visible + before, shape.columns),
                             pack_elements);
}

// The kind of rows without dropout and bias gradient. `tiny_vectors`: longer rows are kContiguous
// rather than kTiny if they may be.
template <class Params>
Rows kind_of_rows(const Params& params, int64_t visible_vectors, int pack_elements, bool is_masked,
                  bool has_bias, int64_t tiny_vectors) {
  const Shape& shape = params.shape;
  const int64_t vectors = max_visible_vectors(shape.columns, shape.columns, pack_elements);
  if (vectors >= kLongRow && visible_vectors <= std::min(kWindowedRow, vectors / 2))
    return kWindowed;
  const bool is_ragged = shape.columns % pack_elements != 0;
  if (has_bias || (is_masked && is_ragged)) return kBiasOrRaggedMask;
  if (is_masked) return kMasked;
  if (params.is_limited) return kLimited;
  const bool may_be_contiguous =
      params.is_contiguous && params.have_no_sink() && shape.queries == shape.rows();
  const bool begins_at_sectors = !is_ragged && vectors % kSectorVectors == 0;
  const bool is_better_contiguous =
      may_be_contiguous && begins_at_sectors && vectors > tiny_vectors;
  const int64_t tiny_columns = is_ragged ? kTinyRaggedColumns : kTinyColumns - 1;
  const bool is_tiny = params.is_contiguous && shape.columns > 0 && shape.columns <= tiny_columns &&
                       !is_better_contiguous;
  if (is_tiny && params.are_linear()) return kTiny;
  if (may_be_contiguous && !is_tiny) return is_ragged ? kContiguousRagged : kContiguous;
  return is_ragged ? kRagged : kUnmasked;
}

// Blocks for the queries of a head. Pairs need all of each 16 queries.
inline int64_t blocks_of_queries(const KernelShape& shape, Rows kind, int64_t queries) {
  constexpr int64_t kRows = kDropoutRows * kDropoutRowDistance;
  const bool in_pairs = kind == kDropped && shape.may_hold_pairs();
  return divide_up<int64_t>(in_pairs ? round_up(queries, kRows) : queries, shape.rows_per_block);
}

// How many rows the whole GPU takes at a time, and how many blocks each has. It takes all rows if
// its shared memory keeps them, else about as many as it keeps. The blocks of a row write it while
// they sum their next one, so memory is read and written at the same time.
inline void spread_over_gpu(const RowRegime& regime, int64_t vectors, int64_t rows,
                            int vector_bytes, const Device& device, Schedule& schedule) {
  const int64_t blocks =
      int64_t{device.multiprocessors} * persistent_blocks(regime, vectors, vector_bytes, device);
  const int64_t kept_vectors = blocks * schedule.kept_warp_tiles * kWarpTileVectors;
  int64_t owners = std::min(rows, blocks);
  if (rows * vectors > kept_vectors) {
    // A third more than it keeps: where a row ends, others use memory.
    const int64_t kept = kept_vectors * 4 / (vectors * 3), least = rows < kManyRows ? 1 : 2;
    owners = divide_up(rows, divide_up(rows, std::clamp<int64_t>(kept, least, owners)));
  }
  schedule.owners = static_cast<int>(owners);
  int most = divide_up(schedule.max_segments, regime.rings());
  // A single row would leave multiprocessors idle. Instead some warps of its blocks are idle.
  while (most < schedule.max_segments && owners * most * 2 <= device.multiprocessors) most *= 2;
  const int of_row = static_cast<int>(std::clamp<int64_t>(blocks / owners, 1, most));
  // Each ring of a block gets the same number of segments.
  const int share = divide_up(schedule.max_segments, of_row);
  schedule.blocks_per_row = share > regime.rings()
                                ? divide_up(schedule.max_segments, round_up(share, regime.rings()))
                                : of_row;
}

// plan: kind, owners, vectors and vector_bytes are set. `whole_vectors`: those of a row, without
// cut ones. `forced`: the regime to take if it serves such rows, or -1.
inline void plan_rows(RowRegimes regimes, Plan& plan, int64_t whole_vectors, const Device& device,
                      int forced) {
  const int64_t rows = plan.owners.rows();
  const int vector_bytes = plan.vector_bytes;
  if (plan.kind == kContiguousRagged) {
    // One block adds such a row in an order of its own, so the number of rows must not decide.
    const RowRegime& regime =
        regimes[regime_for(regimes, whole_vectors, 1, plan.kind, vector_bytes, device)];
    if (regime.serves_any(plan.kind) && regime.blocks_per_row == 1)
      plan.vectors = whole_vectors;
    else
      plan.kind = static_cast<Rows>(kRagged | kContiguousRagged);
  }
  plan.requested = plan.kind;
  plan.regime = regime_for(regimes, plan.vectors, rows, plan.requested, vector_bytes, device);
  const bool may_force = forced >= 0 && forced < static_cast<int>(regimes.size()) &&
                         (plan.kind & (kBiasGradient | kDroppedBiasGradient)) == 0;
  if (may_force && plan.vectors <= regimes[forced].max_vectors &&
      regimes[forced].serves_any(plan.kind) &&
      (plan.kind != kContiguousRagged || regimes[forced].blocks_per_row == 1))
    plan.regime = forced;
  const RowRegime& regime = regimes[plan.regime];
  const bool is_contiguous = regime.storage == Storage::kContiguous;
  if (plan.kind == (kRagged | kContiguousRagged))
    plan.kind = is_contiguous ? kContiguousRagged : kRagged;

  plan.multiprocessors = device.multiprocessors;
  plan.threads = regime.kernel().threads();
  if (regime.storage != Storage::kTile)
    plan.blocks_per_head = blocks_of_queries(regime.kernel(), plan.kind, plan.owners.queries);
  const int kept_warp_tiles = kept_warp_tiles_with_next(regime, plan.vectors, vector_bytes, device);
  plan.shared_bytes = is_contiguous
                          ? segment_count(plan.vectors) * kResultBytes
                          : shared_bytes(regime, kept_warp_tiles, plan.vectors, vector_bytes);
  if (plan.shared_bytes == 0) return;
  Schedule& schedule = plan.schedule;
  schedule.warp_tiles_per_segment = warp_tiles_per_segment(plan.vectors);
  schedule.max_segments = segment_count(plan.vectors);
  schedule.kept_warp_tiles = kept_warp_tiles;
  schedule.is_cluster = regime.blocks_per_row > 1;
  schedule.blocks_per_row = regime.blocks_per_row;
  if (regime.blocks_per_row == kWholeGpu) {
    spread_over_gpu(regime, plan.vectors, rows, vector_bytes, device, schedule);
    plan.workspace_bytes =
        (2 * int64_t{schedule.max_segments} + 1) * schedule.owners * kResultBytes;
  }
  if (is_contiguous && regime.threads_per_row == kMostContiguousThreads)
    plan.threads = 32 * divide_up(schedule.max_segments, schedule.blocks_per_row);
}

// `params` are prepared, see layout.h. `regimes`: kForwardRegimes, perhaps with other numbers of
// rows.
inline Plan plan_forward(const ForwardParams& params, RowRegimes regimes, const Device& device,
                         int forced) {
  const int pack_bytes = 16, pack_elements = pack_bytes / size_of(params.scores.type);
  Plan plan = {};
  plan.owners = params.shape;
  plan.queries_per_tile = queries_per_tile(params);
  plan.vector_bytes = pack_bytes;
  plan.vectors =
      vectors_of_rows(params.shape, params.window, params.dropout.is_given(), pack_elements);
  plan.kind = params.dropout.is_given()
                  ? kDropped
                  : kind_of_rows(params, plan.vectors, pack_elements, params.mask.data != nullptr,
                                 params.takes_bias_instance(), kTinyVectors);
  plan_rows(regimes, plan, params.shape.columns / pack_elements, device, forced);
  return plan;
}

inline Plan plan_backward(const BackwardParams& params, RowRegimes regimes, const Device& device,
                          int forced) {
  const int pack_bytes = 16, pack_elements = pack_bytes / size_of(params.probabilities.type);
  Plan plan = {};
  plan.owners = params.bias_shape;
  plan.owners.batches *= params.splits;
  plan.queries_per_tile = plan.owners.queries;
  plan.vector_bytes = 2 * pack_bytes;
  if (params.has_bias_gradient) {
    // Registers hold the sums of a bias row, so each row of an owner begins at column 0.
    plan.vectors = divide_up<int64_t>(params.shape.columns, pack_elements);
    plan.kind = params.has_scores() ? kDroppedBiasGradient : kBiasGradient;
  } else {
    const bool may_drop = params.has_scores() && !params.are_capped_alone();
    plan.vectors = vectors_of_rows(params.shape, params.window, may_drop, pack_elements);
    plan.kind = may_drop
                    ? kDropped
                    : kind_of_rows(params, plan.vectors, pack_elements, false, false, kUnlimited);
  }
  plan_rows(regimes, plan, params.shape.columns / pack_elements, device, forced);
  return plan;
}

// Must the bias gradient be float32? Parts are added afterwards, and kernels without the sums in
// registers add to the gradient itself.
inline bool needs_float_bias_gradient(const BackwardParams& params, const Plan& plan) {
  return params.splits > 1 || kBackwardRegimes[plan.regime].storage != Storage::kRegisters;
}

}  // namespace megasoftmax
