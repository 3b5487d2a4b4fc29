#include "steps.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "checks.h"
#include "movement.h"

namespace distca::ops {
namespace {

constexpr int64_t kUnknownCaller = -1;

bool is_home(c10::string_view tasks) {
  TORCH_CHECK_VALUE(tasks == "home" || tasks == "visiting", "tasks is '", tasks,
                    "'; expected 'home' or 'visiting'");
  return tasks == "home";
}

// A plan of steps that users call one by one, whose rows all stand on the servers at once.
const Round& only_round(const Layout& layout) {
  TORCH_CHECK_VALUE(layout.rounds.size() == 1, "layout: ", layout.rounds.size(),
                    " rounds; dispatch, attend and combine take one. Call core_attention, or set "
                    "rounds to 1");
  return layout.rounds[0];
}

// Home rows that a server computes have no home task, so no kernel wrote them.
void zero_sent_rows(const at::Tensor& home, const Round& round) {
  home.index_fill_(0, round.queries.home_row.to(at::kLong), 0);
}

at::Tensor zeros_like_rows(const at::Tensor& visiting, int64_t num_rows) {
  return at::zeros({num_rows, visiting.size(1), visiting.size(2)}, visiting.options());
}

at::Tensor no_rows(const at::Tensor& home) {
  return home.narrow(0, 0, 0).clone();
}

// A step of a plan of one round, whose ranks agreed when its dispatch began.
struct Step {
  Layout layout;
  std::shared_ptr<Session> session;  // null when no rank moves rows
};

// Decodes and checks on this rank. A refusal reaches the other ranks, which wait for rows.
template <typename F>
Step begin_step(const at::Tensor& layout, const at::Tensor& rows, c10::string_view group_name,
                F&& check) {
  Step step;
  if (!group_name.empty()) step.session = find_session(std::string(group_name));
  try {
    step.layout = decode_layout(layout, rows);
    check(step.layout, only_round(step.layout));
  } catch (const std::exception& error) {
    const bool others_wait = step.layout.rounds.empty() || step.layout.moves_rows;
    if (step.session && others_wait) {
      step.session->failures().announce(transport::message_of(error));
    }
    throw;
  }
  TORCH_CHECK_VALUE(step.session || !step.layout.moves_rows,
                    "group_name is empty, but the layout is one of ", step.layout.num_ranks,
                    " ranks; pass the plan's group_name");
  if (!step.layout.moves_rows) step.session.reset();
  return step;
}

// q, k and v are those of the layout's home tasks, or of its visiting ones.
void check_task_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const Layout& plan, const at::Tensor& rows, bool are_home) {
  const Round& round = only_round(plan);
  const int64_t num_keys = are_home ? plan.num_home_rows : round.keys.num_visiting;
  check_layout_rows(q, "q", are_home ? plan.num_home_queries() : round.queries.num_visiting, rows);
  check_layout_rows(k, "k", num_keys, rows);
  check_layout_rows(v, "v", num_keys, rows);
}

}  // namespace

Triple dispatch(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const at::Tensor& layout, const at::Tensor& rows, c10::string_view group_name) {
  const c10::DeviceGuard guard(q.device());
  check_no_capture(q);
  const double no_scale = 0;
  const Call call =
      begin_call(Pass::kForward, q, k, v, layout, rows, no_scale, std::string(group_name));
  const auto& [home_q, home_k, home_v] = call.inputs;
  if (!call.session) return {no_rows(q), no_rows(k), no_rows(v)};
  const Round& round = only_round(call.layout);
  Session& session = *call.session;
  return announcing(session, [&]() -> Triple {
    Shipment inputs = send_to_servers(session, call.where.in(kDispatch),
                                      {{{home_q}, round.queries}, {{home_k, home_v}, round.keys}});
    const auto visiting = inputs.arrive_for_tasks();
    // Parts of one record; with at most one row contiguous() would leave them sharing memory.
    const auto own = [](const at::Tensor& part) {
      return part.clone(at::MemoryFormat::Contiguous);
    };
    return {own(visiting[0][0]), own(visiting[1][0]), own(visiting[1][1])};
  });
}

Triple dispatch_backward(const at::Tensor& visiting_grad_q, const at::Tensor& visiting_grad_k,
                         const at::Tensor& visiting_grad_v, const at::Tensor& layout,
                         const at::Tensor& rows, c10::string_view group_name) {
  const c10::DeviceGuard guard(visiting_grad_q.device());
  check_no_capture(visiting_grad_q);
  const auto check = [&](const Layout&, const Round& round) {
    check_layout_rows(visiting_grad_q, "visiting_grad_q", round.queries.num_visiting, rows);
    check_layout_rows(visiting_grad_k, "visiting_grad_k", round.keys.num_visiting, rows);
    const auto dtype = visiting_grad_q.scalar_type();
    const auto sizes = [&](int64_t heads) -> std::vector<int64_t> {
      return {round.keys.num_visiting, heads, visiting_grad_q.size(2)};
    };
    const int64_t heads_kv = visiting_grad_k.size(1);
    check_is(visiting_grad_k, "visiting_grad_k",
             {sizes(heads_kv), dtype, rows.device(), "with visiting_grad_q's dtype and head_dim"});
    check_is(visiting_grad_v, "visiting_grad_v",
             {sizes(heads_kv), dtype, rows.device(), "like visiting_grad_k"});
  };
  const Step step = begin_step(layout, rows, group_name, check);
  const Layout& plan = step.layout;
  const at::Tensor dq = zeros_like_rows(visiting_grad_q, plan.num_home_queries());
  const at::Tensor dk = zeros_like_rows(visiting_grad_k, plan.num_home_rows);
  const at::Tensor dv = zeros_like_rows(visiting_grad_v, plan.num_home_rows);
  if (!step.session) return {dq, dk, dv};
  Session& session = *step.session;
  return announcing(session, [&]() -> Triple {
    const Round& round = plan.rounds[0];
    const transport::Where where = session.current(Pass::kBackward).in(kCombine);
    const auto grads =
        send_home(session, where,
                  {{{with_contiguous_rows(visiting_grad_q)}, round.queries},
                   {{with_contiguous_rows(visiting_grad_k), with_contiguous_rows(visiting_grad_v)},
                    round.keys}})
            .arrive();
    transport::scatter_rows(grads[0][0], round.queries.home_row, dq, grads[0].seals);
    transport::reduce_rows(grads[1][0], round.key_gradients, dk, grads[1].seals);
    transport::reduce_rows(grads[1][1], round.key_gradients, dv, grads[1].seals);
    return {dq, dk, dv};
  });
}

