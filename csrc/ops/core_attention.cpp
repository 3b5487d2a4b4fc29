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

void forward_round(const Call& call, const Round& round, const transport::Where& where,
                   const Results& results, const attention::Params& params) {
  Session& session = *call.session;
  const auto& [q, k, v] = call.inputs;
  const auto& [out, lse] = results;
  Shipment inputs =
      send_to_servers(session, where.in("dispatch"), {{{q}, round.queries}, {{k, v}, round.keys}});
  attention::forward({q, k, v, round.early, out, lse}, params);

  const auto visiting = inputs.arrive_visiting();
  const auto [visiting_out, visiting_lse] =
      attention::forward(visiting[0][0], visiting[1][0], visiting[1][1], round.visiting, params);
  Shipment sent =
      send_home(session, where.in("combine"), {{{visiting_out, visiting_lse}, round.queries}});
  attention::forward({q, k, v, round.late, out, lse}, params);

  const auto arrived = sent.arrive();
  transport::scatter_rows(arrived[0][0], round.queries.home_row, out);
  transport::scatter_rows(arrived[0][1], round.queries.home_row, lse);
}

Results balanced_forward(const Call& call, const attention::Params& params) {
  const transport::Where where = call.session->enter(Pass::kForward);
  const Results results = attention::new_results(call.inputs.q);
  for (const Round& round : call.layout.rounds) forward_round(call, round, where, results, params);
  return results;
}

void backward_round(const Call& call, const Round& round, const transport::Where& where,
                    const at::Tensor& grad_out, const attention::Saved& saved,
                    const Gradients& gradients, const attention::Params& params) {
  Session& session = *call.session;
  const auto& [q, k, v] = call.inputs;
  const auto& [dq, dk, dv] = gradients;
  Shipment inputs = send_to_servers(
      session, where.in("dispatch"),
      {{{q, grad_out, saved.lse, saved.delta}, round.queries}, {{k, v}, round.keys}});
  attention::backward({grad_out, q, k, v, saved, round.early, dq, dk, dv}, params);

  const auto visiting = inputs.arrive_visiting();
  const auto& visiting_q = visiting[0];
  const auto [visiting_dq, visiting_dk, visiting_dv] =
      attention::backward(visiting_q[1], visiting_q[0], visiting[1][0], visiting[1][1],
                          {visiting_q[2], visiting_q[3], at::Tensor()}, round.visiting, params);
  Shipment sent =
      send_home(session, where.in("combine"),
                {{{visiting_dq}, round.queries}, {{visiting_dk, visiting_dv}, round.keys}});
  attention::backward({grad_out, q, k, v, saved, round.late, dq, dk, dv}, params);

  const auto arrived = sent.arrive();
  transport::scatter_rows(arrived[0][0], round.queries.home_row, dq);
  transport::reduce_rows(arrived[1][0], round.key_gradients, dk);
  transport::reduce_rows(arrived[1][1], round.key_gradients, dv);
}

Gradients balanced_backward(const Call& call, const at::Tensor& grad_out, const at::Tensor& out,
                            const at::Tensor& lse, const attention::Params& params) {
  const auto& [q, k, v] = call.inputs;
  const transport::Where where = call.session->enter(Pass::kBackward);
  // Formed at home, so that `out` never travels.
  const attention::Saved saved{lse, attention::row_dots(out, grad_out), out};
  const Round& first = call.layout.rounds[0];  // it has all home tasks
  const auto [dk, dv] = attention::new_key_gradients(k, {&first.early, &first.late});
  const Gradients gradients{at::empty(q.sizes(), q.options()), dk, dv};
  for (const Round& round : call.layout.rounds) {
    backward_round(call, round, where, grad_out, saved, gradients, params);
  }
  return gradients;
}

}  // namespace

Results core_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& layout, const at::Tensor& rows, double softmax_scale,
                       c10::string_view group_name) {
  const c10::DeviceGuard guard(q.device());
  const Call call = begin_call(q, k, v, layout, rows, softmax_scale, std::string(group_name));
  const attention::Params params = attention_params(call.layout, softmax_scale);
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
  const Call call = begin_call(q, k, v, layout, rows, softmax_scale, std::string(group_name));
  const attention::Params params = attention_params(call.layout, softmax_scale);
  const at::Tensor grad = grad_out.contiguous();
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
  const Call call = begin_call(q, k, v, layout, rows, any_scale, std::string(group_name));
  if (!call.session) return;
  announcing(*call.session, [&] {
#ifdef DISTCA_WITH_SM90
    if (uses_peer_memory(call, any_scale)) return peer_exchange(call);
#endif
    const auto& [home_q, home_k, home_v] = call.inputs;
    const transport::Where where = call.session->enter(Pass::kForward).in("dispatch");
    for (const Round& round : call.layout.rounds) {
      send_to_servers(*call.session, where,
                      {{{home_q}, round.queries}, {{home_k, home_v}, round.keys}})
          .arrive_visiting();
    }
  });
}

}  // namespace distca::ops
