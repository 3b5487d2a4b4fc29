#pragma once

#include "../attention.h"
#include "waves.h"

// Core attention for bfloat16 and float16 on any CUDA device that ATen's varlen flash attention
// knows (compute capability 8.0 and up). Keys are read where they lie, never copied.
namespace distca::attention::aten {

// Throws ValueError unless ATen can compute these tasks: its mask is aligned to a task's last query
// and last key, and it is causal, full or a window to the left. Every query must see a key.
void check_supported(const std::vector<PlacedTask>& tasks, const Mask& mask);

// `tasks` must carry make_waves' result, cu_seqlens on q's device.
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params);

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out,
                                                        const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, const Saved& saved,
                                                        const TaskList& tasks,
                                                        const Params& params);

// ATen allocates its results: rows of tasks are copied from there.
void forward(const ForwardRows& rows, const Params& params);
void backward(const BackwardRows& rows, const Params& params);

}  // namespace distca::attention::aten
