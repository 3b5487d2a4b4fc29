#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "tiles.h"

namespace distca::attention::cpu {

// Runs work(i, scratch) for i in [0, count) on torch's threads, each taking the next i when it is
// free: items differ in size. `scratch_size` Reals per thread.
template <typename Real, typename Work>
void for_each_ticket(int64_t count, int64_t scratch_size, const Work& work) {
  std::atomic<int64_t> next{0};
  const int64_t num_threads = std::min<int64_t>(count, at::get_num_threads());
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    Scratch<Real> scratch(scratch_size);
    for (int64_t i = next++; i < count; i = next++) work(i, scratch);
  });
}

template <typename T>
Rows<T> rows_of(const at::Tensor& x) {
  using Element = std::remove_const_t<T>;
  return {static_cast<T*>(x.data_ptr<Element>()), x.stride(0), x.stride(1)};
}

// Calls f(T{}) with the dtype of x.
template <typename F>
void visit_dtype(const at::Tensor& x, const F& f) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return f(double{});
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(c10::BFloat16{});
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernels for ", x.scalar_type());
  }
}

template <typename Rows>
Shape shape_of(const Rows& rows, const Params& params) {
  return {.group = rows.q.size(1) / rows.k.size(1),
          .head_dim = rows.q.size(2),
          .mask = rows.tasks.mask,
          .softmax_scale = params.softmax_scale};
}

}  // namespace distca::attention::cpu
