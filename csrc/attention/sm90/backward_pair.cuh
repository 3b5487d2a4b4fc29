#pragma once

#include "ptx.cuh"

// Two blocks, a cluster, that take neighbouring items of 64 keys, with the same tiles in the same
// order. They swap dS of every tile, so that each computes dQ over all 128 keys, for half of it
// only: half as much is added in global memory. For that half, a block also holds the columns of
// its partner's keys.
//
// dQ has three pieces of 64 columns. One is the block's own. Of the middle one, it has half of the
// tile's queries.
namespace distca::attention::sm90 {

constexpr int kMiddlePiece = 1;

struct Pair {
  uint32_t rank = cluster_rank();  // of this block

  __device__ __forceinline__ uint32_t other() const { return 1 - rank; }
  __device__ __forceinline__ bool leads() const { return rank == 0; }
  __device__ __forceinline__ int own_piece() const { return static_cast<int>(2 * rank); }
  // The middle piece's first query, of 64.
  __device__ __forceinline__ int first_query() const { return static_cast<int>(32 * rank); }
  // Returns where the partner has what this block has at `address` of its shared memory.
  __device__ __forceinline__ uint32_t partner(uint32_t address) const {
    return address_in(other(), address);
  }
};

}  // namespace distca::attention::sm90
