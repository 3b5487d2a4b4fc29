#pragma once

#include "ptx.cuh"

// A pair is a cluster of two thread blocks. They take the two halves of a block of 128 keys, and
// the same query tiles in the same order. They swap dS of every tile. Then each computes one half
// of dQ over all 128 keys, so only half as much is added in global memory. For its half, a thread
// block also holds columns of its partner's keys.
//
// dQ of a tile has three or four pieces of 64 columns. Of four, a thread block computes two. Of
// three, it computes one of the outer pieces, and the middle one for half of the tile's queries.
namespace distca::attention::sm90 {

struct Pair {
  uint32_t rank = cluster_rank();  // of this block

  __device__ __forceinline__ uint32_t other() const { return 1 - rank; }
  __device__ __forceinline__ bool leads() const { return rank == 0; }
  // Returns which of dQ's kPieces is this block's piece `of_mine`, 0 or 1.
  template <int kPieces>
  __device__ __forceinline__ int piece(int of_mine) const {
    return of_mine == 1 && kPieces == 3 ? 1 : static_cast<int>(2 * rank) + of_mine;
  }
  // The first of this block's 32 queries in the middle one of three pieces.
  __device__ __forceinline__ int first_query() const { return static_cast<int>(32 * rank); }
  // Returns the address in the partner's shared memory that corresponds to `address` in this
  // block's.
  __device__ __forceinline__ uint32_t partner(uint32_t address) const {
    return address_in(other(), address);
  }
};

}  // namespace distca::attention::sm90
