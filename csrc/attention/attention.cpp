#include "attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "cpu/cpu.h"
#include "delta.h"
#ifdef DISTCA_WITH_CUDA
#include "aten/aten.h"
#endif
#ifdef DISTCA_WITH_SM90
#include "sm90.h"
#endif

namespace distca::attention {
namespace {

void check_rows(const char* name, const at::Tensor& x, const at::Tensor& like) {
  TORCH_CHECK_VALUE(x.dim() == 3, name, " has shape ", x.sizes(),
                    "; expected [rows, heads, head_dim]");
  TORCH_CHECK_VALUE(x.size(2) == like.size(2), name, " has head_dim ", x.size(2), ", q has ",
                    like.size(2), "; they must be equal");
  TORCH_CHECK_VALUE(x.stride(2) == 1 || x.size(2) == 1 || x.numel() == 0, name, " has strides ",
                    x.strides(), "; its last dimension must be contiguous, call ", name,
                    ".contiguous()");
  TORCH_CHECK_VALUE(x.scalar_type() == like.scalar_type() && x.device() == like.device(), name,
                    " is ", x.scalar_type(), " on ", x.device(), ", q is ", like.scalar_type(),
                    " on ", like.device(), "; they must be equal");
}

void check_qkv(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check_rows("q", q, q);
  check_rows("k", k, q);
  check_rows("v", v, q);
  TORCH_CHECK_VALUE(k.sizes() == v.sizes(), "k has shape ", k.sizes(), ", v has ", v.sizes(),
                    "; they must be equal");
  TORCH_CHECK_VALUE(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "q has ", q.size(1),
                    " heads, k has ", k.size(1), "; k's must divide q's");
}

void check_tasks(const std::vector<PlacedTask>& tasks, int64_t rows_q, int64_t rows_k) {
  for (const PlacedTask& task : tasks) {
    const auto inside = [](int64_t begin, int64_t count, int64_t rows) {
      return begin >= 0 && count >= 0 && count <= rows && begin <= rows - count;
    };
    TORCH_CHECK_VALUE(
        inside(task.q_row, task.num_q_rows, rows_q) && inside(task.k_row, task.num_k_rows, rows_k),
        "tasks: query rows [", task.q_row, ", +", task.num_q_rows, ") and key rows [", task.k_row,
        ", +", task.num_k_rows, ") must lie in the ", rows_q, " rows of q and the ", rows_k,
        " rows of k");
  }
}

void check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const TaskList& tasks) {
  check_qkv(q, k, v);
  check_tasks(tasks.tasks, q.size(0), k.size(0));
}

// A scale that is not positive turns the order of scores around, which the kernels' running maximum
// cannot follow.
bool runs_on_sm90([[maybe_unused]] const at::Tensor& q, [[maybe_unused]] double softmax_scale) {
#ifdef DISTCA_WITH_SM90
  return softmax_scale > 0 && sm90::supports(q);
#else
  return false;
#endif
}

#ifdef DISTCA_WITH_CUDA
bool runs_on_aten(const at::Tensor& q, double softmax_scale) {
  return q.is_cuda() && !runs_on_sm90(q, softmax_scale);
}
#endif

[[noreturn]] void throw_unsupported(const at::Device& device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !device.is_cuda(), "q is on ", device,
      ", but distca was built without CUDA. Build it again where nvcc is found: "
      "`pip install --no-build-isolation .`, or with FORCE_CUDA=1 and CUDA_HOME set");
  TORCH_CHECK_NOT_IMPLEMENTED(false, "q is on ", device, "; attention runs on cpu and cuda");
}

// Results of the forward pass that the backward pass is given: `out` or `delta`, and `lse`.
void check_saved(const Saved& saved, const at::Tensor& q) {
  const auto dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto check_by_head = [&](const char* name, const at::Tensor& x) {
    TORCH_CHECK_VALUE(x.dim() == 2 && x.size(0) == q.size(0) && x.size(1) == q.size(1), name,
                      " has shape ", x.sizes(), "; expected [", q.size(0), ", ", q.size(1), "]");
    TORCH_CHECK_VALUE(x.scalar_type() == dtype && x.device() == q.device(), name, " is ",
                      x.scalar_type(), " on ", x.device(), "; expected ", dtype, " on ",
                      q.device());
  };
  check_by_head("lse", saved.lse);
  if (saved.delta.defined()) check_by_head("delta", saved.delta);
  if (!saved.out.defined()) return;
  check_rows("out", saved.out, q);
  TORCH_CHECK_VALUE(saved.out.sizes() == q.sizes(), "out has shape ", saved.out.sizes(), ", q has ",
                    q.sizes(), "; they must be equal");
}

