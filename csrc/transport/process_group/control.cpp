#include "control.h"

#include <ATen/ops/empty.h>

namespace distca::transport {

at::Tensor ControlPlane::all_gather(const at::Tensor& tensor, const Where& where,
                                    const std::string& activity) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), group_->getSize());
  at::Tensor gathered = at::empty(sizes, tensor.options());
  at::Tensor own = tensor.contiguous().unsqueeze(0);
  const Wait wait = patience_->enter(where, activity);
  c10::intrusive_ptr<c10d::Work> work;
  patience_->guard(where, [&] { work = group_->_allgather_base(gathered, own); });
  patience_->wait_on_host({work}, wait);
  return gathered;
}

}  // namespace distca::transport
