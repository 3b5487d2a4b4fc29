#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tensor_map.h"
#include "tiles.h"

// What the host launches. Plain structs, no torch. Rows, heads and tiles are counted in int32;
// head_dim is a multiple of 8 up to 128, and computed as 64 or 128: the copy engine fills in zeros.
// Every function only enqueues work on `stream` and throws std::runtime_error for a CUDA error.
namespace distca::attention::sm90 {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

constexpr int32_t computed_head_dim(int64_t head_dim) {
  return head_dim <= 64 ? 64 : 128;
}

// Query rows that one forward or backward tile holds.
constexpr int32_t forward_tile_rows(int64_t head_dim) {
  return computed_head_dim(head_dim) == 64 ? 192 : 128;
}
constexpr int32_t backward_tile_rows(int64_t head_dim) {
  return computed_head_dim(head_dim) == 64 ? 128 : 64;
}

// Device copies of TileLists for the kernel's tile height.
struct DeviceTiles {
  const QueryTile* tiles;
  const KeyBlock* blocks;
  int32_t num_tiles;
  int32_t num_blocks;
  int32_t num_runs;
};

struct Window {
  int32_t left;  // -1: no limit
  int32_t right;
};

constexpr int32_t kNumFronts = 4;

struct ForwardCall {
  RowTensor q, k, v, out;
  float* lse;  // [rows, heads_q]
  DeviceTiles tiles;
  int32_t* ticket;   // zero
  uint64_t* fronts;  // kNumFronts words, zero; null: sums are taken in the same order every time
  Window window;
  float softmax_scale;
};

void forward(const ForwardCall& call, cudaStream_t stream);

// Workspace of the backward pass, in bytes.
struct BackwardSizes {
  int64_t dq_sums;    // fp32 (pairs of int32 when deterministic), tile by tile
  int64_t row_stats;  // lse, delta and the quantum of dq by tile
  int64_t bounds;     // of |V| and |K| by run and kv head
};

struct BackwardCall {
  RowTensor q, k, v, grad_out;
  RowTensor out;       // not read if there is delta
  const float* lse;    // [rows, heads_q]
  const float* delta;  // [rows, heads_q], or null
  RowTensor dq, dk, dv;
  DeviceTiles tiles;
  int32_t* ticket;  // zero
  void* dq_sums;
  float* row_stats;
  float* bounds;
  Window window;
  float softmax_scale;
  bool deterministic;
};

// Of the tensors and tiles of `call`.
BackwardSizes backward_sizes(const BackwardCall& call);

void backward(const BackwardCall& call, cudaStream_t stream);

}  // namespace distca::attention::sm90
