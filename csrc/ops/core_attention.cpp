#include "core_attention.h"

#include "attention/delta.h"
#include "checks.h"
#include "movement.h"

namespace distca::ops {
namespace {

using Forward = std::tuple<at::Tensor, at::Tensor>;
using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Forward balanced_forward(const Call& call, const attention::Params& params) {
  Session& session = *call.session;
  const Layout& plan = call.layout;
  const auto& [q, k, v] = call.inputs;
  const transport::Where where = session.enter(Pass::kForward);
  Shipment queries = send_to_servers(session, where.in("dispatch"), {q}, plan.queries);
  Shipment keys = send_to_servers(session, where.in("dispatch"), {k, v}, plan.keys);
  // Home tasks are computed while visiting rows travel.
  auto [out, lse] = attention::forward(q, k, v, plan.home, params);

  const auto visiting_q = visiting_rows(std::move(queries), plan.queries);
  const auto visiting_kv = visiting_rows(std::move(keys), plan.keys);
  const auto [visiting_out, visiting_lse] =
      attention::forward(visiting_q[0], visiting_kv[0], visiting_kv[1], plan.visiting, params);
  Shipment results =
      send_home(session, where.in("combine"), {visiting_out, visiting_lse}, plan.queries);
  const auto home_results = results.arrive();
  transport::scatter_rows(home_results[0], plan.queries.home_row, out);
  transport::scatter_rows(home_results[1], plan.queries.home_row, lse);
  return {out, lse};
}

Backward balanced_backward(const Call& call, const at::Tensor& grad_out, const at::Tensor& out,
                           const at::Tensor& lse, const attention::Params& params) {
  Session& session = *call.session;
  const Layout& plan = call.layout;
  const auto& [q, k, v] = call.inputs;
  const transport::Where where = session.enter(Pass::kBackward);
  // Formed at home, so that `out` never travels.
  const at::Tensor delta = attention::row_dots(out, grad_out);
  Shipment queries =
      send_to_servers(session, where.in("dispatch"), {q, grad_out, lse, delta}, plan.queries);
  Shipment keys = send_to_servers(session, where.in("dispatch"), {k, v}, plan.keys);
  auto [dq, dk, dv] = attention::backward(grad_out, q, k, v, {lse, delta, out}, plan.home, params);

  const auto visiting_q = visiting_rows(std::move(queries), plan.queries);
  const auto visiting_kv = visiting_rows(std::move(keys), plan.keys);
  const attention::Saved visiting_saved{visiting_q[2], visiting_q[3], at::Tensor()};
  const auto [visiting_dq, visiting_dk, visiting_dv] =
      attention::backward(visiting_q[1], visiting_q[0], visiting_kv[0], visiting_kv[1],
                          visiting_saved, plan.visiting, params);
  Shipment home_queries = send_home(session, where.in("combine"), {visiting_dq}, plan.queries);
  Shipment home_keys =
      send_home(session, where.in("combine"), {visiting_dk, visiting_dv}, plan.keys);
  transport::scatter_rows(home_queries.arrive()[0], plan.queries.home_row, dq);
  const auto key_gradients = home_keys.arrive();
  transport::reduce_rows(key_gradients[0], plan.key_gradients, dk);
  transport::reduce_rows(key_gradients[1], plan.key_gradients, dv);
  return {dq, dk, dv};
}

}  // namespace

Forward core_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& layout, const at::Tensor& rows, double softmax_scale,
                       c10::string_view group_name) {
  const Call call = begin_call(q, k, v, layout, rows, softmax_scale, std::string(group_name));
  const attention::Params params{call.layout.mask, softmax_scale};
  if (!call.session) {
    return attention::forward(call.inputs.q, call.inputs.k, call.inputs.v, call.layout.home,
                              params);
  }
  return announcing(*call.session, [&] { return balanced_forward(call, params); });
}

Backward core_attention_backward(const at::Tensor& grad_out, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                 const at::Tensor& lse, const at::Tensor& layout,
                                 const at::Tensor& rows, double softmax_scale,
                                 c10::string_view group_name) {
  const Call call = begin_call(q, k, v, layout, rows, softmax_scale, std::string(group_name));
  const attention::Params params{call.layout.mask, softmax_scale};
  const at::Tensor grad = grad_out.contiguous();
  if (!call.session) {
    return attention::backward(grad, call.inputs.q, call.inputs.k, call.inputs.v,
                               {lse, at::Tensor(), out}, call.layout.home, params);
  }
  return announcing(*call.session, [&] { return balanced_backward(call, grad, out, lse, params); });
}

}  // namespace distca::ops
