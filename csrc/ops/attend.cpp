#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "checks.h"

namespace distca::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

bool is_home(c10::string_view tasks) {
  TORCH_CHECK_VALUE(tasks == "home" || tasks == "visiting", "tasks is '", tasks,
                    "'; expected 'home' or 'visiting'");
  return tasks == "home";
}

// Returns the layout's only round: attend needs all rows of a task list at once.
const Round& only_round(const Layout& layout) {
  TORCH_CHECK_VALUE(layout.rounds.size() == 1, "layout: ", layout.rounds.size(),
                    " rounds; attend takes one. Call core_attention, or set rounds to 1");
  return layout.rounds[0];
}

// Zeroes home rows that servers compute: they have no home task, so no kernel wrote them.
void zero_sent_rows(const at::Tensor& home, const Round& round) {
  home.index_fill_(0, round.routes.queries.home_row.to(at::kLong), 0);
}

// Checks that q, k and v are the rows of the layout's home tasks, or of its visiting tasks.
void check_task_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const Layout& plan, const at::Tensor& rows, bool are_home) {
  const Round& round = only_round(plan);
  const int64_t num_keys = are_home ? plan.num_home_rows : round.routes.keys.num_visiting;
  check_layout_rows(q, "q", are_home ? plan.num_home_queries() : round.routes.queries.num_visiting,
                    rows);
  check_layout_rows(k, "k", num_keys, rows);
  check_layout_rows(v, "v", num_keys, rows);
}

// Computes one task list without communication, for calibration. Rows outside all tasks are zero.
// `tasks`, "home" or "visiting", names the layout's task list.
std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const at::Tensor& layout,
                                          const at::Tensor& rows, double softmax_scale,
                                          c10::string_view tasks) {
  const c10::DeviceGuard guard(q.device());
  check_no_capture(q);
  const std::shared_ptr<const Layout> plan = shared_layout(layout, rows);
  check_task_rows(q, k, v, *plan, rows, is_home(tasks));
  const Round& round = plan->rounds[0];
  const attention::Params params = attention_params(*plan, {softmax_scale});
  const at::Tensor rows_q = with_contiguous_rows(q), rows_k = with_contiguous_rows(k),
                   rows_v = with_contiguous_rows(v);
  if (!is_home(tasks)) return attention::forward(rows_q, rows_k, rows_v, round.visiting, params);
  auto [out, lse] = attention::forward(rows_q, rows_k, rows_v, round.early, params);
  attention::forward({rows_q, rows_k, rows_v, round.late, out, lse}, params);
  zero_sent_rows(out, round);
  zero_sent_rows(lse, round);
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& layout, const at::Tensor& rows,
    double softmax_scale, c10::string_view tasks) {
  const c10::DeviceGuard guard(grad_out.device());
  check_no_capture(grad_out);
  const std::shared_ptr<const Layout> plan = shared_layout(layout, rows);
  check_task_rows(q, k, v, *plan, rows, is_home(tasks));
  check_saved(grad_out, out, lse, q, v);
  const Round& round = plan->rounds[0];
  const attention::Params params = attention_params(*plan, {softmax_scale});
  const attention::Saved saved{lse, at::Tensor(), out};
  const at::Tensor grad = grad_out.contiguous(), rows_q = with_contiguous_rows(q),
                   rows_k = with_contiguous_rows(k), rows_v = with_contiguous_rows(v);
  if (!is_home(tasks)) {
    return attention::backward(grad, rows_q, rows_k, rows_v, saved, round.visiting, params);
  }
  auto [dq, dk, dv] = attention::backward(grad, rows_q, rows_k, rows_v, saved, round.early, params);
  attention::backward({grad, rows_q, rows_k, rows_v, saved, round.late, dq, dk, dv}, params);
  zero_sent_rows(dq, round);
  return {dq, dk, dv};
}

class Attend : public torch::autograd::Function<Attend> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& q, const Variable& k,
                               const Variable& v, const Variable& layout, const Variable& rows,
                               double softmax_scale, const std::string& tasks) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = operator_of<decltype(attend)>("distca::attend");
    auto [out, lse] = op.call(q, k, v, layout, rows, softmax_scale, c10::string_view(tasks));
    ctx->save_for_backward({q, k, v, out, lse, layout, rows});
    ctx->mark_non_differentiable({lse});
    ctx->saved_data["softmax_scale"] = softmax_scale;
    ctx->saved_data["tasks"] = tasks;
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const std::string tasks = ctx->saved_data["tasks"].toStringRef();
    static const auto op = operator_of<decltype(attend_backward)>("distca::attend_backward");
    auto [dq, dk, dv] =
        op.call(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6],
                ctx->saved_data["softmax_scale"].toDouble(), c10::string_view(tasks));
    return {dq, dk, dv, Variable(), Variable(), Variable(), Variable()};
  }
};

std::tuple<at::Tensor, at::Tensor> attend_autograd(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& v, const at::Tensor& layout,
                                                   const at::Tensor& rows, double softmax_scale,
                                                   c10::string_view tasks) {
  auto results = Attend::apply(q, k, v, layout, rows, softmax_scale, std::string(tasks));
  return {results[0], results[1]};
}

void bind_attend(torch::Library& m) {
  m.impl("attend", attend);
  m.impl("attend_backward", attend_backward);
}

}  // namespace
}  // namespace distca::ops

TORCH_LIBRARY_IMPL(distca, CPU, m) {
  distca::ops::bind_attend(m);
}

// Also in a library without CUDA, so that a CUDA tensor gets distca's error and not the
// dispatcher's.
TORCH_LIBRARY_IMPL(distca, CUDA, m) {
  distca::ops::bind_attend(m);
}

TORCH_LIBRARY_IMPL(distca, Autograd, m) {
  m.impl("attend", distca::ops::attend_autograd);
  m.impl("attend_backward", torch::autograd::autogradNotImplementedFallback());
}
