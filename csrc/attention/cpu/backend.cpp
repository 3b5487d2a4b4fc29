#include "../backend.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include "cpu.h"

namespace distca::attention::cpu {
namespace {

template <typename scalar_t>
void row_dots_of(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots) {
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

void row_dots(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots) {
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, a.scalar_type(), "row_dots",
                                 [&] { row_dots_of<scalar_t>(a, b, dots); });
}

}  // namespace

Backend backend() {
  return {.name = "cpu",
          .device = at::kCPU,
          .dtypes = {at::kDouble, at::kFloat, at::kBFloat16},
          .forward = forward,
          .backward = backward,
          .row_dots = row_dots};
}

}  // namespace distca::attention::cpu
