#pragma once
// The row worker: one warp of a block does row work of other heads while products run. It makes
// rows, which is what blocks need of them and zeros to add dQ to, for a later section of heads, and
// rounds dQ of an earlier one. Memory is idle then. Launches would wait for it alone.
//
// A block of section s makes rows of section s + sections_apart, whose blocks wait for them. Then
// it waits until blocks of section s - sections_apart have added all dQ, and rounds it. So blocks
// wait for blocks that began before them.

#include "../../rows_of_backward.cuh"
#include "../../turns.cuh"
#include "../ptx.cuh"
#include "memory.cuh"

namespace megasoftmax {

__device__ inline int section_of_block(const AttentionBackwardParams& params) {
  int section, place;
  params.order.blocks_of_section.split(block_index_anew(), section, place);
  return section;
}
// Three quarters of the blocks of a section have a row worker: those with the most tiles. The
// others end before it would.
__device__ inline int workers_of_section(const AttentionBackwardParams& params) {
  return divide_up(3 * static_cast<int>(params.order.blocks_of_section.divisor), 4);
}
// The number of this block's worker; from workers_of_section on, it has none.
__device__ inline int worker_of_block(const AttentionBackwardParams& params) {
  int section, place;
  params.order.blocks_of_section.split(block_index_anew(), section, place);
  const int last = static_cast<int>(params.order.blocks_of_section.divisor) - 1;
  return params.order_of_turns == OrderOfTurns::kLastKeysFirst ? last - place : place;
}

// How many workers have made rows of a section, and how many warps have added all dQ of a block.
enum class SectionCount { kRows, kSums };
__device__ inline uint32_t* count_of(const AttentionBackwardParams& params, int section,
                                     SectionCount count) {
  return params.section_counts + 2 * section + static_cast<int>(count);
}

// Waits until the rows of a section are there. Called by one thread.
__device__ inline void wait_for_rows(const AttentionBackwardParams& params, int section) {
  if (section < params.sections_apart) return;  // a launch has made them
  wait_for_turn(count_of(params, section, SectionCount::kRows), workers_of_section(params));
  publish_writes_to_others();
}

// Registers are few: what can be computed again is not kept.
template <class T, class Memory>
struct RowWorker {
  static constexpr int kRows = kRowsOfWorkerPiece;
  static_assert(kRows == 32);  // a lane for each
  static constexpr int kDim = Memory::kDim, kPanels = Memory::kValuePanels;
  static constexpr int kPanelBytes = kRows * 128;

  const AttentionBackwardParams& params;
  const BackwardTensorMaps& maps;
  const Memory& memory;
  int step = 0;  // pieces so far

  // Consecutive rows of a head.
  struct Piece {
    int batch, head, query, rows;

    __device__ Piece(const AttentionBackwardParams& params, int section, int number) {
      int of_section;
      params.pieces_of_head.split(number, of_section, query);
      query *= kRows;
      rows = min(kRows, params.queries - query);
      params.place_of_head(section, of_section, head, batch);
    }
    __device__ int64_t row(const AttentionBackwardParams& params) const {
      return params.row_index(batch, head, query);
    }
  };

  __device__ static int lane() { return thread_index_anew() % 32; }
  __device__ uint32_t piece_at(int step) const { return memory.worker_piece(step % 2); }
  __device__ Barrier is_there(int step) const { return memory.worker_piece_is_there(step % 2); }

  // Calls start(piece, step) for each of this worker's pieces of the section `distance` after this
  // one, and finish(find_piece, step) when its copies are there. find_piece() computes the piece
  // again. The next piece is copied meanwhile.
  template <class Start, class Finish>
  __device__ void for_each_piece(int distance, Start&& start, Finish&& finish) {
    const auto pieces = [&] {
      return static_cast<int>(params.order.section.divisor * params.heads_per_key_head.divisor *
                              params.pieces_of_head.divisor);
    };
    const auto piece = [&](int number) {
      return Piece(params, section_of_block(params) + distance, number);
    };
    int number = worker_of_block(params);
    if (number < pieces()) start(piece(number), step);
    end_copies();
#pragma unroll 1
    for (; number < pieces(); ++step) {
      const int next = number + workers_of_section(params);
      if (next < pieces()) start(piece(next), step + 1);
      end_copies();
      wait_for_older_copies<1>();
      is_there(step).wait(step / 2 & 1);
      finish([&] { return piece(static_cast<int>(unknown(number))); }, step);
      __syncwarp();  // all lanes have read the piece
      number = next;
    }
  }

  // rowsum(dO O) of this lane's row, with the bits of attention_rows_kernel: its lanes are added up
  // in this order. Rows are swizzled, so lanes read from all banks.
  __device__ float product_of_row(int step) const {
    const uint32_t row = piece_at(step) + lane() * 128, swizzle = lane() % 8 * 16;
    float sum = 0.f;
#pragma unroll 1
    for (int first = 0; first < kPanels; ++first)
      sum += sum_of_vectors<kPanels, 8>(row, swizzle ^ first * 16);
    return sum;
  }
  // Of kCount vectors of 16 bytes, kStride apart, from `first` of product_of_row on, which
  // `swizzle` has.
  template <int kStride, int kCount, int kFirst = 0>
  __device__ static float sum_of_vectors(uint32_t row, uint32_t swizzle) {
    if constexpr (kCount > 1) {
      const float half = sum_of_vectors<2 * kStride, kCount / 2, kFirst>(row, swizzle);
      return half + sum_of_vectors<2 * kStride, kCount / 2, kFirst + kStride>(row, swizzle);
    } else {
      const uint32_t at = row + kFirst / 8 * kPanelBytes + (swizzle ^ kFirst % 8 * 16);
      Pack<T, 8> output, gradient;
      load_four(output.words, at);
      load_four(gradient.words, at + kPanels * kPanelBytes);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(output[i], gradient[i], sum);
      return sum;
    }
  }

