#include "core_attention.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "attention/delta.h"
#include "checks.h"
#include "movement.h"
#ifdef DISTCA_WITH_SM90
#include "peer_attention.h"
#endif

namespace distca::ops {
namespace {

using Results = std::tuple<at::Tensor, at::Tensor>;                // out, lse
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dq, dk, dv

void forward_round(const Call& call, const Round& round, const Results& results,
                   const attention::Params& params) {
  Session& session = *call.session;
  const auto& [q, k, v] = call.inputs;
  const auto& [out, lse] = results;
  Shipment inputs = send_to_servers(session, call.where.in(kDispatch),
                                    {{{q}, round.queries}, {{k, v}, round.keys}});
  const attention::ForwardRows early{q, k, v, round.early, out, lse};
  in_phase(call, kEarlyTasks, [&] { attention::forward(early, params); });

  const auto visiting = inputs.arrive_visiting();
  const auto [visiting_out, visiting_lse] = in_phase(call, kVisitingTasks, [&] {
    return attention::forward(visiting[0][0], visiting[1][0], visiting[1][1], round.visiting,
                              params);
  });
  Shipment sent =
      send_home(session, call.where.in(kCombine), {{{visiting_out, visiting_lse}, round.queries}});
  const attention::ForwardRows late{q, k, v, round.late, out, lse};
  in_phase(call, kLateTasks, [&] { attention::forward(late, params); });

  const auto arrived = sent.arrive();
  transport::scatter_rows(arrived[0][0], round.queries.home_row, out);
  transport::scatter_rows(arrived[0][1], round.queries.home_row, lse);
}

Results balanced_forward(const Call& call, const attention::Params& params) {
  const Results results = attention::new_results(call.inputs.q);
  for (const Round& round : call.layout.rounds) forward_round(call, round, results, params);
  return results;
}

void backward_round(const Call& call, const Round& round, const at::Tensor& grad_out,
                    const attention::Saved& saved, const Gradients& gradients,
                    const attention::Params& params) {
  Session& session = *call.session;
  const auto& [q, k, v] = call.inputs;
  const auto& [dq, dk, dv] = gradients;
  Shipment inputs = send_to_servers(
      session, call.where.in(kDispatch),
      {{{q, grad_out, saved.lse, saved.delta}, round.queries}, {{k, v}, round.keys}});
  const attention::BackwardRows early{grad_out, q, k, v, saved, round.early, dq, dk, dv};
  in_phase(call, kEarlyTasks, [&] { attention::backward(early, params); });

  const auto visiting = inputs.arrive_visiting();
  const auto& visiting_q = visiting[0];
  const auto [visiting_dq, visiting_dk, visiting_dv] = in_phase(call, kVisitingTasks, [&] {
    return attention::backward(visiting_q[1], visiting_q[0], visiting[1][0], visiting[1][1],
                               {visiting_q[2], visiting_q[3], at::Tensor()}, round.visiting,
                               params);
  });
  Shipment sent =
      send_home(session, call.where.in(kCombine),
                {{{visiting_dq}, round.queries}, {{visiting_dk, visiting_dv}, round.keys}});
  const attention::BackwardRows late{grad_out, q, k, v, saved, round.late, dq, dk, dv};
  in_phase(call, kLateTasks, [&] { attention::backward(late, params); });

  const auto arrived = sent.arrive();
  transport::scatter_rows(arrived[0][0], round.queries.home_row, dq);
  transport::reduce_rows(arrived[1][0], round.key_gradients, dk);
  transport::reduce_rows(arrived[1][1], round.key_gradients, dv);
}

Gradients balanced_backward(const Call& call, const at::Tensor& grad_out, const at::Tensor& out,
                            const at::Tensor& lse, const attention::Params& params) {
  const auto& [q, k, v] = call.inputs;
  // Formed at home, so that `out` never travels.
  const attention::Saved saved{lse, attention::row_dots(out, grad_out), out};
  const Round& first = call.layout.rounds[0];  // it has all home tasks
  const auto [dk, dv] = attention::new_key_gradients(k, {&first.early, &first.late});
  const Gradients gradients{at::empty(q.sizes(), q.options()), dk, dv};
  for (const Round& round : call.layout.rounds) {
    backward_round(call, round, grad_out, saved, gradients, params);
  }
  return gradients;
}

}  // namespace

Results core_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& layout, const at::Tensor& rows, double softmax_scale,
                       c10::string_view group_name) {
  const c10::DeviceGuard guard(q.device());
  const Call call =
      begin_call(Pass::kForward, q, k, v, layout, rows, softmax_scale, std::string(group_name));
  const attention::Params params = attention_params(call.layout, softmax_scale);
  const Range range(*call.timeline, call.where.in(kAttention), q.device());
  if (!call.session) {
    const auto& [home_q, home_k, home_v] = call.inputs;
    return attention::forward(home_q, home_k, home_v, call.layout.rounds[0].early, params);
  }
  return announcing(*call.session, [&] {
#ifdef DISTCA_WITH_SM90
    if (uses_peer_memory(call, softmax_scale)) return peer_forward(call, params);
#endif
    return balanced_forward(call, params);
  });
}

Gradients core_attention_backward(const at::Tensor& grad_out, const at::Tensor& q,
                                  const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                  const at::Tensor& lse, const at::Tensor& layout,
                                  const at::Tensor& rows, double softmax_scale,
                                  c10::string_view group_name) {
  const c10::DeviceGuard guard(q.device());
  const Call call =
      begin_call(Pass::kBackward, q, k, v, layout, rows, softmax_scale, std::string(group_name));
  const attention::Params params = attention_params(call.layout, softmax_scale);
  const at::Tensor grad = grad_out.contiguous();
  const Range range(*call.timeline, call.where.in(kAttention), q.device());
  if (!call.session) {
    const auto& [home_q, home_k, home_v] = call.inputs;
    return attention::backward(grad, home_q, home_k, home_v, {lse, at::Tensor(), out},
                               call.layout.rounds[0].early, params);
  }
  return announcing(*call.session, [&] {
    check_saved_rows(grad, "grad_out", q);
    check_saved_rows(out, "out", q);
    check_saved_rows(lse, "lse", q);
#ifdef DISTCA_WITH_SM90
    if (uses_peer_memory(call, softmax_scale)) {
      return peer_backward(call, grad, out.contiguous(), lse.contiguous(), params);
    }
#endif
    return balanced_backward(call, grad, out.contiguous(), lse.contiguous(), params);
  });
}

void exchange(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
              const at::Tensor& layout, const at::Tensor& rows, c10::string_view group_name) {
  const c10::DeviceGuard guard(q.device());
  const double any_scale = 1;
  const Call call =
      begin_call(Pass::kForward, q, k, v, layout, rows, any_scale, std::string(group_name));
  if (!call.session) return;
  announcing(*call.session, [&] {
#ifdef DISTCA_WITH_SM90
    if (uses_peer_memory(call, any_scale)) return peer_exchange(call);
#endif
    const auto& [home_q, home_k, home_v] = call.inputs;
    for (const Round& round : call.layout.rounds) {
      send_to_servers(*call.session, call.where.in(kDispatch),
                      {{{home_q}, round.queries}, {{home_k, home_v}, round.keys}})
          .arrive_visiting();
    }
  });
}

}  // namespace distca::ops
