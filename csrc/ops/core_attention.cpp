#include "core_attention.h"

#include <c10/core/DeviceGuard.h>

#include "attention/delta.h"
#include "checks.h"
#include "movement.h"
#ifdef DISTCA_WITH_SM90
#include "peer_attention.h"
#endif

namespace distca::ops {
namespace {

using Forward = std::tuple<at::Tensor, at::Tensor>;
using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Forward balanced_forward(const Call& call, const attention::Params& params) {
  Session& session = *call.session;
  const Layout& plan = call.layout;
  const auto& [q, k, v] = call.inputs;
  Shipment inputs = send_to_servers(session, call.where.in(kDispatch),
                                    {{{q}, plan.queries}, {{k, v}, plan.keys}});
  auto [out, lse] =
      in_phase(call, kEarlyTasks, [&] { return attention::forward(q, k, v, plan.early, params); });

  const auto visiting = inputs.arrive_visiting();
  const auto [visiting_out, visiting_lse] = in_phase(call, kVisitingTasks, [&] {
    return attention::forward(visiting[0][0], visiting[1][0], visiting[1][1], plan.visiting,
                              params);
  });
  Shipment sent =
      send_home(session, call.where.in(kCombine), {{{visiting_out, visiting_lse}, plan.queries}});
  in_phase(call, kLateTasks, [&, &out = out, &lse = lse] {
    attention::forward({q, k, v, plan.late, out, lse}, params);
  });

  const auto results = sent.arrive();
  transport::scatter_rows(results[0][0], plan.queries.home_row, out);
  transport::scatter_rows(results[0][1], plan.queries.home_row, lse);
  return {out, lse};
}

Backward balanced_backward(const Call& call, const at::Tensor& grad_out, const at::Tensor& out,
                           const at::Tensor& lse, const attention::Params& params) {
  Session& session = *call.session;
  const Layout& plan = call.layout;
  const auto& [q, k, v] = call.inputs;
  // Formed at home, so that `out` never travels.
  const at::Tensor delta = attention::row_dots(out, grad_out);
  Shipment inputs =
      send_to_servers(session, call.where.in(kDispatch),
                      {{{q, grad_out, lse, delta}, plan.queries}, {{k, v}, plan.keys}});
  const attention::Saved saved{lse, delta, out};
  auto [dq, dk, dv] = in_phase(call, kEarlyTasks, [&] {
    return attention::backward(grad_out, q, k, v, saved, plan.early, params);
  });

  const auto visiting = inputs.arrive_visiting();
  const auto& visiting_q = visiting[0];
  const auto [visiting_dq, visiting_dk, visiting_dv] = in_phase(call, kVisitingTasks, [&] {
    return attention::backward(visiting_q[1], visiting_q[0], visiting[1][0], visiting[1][1],
                               {visiting_q[2], visiting_q[3], at::Tensor()}, plan.visiting, params);
  });
  Shipment sent =
      send_home(session, call.where.in(kCombine),
                {{{visiting_dq}, plan.queries}, {{visiting_dk, visiting_dv}, plan.keys}});
  in_phase(call, kLateTasks, [&, &dq = dq, &dk = dk, &dv = dv] {
    attention::backward({grad_out, q, k, v, saved, plan.late, dq, dk, dv}, params);
  });

  const auto grads = sent.arrive();
  transport::scatter_rows(grads[0][0], plan.queries.home_row, dq);
  transport::reduce_rows(grads[1][0], plan.key_gradients, dk);
  transport::reduce_rows(grads[1][1], plan.key_gradients, dv);
  return {dq, dk, dv};
}

}  // namespace

Forward core_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& layout, const at::Tensor& rows, double softmax_scale,
                       c10::string_view group_name) {
  const c10::DeviceGuard guard(q.device());
  const Call call =
      begin_call(Pass::kForward, q, k, v, layout, rows, softmax_scale, std::string(group_name));
  const attention::Params params = attention_params(call.layout, softmax_scale);
  const Range range(*call.timeline, call.where.in(kAttention), q.device());
  if (!call.session) {
    const auto& [home_q, home_k, home_v] = call.inputs;
    return attention::forward(home_q, home_k, home_v, call.layout.early, params);
  }
  return announcing(*call.session, [&] {
#ifdef DISTCA_WITH_SM90
    if (uses_peer_memory(call, softmax_scale)) return peer_forward(call, params);
#endif
    return balanced_forward(call, params);
  });
}

Backward core_attention_backward(const at::Tensor& grad_out, const at::Tensor& q,
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
                               call.layout.early, params);
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
    send_to_servers(*call.session, call.where.in(kDispatch),
                    {{{home_q}, call.layout.queries}, {{home_k, home_v}, call.layout.keys}})
        .arrive_visiting();
  });
}

}  // namespace distca::ops