  __device__ void clear_sums(const Piece& piece) const {
    float4* sums =
        reinterpret_cast<float4*>(params.query_gradient_sum + piece.row(params) * params.head_dim);
    const float4* const end = sums + piece.rows * params.head_dim / 4;
#pragma unroll 4
    for (sums += lane(); sums < end; sums += 32) *sums = make_float4(0.f, 0.f, 0.f, 0.f);
  }

  // As attention_rows_kernel.
  __device__ void make_rows() {
    const auto statistics = [&](int step) {
      return memory.worker_statistics(step % 2) + 4 * lane();
    };
    for_each_piece(
        params.sections_apart,
        [&](const Piece& piece, int step) {
          if (lane() == 0) {
            is_there(step).arrive_and_expect(2 * kPanels * kPanelBytes);
            start_copy_of_panels<kPanels>(piece_at(step), maps.output_piece, is_there(step), kRows,
                                          piece.query, piece.head, piece.batch);
            start_copy_of_panels<kPanels>(piece_at(step) + kPanels * kPanelBytes,
                                          maps.output_gradient_piece, is_there(step), kRows,
                                          piece.query, piece.head, piece.batch);
          }
          if (lane() >= piece.rows) return;
          const float* const of_row = params.statistics + piece.row(params) + lane();
          start_copy_of_word(statistics(step), of_row);
          start_copy_of_word(statistics(step) + 4 * kRows, of_row + params.rows());
        },
        [&](auto&& find_piece, int step) {
          const float delta = product_of_row(step);
          const Piece piece = find_piece();
          clear_sums(piece);
          if (piece.query + piece.rows == params.queries)
            end_pairs<32>(params, piece.batch, piece.head, lane());
          if (lane() >= piece.rows) return;
          store_row_of_backward(params, piece.batch, piece.head, piece.query + lane(),
                                piece.row(params) + lane(),
                                __uint_as_float(load_word(statistics(step))),
                                __uint_as_float(load_word(statistics(step) + 4 * kRows)), delta);
        });
  }

  // As attention_query_gradient_kernel.
  __device__ void round_sums() {
    for_each_piece(
        -params.sections_apart,
        [&](const Piece& piece, int step) {
          if (lane() != 0) return;
          const int bytes = piece.rows * params.head_dim * static_cast<int>(sizeof(float));
          is_there(step).arrive_and_expect(bytes);
          start_copy_of_bytes(piece_at(step),
                              params.query_gradient_sum + piece.row(params) * params.head_dim,
                              bytes, is_there(step));
        },
        [&](auto&& find_piece, int step) {
          const Piece piece = find_piece();
          constexpr int kLanes = kDim <= 32 ? 4 : kDim <= 64 ? 8 : 16, kStep = 32 / kLanes;
          const int column = lane() % kLanes * 8;
          if (column >= params.head_dim) return;
          uint32_t at = piece_at(step) + (lane() / kLanes * params.head_dim + column) * 4;
          T* out = params.query_gradient.template row<T>(piece.batch, piece.head,
                                                         piece.query + lane() / kLanes) +
                   column;
#pragma unroll 2
          for (int row = lane() / kLanes; row < piece.rows; row += kStep) {
            uint32_t low[4], high[4];
            load_four(low, at);
            load_four(high, at + 16);
            const auto scaled = [&](uint32_t word) { return __uint_as_float(word) * params.scale; };
            store_pack(out, Pack<T, 8>::round({scaled(low[0]), scaled(low[1]), scaled(low[2]),
                                               scaled(low[3]), scaled(high[0]), scaled(high[1]),
                                               scaled(high[2]), scaled(high[3])}));
            at += kStep * params.head_dim * 4;
            out += kStep * params.query_gradient.query_stride;
          }
        });
  }

  // All work of the warp.
  __device__ void run() {
    if (worker_of_block(params) >= workers_of_section(params)) return;
    if (section_of_block(params) + params.sections_apart < params.sections()) {
      make_rows();
      publish_writes_to_others();
      __syncwarp();
      if (lane() == 0)
        pass_turn(count_of(params, section_of_block(params) + params.sections_apart,
                           SectionCount::kRows));
    }
    if (section_of_block(params) < params.sections_apart) return;
    if (lane() == 0) {
      const int earlier = section_of_block(params) - params.sections_apart;
      wait_for_rows(params, earlier);  // for zeros that no block adds to
      wait_for_turn(count_of(params, earlier, SectionCount::kSums),
                    Memory::kWarpgroups * static_cast<int>(params.order.blocks_of_section.divisor));
      publish_writes_to_others();
    }
    __syncwarp();
    round_sums();
  }
};

}  // namespace megasoftmax
