#pragma once

#include <initializer_list>

#include "attention.h"

// Core attention for bfloat16 and float16 on compute capability 9.0, any mask and head_dim up to
// 128: tasks read shared keys where they lie, and a key's gradient is written once.
namespace distca::attention::sm90 {

// Whether these kernels compute attention over such tensors on q's device.
bool supports(const at::Tensor& q);

// As attention::forward and backward, whose checks have passed. `tasks` must carry tile tables.
void forward(const ForwardRows& rows, const Params& params);

// dq is added up in float32 in no fixed order or, under torch.use_deterministic_algorithms, in
// fixed point: then equal inputs give equal bits, in whatever order tasks are listed.
void backward(const BackwardRows& rows, const Params& params);

// Whether the backward passes of these lists, which share no key, write every row of dk and dv.
bool write_all_keys(const at::Tensor& k, std::initializer_list<const TaskList*> lists);

}  // namespace distca::attention::sm90
