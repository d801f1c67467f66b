#pragma once
// Shared memory of a block of Hopper's backward: where its tiles lie, and the barriers by which its
// warps wait for each other.

#include "../../../common/limits.h"
#include "../../bias.cuh"
#include "../../limits.h"
#include "../kept_bits.cuh"
#include "../plan.h"
#include "../ptx.cuh"
#include "diagonal_sums.cuh"

namespace megasoftmax {

// Maps of boxes of 64 columns: the queries of a tile, and the keys. Sums have boxes of 64 rows and
// 32 columns. The bias and its dense gradient have boxes of the queries of a tile and 64 keys.
struct BackwardTensorMaps {
  CUtensorMap query, key, value, output_gradient, query_gradient_sum, bias, bias_gradient;
  CUtensorMap output_piece, output_gradient_piece;  // kRowsOfWorkerPiece rows, for row_worker.cuh
};

// How warps beside the products sum the gradient of a bias: they add to it by atomics, sum it with
// the other blocks of a cluster in a fixed order, or sum it along diagonals.
template <HopperBias kBias>
struct BiasGradientSums {
  const bool is_added, is_in_cluster, has_diagonals;
  const int cluster;  // its blocks

  __device__ explicit BiasGradientSums(const AttentionBackwardParams& params)
      : is_added(kBias == HopperBias::kTile && params.bias_gradient_kind == BiasGradient::kShared),
        is_in_cluster(kBias == HopperBias::kTile &&
                      params.bias_gradient_kind == BiasGradient::kInClusters),
        has_diagonals(kBias == HopperBias::kTable &&
                      params.bias_gradient_kind == BiasGradient::kDiagonals),
        cluster(is_in_cluster ? static_cast<int>(params.batches_per_bias.divisor) : 1) {}
};

template <HopperBias kBias, int kIndex>
struct HopperBackwardMemory {
  static constexpr AttentionHopperBackwardTile kTile =
      !is_bias(kBias) ? kAttentionHopperBackwardTiles[kIndex]
      : kBias == HopperBias::kRows
          ? kAttentionHopperBackwardTiles[kIndex].with_rows_anywhere()
          : kAttentionHopperBackwardTiles[kIndex].with_bias(kBias == HopperBias::kTable);
  static constexpr int kDim = kTile.head_dim, kValueDim = kTile.value_dim;
  static constexpr int kKeys = kTile.keys(), kQueries = kTile.queries;
  static constexpr int kWarpgroups = kTile.warpgroups, kThreads = kTile.threads();
  static constexpr int kPanels = divide_up(kDim, 64), kValuePanels = divide_up(kValueDim, 64);
  static constexpr int kQueryPanels = kQueries / 64, kStages = 2;
  static_assert(kDim % 16 == 0 && kValueDim % 16 == 0);
  static_assert(kQueries % kMaskTile == 0 && kKeys % kMaskTile == 0);
  static_assert(kQueriesOfPairs % kQueries == 0);
  static_assert(takes_bias(kTile, kBias));
  static_assert(shares_registers(kTile));
  // A warpgroup computes 64 rows of dQ, and so many columns of a panel of 64.
  static constexpr __host__ __device__ int query_panel(int warpgroup) {
    return warpgroup % kQueryPanels;
  }
  static constexpr __host__ __device__ int column_panel(int warpgroup) {
    return warpgroup / kQueryPanels;
  }
  static constexpr int sum_columns(int panel) { return std::min(64, kDim - 64 * panel); }
  static_assert(kPanels * kQueryPanels == kWarpgroups);
  // The second warpgroup is behind the first, so that one has products while the other makes
  // weights. Neither waits for gradients of scores of the other: dQ of a step, which takes all of
  // them, is made a step later. So they keep their place a step longer. A dense bias needs it.
  static constexpr bool kIsStaggered = !is_dense(kBias);
  static constexpr bool kIsRows = kBias == HopperBias::kRows;

