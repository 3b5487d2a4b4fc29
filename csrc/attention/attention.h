#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <tuple>
#include <utility>
#include <vector>

#include "core/mask.h"
#include "core/task.h"

namespace distca::attention {

// What one back end reads of a task list beside the tasks: words in an order of its own, which
// travel in the layout. `Device` is a vector before they travel, an int32 tensor after.
template <typename Device>
struct Words {
  int64_t backend;  // see id_of in backend.h
  std::vector<int64_t> host;
  Device device;  // starts at a multiple of 16 bytes
};
using PlannedWords = Words<std::vector<int32_t>>;
using TaskWords = Words<at::Tensor>;

// Tasks on the host, and what back ends read of them, built once per plan and used by all layers.
struct TaskList {
  std::vector<PlacedTask> tasks;
  Mask mask;  // of all of them
  std::vector<TaskWords> words;
};

// The words of every back end of a device type ("cpu", "cuda") that reads any.
std::vector<PlannedWords> plan_words(const std::vector<PlacedTask>& tasks, const Mask& mask,
                                     c10::string_view device_type);

// Throws ValueError unless the words are those that plan_words gives. Words on a device are as the
// host wrote them; they are compared on the CPU only.
void check_words(const TaskList& list);

struct Params {
  double softmax_scale;
  // Gradients equal bit by bit in every run, as under torch.use_deterministic_algorithms.
  bool deterministic = false;
};

// Throws ValueError, naming what is allowed, unless a back end computes attention of such queries
// with a positive scale.
void check_supported(const at::Tensor& q, const Mask& mask, bool deterministic);

// Whether the back end of such calls reads rows where they lie and writes results where they
// belong, without copies of either: what rows in memory that other ranks write ask for.
bool reads_in_place(const at::Tensor& q, double softmax_scale);

// Tasks with their rows, and where the results go. q [rows_q, heads_q, head_dim], k, v [rows_k,
// heads_kv, head_dim]; last dimension contiguous, any row and head strides. out like q and lse
// [rows_q, heads_q] fp32 (fp64 for float64 inputs), natural logarithm, both contiguous.
struct ForwardRows {
  at::Tensor q, k, v;
  const TaskList& tasks;
  at::Tensor out, lse;
};

// Rows of no task keep what is in out and lse. A query that sees no key gives out 0 and lse -inf.
void forward(const ForwardRows& rows, const Params& params);

// What the backward pass knows of the forward's result: `out`, or delta = rowsum(out * grad_out)
// [rows_q, heads_q] of lse's dtype, or both. A server that computes for others has no `out`.
struct Saved {
  at::Tensor lse;
  at::Tensor delta;
  at::Tensor out;
};

// dq like q, dk and dv like k and v, all contiguous.
struct BackwardRows {
  at::Tensor grad_out, q, k, v;
  Saved saved;
  const TaskList& tasks;
  at::Tensor dq, dk, dv;
};

// Every key row of a task gets the sum over all tasks that read it, zero where none of their
// queries sees it. Rows of q of no task, and rows of k that no task reads, keep what is in dq, dk
// and dv.
void backward(const BackwardRows& rows, const Params& params);

// The same with results of their own: (out, lse), whose rows of no task are unspecified, and
// (dq, dk, dv), where dk and dv are zero for keys that no task reads.
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params);
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out,
                                                        const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, const Saved& saved,
                                                        const TaskList& tasks,
                                                        const Params& params);

// out and lse for ForwardRows.
std::tuple<at::Tensor, at::Tensor> new_results(const at::Tensor& q);

// dk and dv like k, zero unless the tasks of these lists read every row.
std::pair<at::Tensor, at::Tensor> new_key_gradients(const at::Tensor& k,
                                                    std::initializer_list<const TaskList*> lists);

}  // namespace distca::attention
