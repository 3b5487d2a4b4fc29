#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace distca::ops {

// Attention of one task list, an operator of schemas.cpp below autograd, for calibration: without
// communication. Rows of no task are zero. `tasks` is "home" or "visiting": which of the layout's
// task lists the rows belong to.
std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const at::Tensor& layout,
                                          const at::Tensor& rows, double softmax_scale,
                                          c10::string_view tasks);

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& layout, const at::Tensor& rows,
    double softmax_scale, c10::string_view tasks);

}  // namespace distca::ops
