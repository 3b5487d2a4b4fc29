#include "attend.h"

#include <c10/core/DeviceGuard.h>

#include "checks.h"

namespace distca::ops {
namespace {

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

}  // namespace

std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const at::Tensor& layout,
                                          const at::Tensor& rows, double softmax_scale,
                                          c10::string_view tasks) {
  const c10::DeviceGuard guard(q.device());
  check_no_capture(q);
  const std::shared_ptr<const Layout> plan = shared_layout(layout, rows);
  check_task_rows(q, k, v, *plan, rows, is_home(tasks));
  const Round& round = plan->rounds[0];
  const attention::Params params = attention_params(*plan, softmax_scale);
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
  check_saved(grad_out, out, lse, q);
  const Round& round = plan->rounds[0];
  const attention::Params params = attention_params(*plan, softmax_scale);
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

}  // namespace distca::ops