  // In this order: keys; values; queries and gradients of outputs of each stage; for two steps the
  // bias, later gradients of scores, in panels of 64 keys; sums of each warpgroup; pairs of rows of
  // each stage; what the mask excludes, and what queries see by range, of each stage; the table of
  // each stage, and sums for its gradient; bits of each warpgroup for dropout; barriers; what the
  // sums of each warpgroup belong to. Clusters have no mask: its place has what other blocks send.
  // At the end the results of each warpgroup take the place of its sums.
  static constexpr int kKeyPanelBytes = kKeys * 128, kQueryPanelBytes = kQueries * 128;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kValueBytes = kValuePanels * kKeyPanelBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kGradientBytes = kValuePanels * kQueryPanelBytes;
  static constexpr int kStageBytes = kQueryBytes + kGradientBytes;
  static constexpr int kScorePanelBytes = kQueries * 128;
  static constexpr int kScorePanels = kWarpgroups;
  static constexpr int kScoreBytes = kScorePanels * kScorePanelBytes;
  static constexpr int kSumPanelBytes = 64 * 128, kSumBytes = 2 * kSumPanelBytes;
  static constexpr int kPairsBytes = kQueries / 2 * static_cast<int>(sizeof(PairOfRows));
  static constexpr int kValuesAt = kKeyBytes, kStagesAt = kKeyBytes + kValueBytes;
  static constexpr int kScoresAt = kStagesAt + kStages * kStageBytes;
  static constexpr int kSumsAt = kScoresAt + 2 * kScoreBytes;
  static_assert(kValuePanels <= kPanels && kPanels * 64 * 128 <= kSumBytes);
  static constexpr int kPairsAt = kSumsAt + kWarpgroups * kSumBytes;
  using Diagonals = DiagonalTile<true, kKeys, kQueries>;
  using DiagonalSums = SumsOfDiagonals<kKeys, kQueries>;
  static constexpr int kMaskedAt = kPairsAt + kStages * kPairsBytes;
  static constexpr int kMaskedTileBytes = BlockMaskLayout::kWordsOfTile * 4;
  static constexpr int kMaskedPanelBytes = kQueryPanels * kMaskedTileBytes;  // of 64 keys
  static constexpr int kMaskedBytes = kWarpgroups * kMaskedPanelBytes;
  // For each panel of queries the range that all see, then the range of each query.
  static constexpr int kRangesAt = kMaskedAt + kStages * kMaskedBytes;
  static constexpr int kRangesBytes = (2 + kQueries) * 8;
  static constexpr int kDiagonalsAt = kRangesAt + kStages * kRangesBytes;
  static constexpr int kDiagonalSumsAt = kDiagonalsAt + kStages * Diagonals::kBytes;
  static constexpr int kSentAt = kMaskedAt;
  static_assert(kQueries % (8 * kMaxBiasCluster) == 0);  // swizzled alike
  // HopperBias::kRows has no clusters, and no mask in shared memory. Rows of the bias come in
  // pieces to this place, a ring, and warps bring them to their tile. A slot of the ring belongs to
  // one warp. If several warps took turns at a slot, one could wait for its piece while the piece
  // before is on its way. It would not wait: the parity of its phase is that of the last complete
  // phase.
  static constexpr int kPlacingWarps = 3;
  static constexpr int kPieceRows = 16, kPieces = kQueries / kPieceRows;
  static constexpr int kPieceBytes = kPieceRows * RowsAnywhere::row_bytes(kKeys);
  static constexpr int kSlots = 2 * kPlacingWarps;
  static constexpr int kSentBytes =
      kIsRows ? kSlots * kPieceBytes : kScoreBytes / kMaxBiasCluster * (kMaxBiasCluster - 1);
  static_assert(kSentBytes >= kDiagonalsAt - kMaskedAt && kQueryPanels <= 2);
  static_assert(kPieceBytes % 128 == 0 && kSlots % kPlacingWarps == 0);
  // Blocks send each other parts: 64 keys of half of the rows that a block sums. The part of the
  // next step is sent as soon as all have summed this one, while they sum the others.
  static constexpr int kSentParts = kIsRows ? kSlots : is_dense(kBias) ? 2 * kScorePanels : 0;
  static_assert(kSentAt % 128 == 0);
  // In a tile of 64 queries the bits would be ready after the products, so each warp makes the bits
  // of its own weights.
  static constexpr bool kExchangesBits = kQueries == KeptBits::kQueries;
  static constexpr int kBitsAt = kBias == HopperBias::kTable
                                     ? kDiagonalSumsAt + DiagonalSums::kBytes
                                 : is_dense(kBias) ? kSentAt + kSentBytes
                                                   : kDiagonalsAt;
  static constexpr int kBitsEnd = kBitsAt + (kExchangesBits ? kWarpgroups * KeptBits::kBytes : 0);
  // Kernels with a row worker have no masks, ranges and bits of dropout. In their place are two
  // pieces of its rows, and two statistics of each of these rows.
  static constexpr bool kHasRowWorker = is_unbiased(kBias);
  static constexpr int kWorkerPieceBytes =
      kRowsOfWorkerPiece * std::max(4 * kDim, 2 * 128 * kValuePanels);
  static constexpr int kWorkerPiecesAt = round_up(kMaskedAt, 1024);
  static constexpr int kWorkerStatisticsAt = kWorkerPiecesAt + 2 * kWorkerPieceBytes;
  static constexpr int kBarriersAt =
      kHasRowWorker ? std::max(kBitsEnd, kWorkerStatisticsAt + 2 * kRowsOfWorkerPiece * 8)
                    : kBitsEnd;
  static constexpr int kScoreBarrier = 1 + 2 * kStages;
  static constexpr int kSentBarrier = kScoreBarrier + 7;
  static constexpr int kSumBarrier = kSentBarrier + 2 * kSentParts;
  static constexpr int kWorkerBarrier = kSumBarrier + 2 * kWarpgroups;
  static constexpr int kTilesOfSumsAt = kBarriersAt + 8 * (kWorkerBarrier + 2);
  static constexpr int kBytes = kTilesOfSumsAt + 8 * kWarpgroups;
  static_assert(kBytes <= least_shared_bytes(kHopperMajor, kHopperMajor));
  // Warps that sum the gradient of a bias.
  static constexpr int kSummingWarps = kBias == HopperBias::kTable ? DiagonalSums::kWarps : 3;
  // In a cluster two of them store sums, and one sends what others sum.
  static constexpr int kStoringWarps = 2;

