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

// Clears call.dq_sums and fills call.row_stats. For each (tile, head), it has a RowStats for each
// row of the tile. In deterministic mode, the inverse of each row's quantum of dQ follows. It is a
// power of two, so the exponent bits of a float are enough. 0 stands for NaN.
void prepare_rows(const BackwardCall& call, cudaStream_t stream);

// The values that a product subtracts from a row's scores and dP: see TileSteps::multiply_stats.
// Each is twice the sum of three bfloat16 numbers, which together have 24 bits of precision, as
// many as float32.
struct alignas(16) RowStats {
  static constexpr int kPieces = 3;
  uint16_t minus_log_sum[kPieces];  // -lse / softmax_scale, or -lse / softcap
  uint16_t minus_delta[kPieces];
  uint16_t zero[2];
};
constexpr int kQuantumBytes = 1;  // of a row's inverse quantum
// Bytes of a tile and head before the first inverse quantum, and in all.
constexpr int quanta_offset(int tile_rows) {
  return tile_rows * static_cast<int>(sizeof(RowStats));
}
constexpr int row_stats_bytes(int tile_rows) {
  return quanta_offset(tile_rows) + tile_rows * kQuantumBytes;
}

// Sums of dQ are in pieces, those of a tile side by side. A tile of 64 queries has a piece for
// every 64 columns, and one of 128 queries and 64 columns has two.
constexpr int kPieceRows = 64;
constexpr int kPieceColumns = 64;
constexpr int kPieceWords = kPieceRows * kPieceColumns;
constexpr int pieces_of_dq(int tile_rows, int head_dim) {
  return tile_rows * head_dim / kPieceWords;
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