Pair attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& layout,
            const at::Tensor& rows, double softmax_scale, c10::string_view tasks) {
  const c10::DeviceGuard guard(q.device());
  check_no_capture(q);
  const Layout plan = decode_layout(layout, rows);
  check_task_rows(q, k, v, plan, rows, is_home(tasks));
  const Round& round = plan.rounds[0];
  const attention::Params params = attention_params(plan, softmax_scale);
  const at::Tensor rows_q = with_contiguous_rows(q), rows_k = with_contiguous_rows(k),
                   rows_v = with_contiguous_rows(v);
  if (!is_home(tasks)) return attention::forward(rows_q, rows_k, rows_v, round.visiting, params);
  auto [out, lse] = attention::forward(rows_q, rows_k, rows_v, round.early, params);
  attention::forward({rows_q, rows_k, rows_v, round.late, out, lse}, params);
  zero_sent_rows(out, round);
  zero_sent_rows(lse, round);
  return {out, lse};
}

Triple attend_backward(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                       const at::Tensor& layout, const at::Tensor& rows, double softmax_scale,
                       c10::string_view tasks) {
  const c10::DeviceGuard guard(grad_out.device());
  check_no_capture(grad_out);
  const Layout plan = decode_layout(layout, rows);
  check_task_rows(q, k, v, plan, rows, is_home(tasks));
  check_saved(grad_out, out, lse, q);
  const Round& round = plan.rounds[0];
  const attention::Params params = attention_params(plan, softmax_scale);
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

Pair combine(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& visiting_out,
             const at::Tensor& visiting_lse, const at::Tensor& layout, const at::Tensor& rows,
             c10::string_view group_name) {
  const c10::DeviceGuard guard(out.device());
  check_no_capture(out);
  const auto check = [&](const Layout& plan, const Round& round) {
    check_layout_rows(out, "out", plan.num_home_queries(), rows);
    const int64_t num_visiting = round.queries.num_visiting, heads = out.size(1);
    const auto dtype = lse_dtype(out);
    check_is(lse, "lse", {{out.size(0), heads}, dtype, out.device(), "with out's rows and heads"});
    check_is(visiting_out, "visiting_out",
             {{num_visiting, heads, out.size(2)}, out.scalar_type(), out.device(), "like out"});
    check_is(visiting_lse, "visiting_lse",
             {{num_visiting, heads}, dtype, out.device(), "with visiting_out's rows and heads"});
  };
  const Step step = begin_step(layout, rows, group_name, check);
  at::Tensor all_out = out.clone(at::MemoryFormat::Contiguous);
  at::Tensor all_lse = lse.clone(at::MemoryFormat::Contiguous);
  if (!step.session) return {all_out, all_lse};
  Session& session = *step.session;
  return announcing(session, [&]() -> Pair {
    const Round& round = step.layout.rounds[0];
    const transport::Where where = session.current(Pass::kForward).in(kCombine);
    const auto results =
        send_home(
            session, where,
            {{{with_contiguous_rows(visiting_out), visiting_lse.contiguous()}, round.queries}})
            .arrive();
    transport::scatter_rows(results[0][0], round.queries.home_row, all_out, results[0].seals);
    transport::scatter_rows(results[0][1], round.queries.home_row, all_lse, results[0].seals);
    return {all_out, all_lse};
  });
}

Pair combine_backward(const at::Tensor& grad_out, const at::Tensor& layout, const at::Tensor& rows,
                      c10::string_view group_name) {
  const c10::DeviceGuard guard(grad_out.device());
  check_no_capture(grad_out);
  const auto check = [&](const Layout& plan, const Round&) {
    check_layout_rows(grad_out, "grad_out", plan.num_home_queries(), rows);
  };
  const Step step = begin_step(layout, rows, group_name, check);
  const Round& round = step.layout.rounds[0];
  const at::Tensor grad = grad_out.contiguous();
  at::Tensor home_grad = grad.clone();
  zero_sent_rows(home_grad, round);
  if (!step.session) return {home_grad, no_rows(grad)};
  Session& session = *step.session;
  return announcing(session, [&]() -> Pair {
    const transport::Where where =
        session.enter(Pass::kBackward, kUnknownCaller, true).in(kDispatch);
    Shipment grads = send_to_servers(session, where, {{{grad}, round.queries}});
    return {home_grad, grads.arrive_for_tasks()[0][0].contiguous()};
  });
}

}  // namespace distca::ops
