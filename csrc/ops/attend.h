#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace distca::ops {

// Computes one task list without communication, for calibration. It is the operator `attend` of
// schemas.cpp, below autograd. Rows outside all tasks are zero. `tasks`, "home" or "visiting",
// names the layout's task list.
std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const at::Tensor& layout,
                                          const at::Tensor& rows, double softmax_scale,
                                          c10::string_view tasks);

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& layout, const at::Tensor& rows,
    double softmax_scale, c10::string_view tasks);

}  // namespace distca::ops
