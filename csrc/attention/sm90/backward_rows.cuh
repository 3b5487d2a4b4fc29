#pragma once

#include <cuda_runtime_api.h>

#include "kernels.h"

// What surrounds the backward kernel, row by row.
//
// Deterministic dQ is added up in fixed point, in which order does not matter. Rows of
// dQ / softmax_scale are sums of dS_j K_j with dS_j = P_j (dP_j - delta), sum P = 1 and |dP_j| <=
// |dO| |V_j|, so |sum_j dS_j K_j| <= (|dO| max_j |V_j| + |delta|) max |K|. delta is the mean of dP
// under P less the gradient of lse, which nothing else bounds. The quantum of a row and head is
// this bound over 2^30, rounded up to a power of two: sums fit in int32 with a factor of 2 to spare
// for rounding, and wrapping of partial sums cancels. A softcap makes terms smaller: it multiplies
// dS_j by 1 - tanh^2. Two integers are added at a time, as one number of 64 bits.
namespace distca::attention::sm90 {

// Clears call.dq_sums. Fills call.row_stats: by (tile, head) three vectors of stats_pitch floats,
// the log2 of the softmax's denominator (+inf for rows past the tile's end and rows that see no
// key, so that their probabilities are 0), -delta, and one over the quantum of dQ.
void prepare_rows(const BackwardCall& call, cudaStream_t stream);

// Row r of a tile stands at stats_index(r) of such a vector: the columns that one thread of a
// product holds, 8 j + 2 t + {0, 1} for all j, stand side by side. 16 bytes of padding follow those
// of each t, so that four threads read different banks of shared memory.
constexpr int stats_group(int tile_rows) {
  return tile_rows / 4 + 4;
}
constexpr int stats_pitch(int tile_rows) {
  return 4 * stats_group(tile_rows);
}
template <int kRows>
__host__ __device__ constexpr int stats_index(int row) {
  constexpr int kGroup = stats_group(kRows);
  return row / 2 % 4 * kGroup + row / 8 * 2 + row % 2;
}

// Returns 2^32 * high + low. The sum of such numbers is the pair of the sums of low and high.
__host__ __device__ constexpr uint64_t pair_of(int32_t low, int32_t high) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32) + static_cast<int64_t>(low);
}
// Returns `high` from the upper half of a pair, from which a negative `low` has borrowed 1.
__host__ __device__ constexpr int32_t high_of(int32_t low, int32_t upper) {
  return upper + (low < 0 ? 1 : 0);
}

// dq = softmax_scale * call.dq_sums, tile by tile.
void finish_dq(const BackwardCall& call, cudaStream_t stream);

}  // namespace distca::attention::sm90
