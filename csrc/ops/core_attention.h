#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace distca::ops {

// Operators of schemas.cpp, below autograd. Shapes as in attention.h, rows are this rank's home
// rows.
std::tuple<at::Tensor, at::Tensor, at::Tensor> core_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& layout,
    const at::Tensor& rows, double softmax_scale, c10::string_view group_name,
    int64_t num_kept_queries, int64_t num_kept_keys, int64_t caller);

std::tuple<at::Tensor, at::Tensor, at::Tensor> core_attention_backward(
    const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& layout, const at::Tensor& rows,
    double softmax_scale, c10::string_view group_name, const std::optional<at::Tensor>& kept,
    int64_t caller);

// The forward pass's dispatch alone, until all rows that come here are here: what calibrate and the
// benchmarks time.
void exchange(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
              const at::Tensor& layout, const at::Tensor& rows, c10::string_view group_name);

}  // namespace distca::ops
