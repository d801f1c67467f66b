#pragma once
// Which queries a block of the forward owns, and which part of their keys.

#include "../common/ptx.cuh"
#include "params.h"

namespace megasoftmax {

// What a block owns. It is cheap to compute again where it is rarely needed.
struct TileOfQueries {
  int first_query, head, batch, split;

  __device__ TileOfQueries(const AttentionForwardParams& params, int queries_per_tile)
      : TileOfQueries(params, queries_per_tile, block_index_anew()) {}
  __device__ TileOfQueries(const AttentionForwardParams& params, int queries_per_tile, int number) {
    int tile, of_queries;
    params.order.place(number, tile, head, batch);
    // With causality the last queries see the most keys, so they begin first.
    params.row_tiles.split(params.order.tiles - 1 - tile, split, of_queries);
    first_query = of_queries * queries_per_tile;
  }
};

}  // namespace megasoftmax