  uint32_t address;

  __device__ static Diagonals diagonals(char* memory, int stage) {
    return {reinterpret_cast<float*>(memory + kDiagonalsAt + stage * Diagonals::kBytes)};
  }
  // Pairs of the first key and the one after the last.
  __device__ static int2* ranges_of_panels(char* memory, int stage) {
    return reinterpret_cast<int2*>(memory + kRangesAt + stage * kRangesBytes);
  }
  __device__ static int2* ranges(char* memory, int stage) {
    return ranges_of_panels(memory, stage) + 2;
  }
  // The head and first query of the sums of a warpgroup; a head below 0 after the last ones.
  __device__ static int2& tile_of_sums(char* memory, int warpgroup) {
    return reinterpret_cast<int2*>(memory + kTilesOfSumsAt)[warpgroup];
  }
  // The bits of 64 queries of each of 64 keys.
  __device__ static uint2* masked(char* memory, int stage, int warpgroup, int panel) {
    return reinterpret_cast<uint2*>(memory + kMaskedAt + stage * kMaskedBytes +
                                    warpgroup * kMaskedPanelBytes + panel * kMaskedTileBytes);
  }
  __device__ uint32_t keys() const { return address; }
  __device__ uint32_t values() const { return address + kValuesAt; }
  __device__ uint32_t queries(int stage) const { return address + kStagesAt + stage * kStageBytes; }
  __device__ uint32_t gradients(int stage) const { return queries(stage) + kQueryBytes; }
  __device__ uint32_t scores(int buffer) const {
    return address + kScoresAt + buffer * kScoreBytes;
  }
  __device__ uint32_t sums(int warpgroup) const {
    return address + kSumsAt + warpgroup * kSumBytes;
  }
  // A part of this block's gradients of scores, which block `block` sums, `rows` rows each; and the
  // place of what another block sends of a part.
  __device__ uint32_t own_part(int buffer, int block, int rows, int part) const {
    return scores(buffer) + part % kScorePanels * kScorePanelBytes +
           (block * rows + part / kScorePanels * rows / 2) * 128;
  }
  __device__ uint32_t sent_part(int other, int others, int rows, int part) const {
    return address + kSentAt + (part * others + other) * rows * 64;
  }
  __device__ uint32_t piece(int slot) const { return address + kSentAt + slot * kPieceBytes; }
  __device__ uint32_t pairs(int stage) const { return address + kPairsAt + stage * kPairsBytes; }
  __device__ uint32_t masked(int stage, int warpgroup) const {
    return address + kMaskedAt + stage * kMaskedBytes + warpgroup * kMaskedPanelBytes;
  }
  __device__ KeptBits bits(int warpgroup) const {
    return {address + kBitsAt + warpgroup * KeptBits::kBytes};
  }
  __device__ Barrier barrier(int index) const { return {address + kBarriersAt + 8 * index}; }
  __device__ Barrier keys_are_there() const { return barrier(0); }
  __device__ Barrier stage_is_there(int stage) const { return barrier(1 + stage); }
  __device__ Barrier stage_is_used(int stage) const { return barrier(1 + kStages + stage); }
  __device__ Barrier bias_is_there(int buffer) const { return barrier(kScoreBarrier + buffer); }
  __device__ Barrier scores_are_used(int buffer) const {
    return barrier(kScoreBarrier + 2 + buffer);
  }
  __device__ Barrier gradients_are_there(int buffer) const {
    return barrier(kScoreBarrier + 4 + buffer);
  }
  __device__ Barrier first_weights_are_there() const { return barrier(kScoreBarrier + 6); }
  __device__ Barrier sent_is_there(int part) const { return barrier(kSentBarrier + part); }
  __device__ Barrier sent_is_used(int part) const {
    return barrier(kSentBarrier + kSentParts + part);
  }
  __device__ Barrier sums_are_there(int warpgroup) const {
    return barrier(kSumBarrier + warpgroup);
  }
  __device__ Barrier sums_are_used(int warpgroup) const {
    return barrier(kSumBarrier + kWarpgroups + warpgroup);
  }

