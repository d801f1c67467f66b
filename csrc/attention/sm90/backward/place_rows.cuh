#pragma once
// Rows of a dense bias that begin anywhere, backward: warps that would be idle bring them from the
// pieces that tensor copies fill to the tile where products expect them.

#include "../../sm80/tile.cuh"
#include "../rows_anywhere.h"
#include "block.cuh"

namespace megasoftmax {

template <class T, HopperBias kBias, HopperMask kMask, bool kHasTurns, int kIndex>
__device__ __forceinline__ void
HopperBackward<T, kBias, kMask, kHasTurns, kIndex>::place_rows_anywhere(
    const AttentionBackwardParams& params, const Memory& memory, const Block& block) {
  using Panel = Tile<T, kQueries, 64>;
  constexpr int kRowBytes = RowsAnywhere::row_bytes(kKeys), kWarps = Memory::kPlacingWarps;
  constexpr int kPanels = kKeys / 64, kEights = Memory::kPieceRows / 8;
  static_assert(kPanels == 2 && Panel::kRowBytes == 128);
  const int first_key = block.first_key, batch = block.batch;
  auto tiles = block.tiles;
  const int warp = static_cast<int>(uniform(threadIdx.x / 32)) - 1;
  for (int step = 0; tiles.are_left(); tiles.advance(params, batch, first_key), ++step) {
    const RowsAnywhere anywhere(params.bias);
    int bias_batch, bias_head;
    params.entry_of_bias(batch, tiles.head, bias_batch, bias_head);
    const int shift_of_first = uniform(anywhere.shift(
        bias_batch * params.bias.batch_stride + bias_head * params.bias.head_stride, 0));
    memory.scores_are_used(step % 2).wait((step / 2 & 1) ^ 1);
#pragma unroll 1
    for (int piece = 0; piece < Memory::kPieces; ++piece) {
      const int number = step * Memory::kPieces + piece, slot = number % Memory::kSlots;
      if (number % kWarps != warp) continue;
      memory.sent_is_there(slot).wait(number / Memory::kSlots & 1);
      // A lane has two neighbouring keys of each panel. Beyond the last key or query is 0.
      const int lane = thread_index_anew() % 32;
      const int keys = params.keys - first_key - 2 * lane;
      const int rows = params.queries - tiles.query - piece * Memory::kPieceRows;
      const uint32_t from = memory.piece(slot) + 4 * lane;
      const uint32_t to = memory.scores(step % 2) +
                          Panel::offset(piece * Memory::kPieceRows, lane / 4) + lane % 4 * 4;
      const int shift = unknown(shift_of_first);  // it takes fewer registers than all shifts
      const auto place = [&]<bool kIsWhole>() {
        constexpr int kAtATime = 2;
#pragma unroll
        for (int first = 0; first < 8; first += kAtATime) {
          uint32_t words[kAtATime][kEights][kPanels], next[kAtATime][kEights][kPanels];
#pragma unroll
          for (int j = 0; j < kAtATime; ++j) {
            const uint32_t word =
                from + (2 * (shift + anywhere.left_of(first + j)) & ~3) + (first + j) * kRowBytes;
#pragma unroll
            for (int i = 0; i < kEights; ++i) {
#pragma unroll
              for (int panel = 0; panel < kPanels; ++panel) {
                words[j][i][panel] = load_word(word + 8 * i * kRowBytes + 128 * panel);
                next[j][i][panel] = load_word(word + 8 * i * kRowBytes + 128 * panel + 4);
              }
            }
          }
#pragma unroll
          for (int j = 0; j < kAtATime; ++j) {
            const int row = first + j, odd = (shift + anywhere.left_of(row)) & 1;
#pragma unroll
            for (int i = 0; i < kEights; ++i) {
#pragma unroll
              for (int panel = 0; panel < kPanels; ++panel) {
                uint32_t both = __funnelshift_r(words[j][i][panel], next[j][i][panel], 16 * odd);
                if constexpr (!kIsWhole) {
                  const int left = row + 8 * i < rows ? keys - 64 * panel : 0;
                  both = left > 1 ? both : left == 1 ? both & 0xffff : 0;
                }
                store_word(
                    (to ^ row * 16) + row * 128 + i * 1024 + panel * Memory::kScorePanelBytes,
                    both);
              }
            }
          }
        }
      };
      const bool is_whole = first_key + kKeys <= params.keys && rows >= Memory::kPieceRows;
      is_whole ? place.template operator()<true>() : place.template operator()<false>();
      __syncwarp();  // all lanes have read theirs
      if (lane == 0) memory.sent_is_used(slot).arrive();
    }
    __syncwarp();  // all lanes have written theirs
    if (thread_index_anew() % 32 == 0) memory.bias_is_there(step % 2).arrive();
  }
}

}  // namespace megasoftmax
