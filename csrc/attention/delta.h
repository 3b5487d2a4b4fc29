#pragma once

#include <ATen/core/Tensor.h>

namespace distca::attention {

// sum over head_dim of a * b, accumulated in float (double for float64): [rows, heads] of that
// type. a, b [rows, heads, head_dim] contiguous. With a = out, b = grad_out it is the backward's
// delta.
at::Tensor row_dots(const at::Tensor& a, const at::Tensor& b);

#ifdef DISTCA_WITH_CUDA
void row_dots_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots);
#endif

}  // namespace distca::attention
