#pragma once
// Which queries a block of the forward owns.

#include "../common/ptx.cuh"
#include "params.h"

namespace megasoftmax {

// What a block owns. Cheap enough to be found anew where it is needed seldom.
struct TileOfQueries {
  int first_query, head, batch;

  __device__ TileOfQueries(const AttentionParams& params, int queries_per_tile)
      : TileOfQueries(params, queries_per_tile, block_index_anew()) {}
  __device__ TileOfQueries(const AttentionParams& params, int queries_per_tile, int number) {
    int tile;
    params.order.place(number, tile, head, batch);
    // Of causal attention the last queries see most keys: they begin first.
    first_query = (params.order.tiles - 1 - tile) * queries_per_tile;
  }
};

}  // namespace megasoftmax
