#pragma once

#include "../attention.h"

// Core attention for float64, float32 and bfloat16 on the CPU: float64 computes in float64, the
// others in float32. Results do not depend on the number of threads.
namespace distca::attention::cpu {

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params);

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out,
                                                        const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, const Saved& saved,
                                                        const TaskList& tasks,
                                                        const Params& params);

}  // namespace distca::attention::cpu
