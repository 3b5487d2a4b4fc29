#pragma once

#include <ATen/core/Tensor.h>

namespace distca::attention {

// sum over head_dim of a * b, accumulated in float (double for float64): [rows, heads] of that
// type. a, b [rows, heads, head_dim] contiguous. With a = out, b = grad_out it is the backward's
// delta.
at::Tensor row_dots(const at::Tensor& a, const at::Tensor& b);

// [rows, heads], of the type that row_dots gives.
at::Tensor empty_row_dots(const at::Tensor& a);

// The same into `dots`, contiguous.
void row_dots_into(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots);

// row_dots of the back ends on CUDA.
void row_dots_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots);

}  // namespace distca::attention
