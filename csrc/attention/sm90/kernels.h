#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tensor_map.h"
#include "tiles.h"

// What the host launches. Plain structs, no torch. Rows, heads and tiles are counted in int32. The
// widths of queries and values are multiples of 8 up to 256, and computed as those of Widths: the
// copy engine fills in zeros. Every function only enqueues work on `stream` and throws
// std::runtime_error for a CUDA error.
namespace distca::attention::sm90 {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// head_dim of queries and keys, and that of values, as kernels compute them: 64, 128, 192 or 256
// for both, or (192, 128). With a softcap 128 or 256 for both: fewer kernels to compile.
struct Widths {
  int32_t queries;
  int32_t values;
};
constexpr Widths computed_widths(int64_t head_dim, int64_t value_dim, double softcap) {
  const int64_t widest = head_dim > value_dim ? head_dim : value_dim;
  if (softcap != 0) return widest <= 128 ? Widths{128, 128} : Widths{256, 256};
  const int32_t both = widest <= 64 ? 64 : static_cast<int32_t>((widest + 63) / 64 * 64);
  return {both, both == 192 && value_dim <= 128 ? 128 : both};
}

// Query rows that one forward or backward tile holds, for the width of queries.
constexpr int32_t forward_tile_rows(int32_t width) {
  return width == 64 ? 256 : 128;
}
constexpr int32_t backward_tile_rows(int32_t width) {
  return width == 64 ? 128 : 64;
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
  float softcap;       // 0: none
  double flops;        // of all tasks, approximately
  bool shares_device;  // see Params
};

void forward(const ForwardCall& call, cudaStream_t stream);

// Workspace of the backward pass, in bytes.
struct BackwardSizes {
  int64_t dq_sums;    // fp32 (pairs of int32 when deterministic), tile by tile
  int64_t row_stats;  // see prepare_rows
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
  uint8_t* row_stats;
  float* bounds;
  Window window;
  float softmax_scale;
  float softcap;  // 0: none
  bool deterministic;
  double flops;        // of all tasks, approximately
  bool shares_device;  // see Params
};

// Returns the sizes for the tensors and tiles of `call`.
BackwardSizes backward_sizes(const BackwardCall& call);

void backward(const BackwardCall& call, cudaStream_t stream);

}  // namespace distca::attention::sm90
