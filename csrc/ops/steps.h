#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

namespace distca::ops {

// Core attention as separate operators of schemas.cpp, below autograd, for callers that put other
// work between them: dispatch, attend home and visiting tasks, combine. Home tensors have this
// rank's rows, visiting tensors the rows that it serves. Rows of no task are zero.
using Pair = std::tuple<at::Tensor, at::Tensor>;
using Triple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Triple dispatch(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const at::Tensor& layout, const at::Tensor& rows, c10::string_view group_name);

Triple dispatch_backward(const at::Tensor& visiting_grad_q, const at::Tensor& visiting_grad_k,
                         const at::Tensor& visiting_grad_v, const at::Tensor& layout,
                         const at::Tensor& rows, c10::string_view group_name);

// `tasks` is "home" or "visiting": which of the layout's task lists the rows belong to.
Pair attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& layout,
            const at::Tensor& rows, double softmax_scale, c10::string_view tasks);

Triple attend_backward(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                       const at::Tensor& layout, const at::Tensor& rows, double softmax_scale,
                       c10::string_view tasks);

Pair combine(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& visiting_out,
             const at::Tensor& visiting_lse, const at::Tensor& layout, const at::Tensor& rows,
             c10::string_view group_name);

// (grad of out, grad of visiting_out); lse carries no gradient.
Pair combine_backward(const at::Tensor& grad_out, const at::Tensor& layout, const at::Tensor& rows,
                      c10::string_view group_name);

}  // namespace distca::ops
