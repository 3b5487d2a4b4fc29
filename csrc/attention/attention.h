#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <tuple>
#include <utility>
#include <vector>

#include "aten/waves.h"
#include "core/mask.h"
#include "core/task.h"

namespace distca::attention {

// Tile lists of the sm90 kernels (sm90/tiles.h) for query tiles of one height.
struct TileTable {
  int64_t tile_rows;
  int64_t num_tiles;
  int64_t num_blocks;
  int64_t num_runs;
  int64_t num_key_rows;
  at::Tensor words;  // int32, device: num_tiles QueryTiles, then num_blocks KeyBlocks, 8 words each
};

// Tasks on the host and what the device needs of them, built once per plan and used by all layers.
struct TaskList {
  std::vector<PlacedTask> tasks;
  Mask mask;                            // of all of them
  std::vector<aten::VarlenWave> waves;  // empty on CPU
  std::vector<int64_t> wave_order;      // task indices by wave
  at::Tensor cu_seqlens;                // int32, device: per wave cu_seqlens_q, then cu_seqlens_k
  std::vector<TileTable> tiles;         // one for each of sm90::kTileRows; empty on CPU
};

struct Params {
  double softmax_scale;
  // Gradients equal bit by bit in every run, as under torch.use_deterministic_algorithms.
  bool deterministic = false;
};

// Whether attention over such tensors takes every mask and task, deterministic or not; else it
// takes only what aten.h says.
bool runs_own_kernels(const at::Tensor& q);

// Whether attention over such tensors reads rows in other ranks' reach where they lie, and writes
// its results to memory that it is given, without copies.
bool works_in_place(const at::Tensor& q, double softmax_scale);

// q [rows_q, heads_q, head_dim], k, v [rows_k, heads_kv, head_dim]; last dimension contiguous, any
// row and head strides. Returns out like q, contiguous, and lse [rows_q, heads_q] fp32 (fp64 for
// float64 inputs), natural logarithm. Rows of no task are unspecified. A query that sees no key
// gives out 0 and lse -inf.
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params);

// Tasks with their rows, and where the results go: contiguous, of the shapes that forward gives.
struct ForwardRows {
  at::Tensor q, k, v;
  const TaskList& tasks;
  at::Tensor out, lse;
};

// As above. Rows of no task keep what is in out and lse.
void forward(const ForwardRows& rows, const Params& params);

// What the backward pass knows of the forward's result: `out`, or delta = rowsum(out * grad_out)
// [rows_q, heads_q] of lse's dtype, or both. A server that computes for others has no `out`.
struct Saved {
  at::Tensor lse;
  at::Tensor delta;
  at::Tensor out;
};

// Returns dq like q (rows of no task unspecified), dk and dv like k and v: every row is written,
// the sum over all tasks that read it, zero where none does. All contiguous.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out,
                                                        const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, const Saved& saved,
                                                        const TaskList& tasks,
                                                        const Params& params);

struct BackwardRows {
  at::Tensor grad_out, q, k, v;
  Saved saved;
  const TaskList& tasks;
  at::Tensor dq, dk, dv;
};

// As above. Rows of q of no task, and rows of k that no task reads, keep what is in dq, dk and dv.
void backward(const BackwardRows& rows, const Params& params);

// out and lse for ForwardRows.
std::tuple<at::Tensor, at::Tensor> new_results(const at::Tensor& q);

// Whether the backward passes of these lists, which share no key, write every row of dk and dv.
bool writes_all_keys(const at::Tensor& k, std::initializer_list<const TaskList*> lists);

// dk and dv like k, zero unless the backward passes of these lists, which share no key, write every
// row.
std::pair<at::Tensor, at::Tensor> new_key_gradients(const at::Tensor& k,
                                                    std::initializer_list<const TaskList*> lists);

}  // namespace distca::attention
