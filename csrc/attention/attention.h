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

// A back end's own form of a task list: words that it reads besides the tasks. The layout carries
// them. `Device` is a vector when they are written to a layout, an int32 tensor when read from one.
template <typename Device>
struct Words {
  int64_t backend;  // see id_of in backend.h
  std::vector<int64_t> host;
  Device device;  // starts at a multiple of 16 bytes
};
using PlannedWords = Words<std::vector<int32_t>>;
using TaskWords = Words<at::Tensor>;

// Tasks on the host, and the words of back ends. Built once per plan and used by all layers.
struct TaskList {
  std::vector<PlacedTask> tasks;
  Mask mask;              // of all tasks
  int64_t num_pairs = 0;  // visible (query, key) pairs of all tasks
  std::vector<TaskWords> words;
};

// Returns the words of the back ends of a device type ("cpu", "cuda") that read any.
std::vector<PlannedWords> plan_words(const std::vector<PlacedTask>& tasks, const Mask& mask,
                                     c10::string_view device_type);

// Throws ValueError unless the words equal those of plan_words. Device words are compared on the
// CPU only: on a device, they are trusted to be as the host wrote them.
void check_words(const TaskList& list);

// Scores are s = softmax_scale * q k^T, or softcap * tanh(s / softcap) if softcap is not 0.
struct Scores {
  double softmax_scale;
  double softcap = 0;
};

struct Params : Scores {
  // Gradients equal bit by bit in every run, as under torch.use_deterministic_algorithms.
  bool deterministic = false;
  // Let kernels on streams with a higher priority, such as those that move rows, start before this
  // call ends.
  bool shares_device = false;
};

// Throws ValueError unless a back end supports such queries and values with a positive scale. The
// message names what is supported.
void check_supported(const at::Tensor& q, const at::Tensor& v, const Mask& mask, double softcap,
                     bool deterministic);

// Returns whether the back end of such calls reads rows and writes results in place, without
// copies. Rows in memory that other ranks write need such a back end.
bool reads_in_place(const at::Tensor& q, const at::Tensor& v, const Scores& scores);

// The tensors of a task list's forward pass. q [rows_q, heads_q, head_dim], k [rows_k, heads_kv,
// head_dim], v [rows_k, heads_kv, head_dim_v]; last dimension contiguous, any row and head strides.
// out [rows_q, heads_q, head_dim_v] and lse [rows_q, heads_q] fp32 (fp64 for float64 inputs),
// natural logarithm, both contiguous.
struct ForwardRows {
  at::Tensor q, k, v;
  const TaskList& tasks;
  at::Tensor out, lse;
};

// Leaves rows of out and lse outside all tasks unchanged. A query that sees no key gives out 0 and
// lse -inf.
void forward(const ForwardRows& rows, const Params& params);

// What the backward pass knows of the forward's result: `out`, or delta = rowsum(out * grad_out)
// [rows_q, heads_q] of lse's dtype, or both. A server that computes for others has no `out`. If the
// gradient of lse is subtracted from delta, gradients include it.
struct Saved {
  at::Tensor lse;
  at::Tensor delta;
  at::Tensor out;
};

// grad_out like out; dq, dk and dv like q, k and v, all contiguous.
struct BackwardRows {
  at::Tensor grad_out, q, k, v;
  Saved saved;
  const TaskList& tasks;
  at::Tensor dq, dk, dv;
};

// Writes dq of the tasks' queries, and dk and dv of the tasks' keys: the sum over all tasks that
// read the key, or zero if no query sees it. Leaves all other rows of dq, dk and dv unchanged.
void backward(const BackwardRows& rows, const Params& params);

// The same with new result tensors. Rows of (out, lse) and dq outside all tasks are unspecified. dk
// and dv are zero for keys that no task reads.
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params);
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out,
                                                        const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, const Saved& saved,
                                                        const TaskList& tasks,
                                                        const Params& params);

// dots = sum over head_dim_v of a * b: the backward's delta, if a is `out` and b grad_out. a, b
// [rows, heads, head_dim_v], dots [rows, heads] of lse's dtype; all contiguous.
void row_dots(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots);

// Returns grad_out as backward needs it with a `delta` that includes a gradient of lse. Back ends
// that derive delta from a product with grad_out need rows whose norm is not too small for that.
at::Tensor grad_for_delta(const at::Tensor& grad_out, const at::Tensor& delta, const at::Tensor& q,
                          const Mask& mask, const Params& params);

// Returns the sizes of out, [rows_q, heads_q, head_dim_v].
std::vector<int64_t> out_sizes(const at::Tensor& q, const at::Tensor& v);

// out and lse for ForwardRows.
std::tuple<at::Tensor, at::Tensor> new_results(const at::Tensor& q, const at::Tensor& v);

// dk and dv like k and v, zero unless the tasks of these lists read every row.
std::pair<at::Tensor, at::Tensor> new_key_gradients(const at::Tensor& k, const at::Tensor& v,
                                                    std::initializer_list<const TaskList*> lists);

}  // namespace distca::attention