void check_gradient(const at::Tensor& grad_out, const Saved& saved, const at::Tensor& q) {
  TORCH_CHECK_VALUE(grad_out.sizes() == q.sizes(), "grad_out has shape ", grad_out.sizes(),
                    ", q has ", q.sizes(), "; they must be equal");
  check_rows("grad_out", grad_out, q);
  check_saved(saved, q);
}

}  // namespace

bool runs_own_kernels(const at::Tensor& q) {
#ifdef DISTCA_WITH_SM90
  if (sm90::supports(q)) return true;
#endif
  return q.is_cpu();
}

bool works_in_place(const at::Tensor& q, double softmax_scale) {
  return runs_on_sm90(q, softmax_scale);
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const TaskList& tasks,
                                           const Params& params) {
  check_inputs(q, k, v, tasks);
#ifdef DISTCA_WITH_CUDA
  if (runs_on_aten(q, params.softmax_scale)) return aten::forward(q, k, v, tasks, params);
#endif
  const auto [out, lse] = new_results(q);
  forward({q, k, v, tasks, out, lse}, params);
  return {out, lse};
}

void forward(const ForwardRows& rows, const Params& params) {
  check_inputs(rows.q, rows.k, rows.v, rows.tasks);
  if (rows.q.is_cpu()) return cpu::forward(rows, params);
#ifdef DISTCA_WITH_SM90
  if (runs_on_sm90(rows.q, params.softmax_scale)) return sm90::forward(rows, params);
#endif
#ifdef DISTCA_WITH_CUDA
  if (rows.q.is_cuda()) return aten::forward(rows, params);
#endif
  throw_unsupported(rows.q.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out,
                                                        const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, const Saved& saved,
                                                        const TaskList& tasks,
                                                        const Params& params) {
  // Autograd hands down expanded gradients, whose last dimension has stride 0.
  const at::Tensor grad =
      grad_out.dim() != 3 || grad_out.stride(2) == 1 ? grad_out : grad_out.contiguous();
  check_inputs(q, k, v, tasks);
#ifdef DISTCA_WITH_CUDA
  if (runs_on_aten(q, params.softmax_scale)) {
    check_gradient(grad, saved, q);
    return aten::backward(grad, q, k, v, saved, tasks, params);
  }
#endif
  const at::Tensor dq = at::empty(q.sizes(), q.options());
  const auto [dk, dv] = new_key_gradients(k, {&tasks});
  backward({grad, q, k, v, saved, tasks, dq, dk, dv}, params);
  return {dq, dk, dv};
}

void backward(const BackwardRows& rows, const Params& params) {
  check_inputs(rows.q, rows.k, rows.v, rows.tasks);
  check_gradient(rows.grad_out, rows.saved, rows.q);
  if (rows.q.is_cpu()) {
    BackwardRows with_delta = rows;
    if (!rows.saved.delta.defined()) {
      with_delta.saved.delta = row_dots(rows.saved.out.contiguous(), rows.grad_out.contiguous());
    }
    return cpu::backward(with_delta, params);
  }
#ifdef DISTCA_WITH_SM90
  if (runs_on_sm90(rows.q, params.softmax_scale)) return sm90::backward(rows, params);
#endif
#ifdef DISTCA_WITH_CUDA
  if (rows.q.is_cuda()) return aten::backward(rows, params);
#endif
  throw_unsupported(rows.q.device());
}

std::tuple<at::Tensor, at::Tensor> new_results(const at::Tensor& q) {
  const auto real = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::empty(q.sizes(), q.options()),
          at::empty(q.sizes().slice(0, 2), q.options().dtype(real))};
}

bool writes_all_keys([[maybe_unused]] const at::Tensor& k,
                     [[maybe_unused]] std::initializer_list<const TaskList*> lists) {
#ifdef DISTCA_WITH_SM90
  return sm90::supports(k) && sm90::write_all_keys(k, lists);
#else
  return false;
#endif
}

std::pair<at::Tensor, at::Tensor> new_key_gradients(const at::Tensor& k,
                                                    std::initializer_list<const TaskList*> lists) {
  if (writes_all_keys(k, lists)) {
    return {at::empty(k.sizes(), k.options()), at::empty(k.sizes(), k.options())};
  }
  return {at::zeros(k.sizes(), k.options()), at::zeros(k.sizes(), k.options())};
}

}  // namespace distca::attention
