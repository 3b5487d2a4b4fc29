#pragma once

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

}  // namespace distca::attention::sm90