  __device__ uint32_t worker_piece(int piece) const {
    return address + kWorkerPiecesAt + piece * kWorkerPieceBytes;
  }
  // The largest logits of a piece's rows, then the logarithms of their sums.
  __device__ uint32_t worker_statistics(int piece) const {
    return address + kWorkerStatisticsAt + piece * kRowsOfWorkerPiece * 8;
  }
  __device__ Barrier worker_piece_is_there(int piece) const {
    return barrier(kWorkerBarrier + piece);
  }

  // Called by one thread before others use the barriers.
  __device__ void init_barriers(const BiasGradientSums<kBias>& sums) const {
    keys_are_there().init(1);
    for (int stage = 0; stage < kStages; ++stage) {
      stage_is_there(stage).init(kBias == HopperBias::kTable ? 2 : 1);
      stage_is_used(stage).init(4 * kWarpgroups);
    }
    first_weights_are_there().init(4);
    constexpr int kMultiplying = kIsStaggered ? 4 * kWarpgroups : 1;  // one speaks for all
    for (int buffer = 0; buffer < 2; ++buffer) {
      bias_is_there(buffer).init(kIsRows ? kPlacingWarps : 1);
      scores_are_used(buffer).init((kIsRows ? kWarpgroups : kMultiplying) +
                                   (sums.is_added || sums.has_diagonals ? kSummingWarps : 0) +
                                   (sums.is_in_cluster ? kStoringWarps * sums.cluster : 0));
      gradients_are_there(buffer).init(kMultiplying);
    }
    for (int part = 0; part < kSentParts; ++part) {
      sent_is_there(part).init(1);
      sent_is_used(part).init(kIsRows ? 1 : kStoringWarps * sums.cluster);
    }
    for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
      sums_are_there(warpgroup).init(4);  // a lane of each warp arrives
      sums_are_used(warpgroup).init(1);
    }
    for (int piece = 0; piece < 2; ++piece) worker_piece_is_there(piece).init(1);
    publish_barriers();
  }
};

}  // namespace megasoftmax
