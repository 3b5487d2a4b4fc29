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

// Flags that others raise when rows that tasks read are there, and from which value on they count.
struct ArrivalFlags {
  const uint32_t* flags;
  uint32_t epoch;
};

// Tasks with all their rows, and where the results go: contiguous, of the shapes that forward gives.
struct ForwardRows {
  at::Tensor q, k, v;
  const TaskList& tasks;
  at::Tensor out, lse;
};

// One launch for tasks whose rows are here and tasks of which every one waits for its own rows.
void forward(const ForwardRows& home, const ForwardRows& visiting, const ArrivalFlags& arrivals,
             const Params& params);

struct BackwardRows {
  at::Tensor grad_out, q, k, v;
  Saved saved;  // of visiting tasks lse and delta, both contiguous
  const TaskList& tasks;
  at::Tensor dq, dk, dv;
};

// dk and dv like k, zero unless the tasks' backward pass writes every row.
std::pair<at::Tensor, at::Tensor> new_key_gradients(const at::Tensor& k, const TaskList& tasks);

void backward(const BackwardRows& rows, const Params& params);

// Whether tasks may wait for their rows: deterministic mode looks at all rows before it starts.
bool waits_for_rows_in_backward(const Params& params);

// One launch for both, as in the forward pass.
void backward(const BackwardRows& home, const BackwardRows& visiting, const ArrivalFlags& arrivals,
              const Params& params);

}  // namespace distca::attention::sm90
