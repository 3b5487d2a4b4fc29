#include "delta.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "backend.h"

namespace distca::attention {

at::Tensor empty_row_dots(const at::Tensor& a) {
  const auto dtype = a.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty({a.size(0), a.size(1)}, a.options().dtype(dtype));
}

void row_dots_into(const at::Tensor& a, const at::Tensor& b, const at::Tensor& dots) {
  if (dots.numel() == 0) return;
  const auto& all = backends();
  const auto backend = std::find_if(all.begin(), all.end(), [&](const Backend& backend) {
    return backend.row_dots && backend.device == a.device().type();
  });
  TORCH_CHECK_VALUE(backend != all.end(), "tensors are on ", a.device(),
                    ", for which no back end was built");
  backend->row_dots(a, b, dots);
}

at::Tensor row_dots(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor dots = empty_row_dots(a);
  row_dots_into(a, b, dots);
  return dots;
}

}  // namespace distca::attention
