#pragma once

#include <utility>

#include "attention.h"

// Core attention for bfloat16 and float16 on compute capability 9.0, any mask and head_dim up to
// 128: tasks read shared keys where they lie, and a key's gradient is written once.
namespace distca::attention::sm90 {

// Whether these kernels compute attention over such tensors on q's device.
bool supports(const at::Tensor& q);

// As attention::forward and backward, whose checks have passed. `tasks` must carry tile tables.
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params);

// dq is added up in float32 in no fixed order or, under torch.use_deterministic_algorithms, in
// fixed point: then equal inputs give equal bits, in whatever order tasks are listed.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out,
                                                        const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, const Saved& saved,
                                                        const TaskList& tasks,
                                                        const Params& params);

// Tasks with their rows, and where the results go: contiguous, of the shapes that forward gives.
struct ForwardRows {
  at::Tensor q, k, v;
  const TaskList& tasks;
  at::Tensor out, lse;
};

void forward(const ForwardRows& rows, const Params& params);

struct BackwardRows {
  at::Tensor grad_out, q, k, v;
  Saved saved;
  const TaskList& tasks;
  at::Tensor dq, dk, dv;
};

// dk and dv like k, zero unless the tasks' backward pass writes every row.
std::pair<at::Tensor, at::Tensor> new_key_gradients(const at::Tensor& k, const TaskList& tasks);

// Rows of k that no task reads keep what is in dk and dv.
void backward(const BackwardRows& rows, const Params& params);

}  // namespace distca::attention::sm90
