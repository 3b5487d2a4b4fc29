#include "delta.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

namespace distca::attention {
namespace {

template <typename scalar_t>
void row_dots_cpu(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots) {
  using acc_t = at::opmath_type<scalar_t>;
  const int64_t head_dim = a.size(2);
  const auto* a_data = a.const_data_ptr<scalar_t>();
  const auto* b_data = b.const_data_ptr<scalar_t>();
  auto* dots_data = dots.mutable_data_ptr<acc_t>();
  at::parallel_for(0, dots.numel(), 256, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      acc_t sum = 0;
      for (int64_t d = 0; d < head_dim; ++d) {
        sum += static_cast<acc_t>(a_data[i * head_dim + d]) *
               static_cast<acc_t>(b_data[i * head_dim + d]);
      }
      dots_data[i] = sum;
    }
  });
}

}  // namespace

at::Tensor empty_row_dots(const at::Tensor& a) {
  const auto dtype = a.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty({a.size(0), a.size(1)}, a.options().dtype(dtype));
}

void row_dots_into(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots) {
  if (dots.numel() == 0) return;
#ifdef DISTCA_WITH_CUDA
  if (a.is_cuda()) return row_dots_cuda(a, b, dots);
#endif
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, a.scalar_type(), "row_dots",
                                 [&] { row_dots_cpu<scalar_t>(a, b, dots); });
}

at::Tensor row_dots(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor dots = empty_row_dots(a);
  row_dots_into(a, b, dots);
  return dots;
}

}  // namespace distca::attention
