#include "core_attention.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "attention/delta.h"
#include "checks.h"
#include "keeping.h"
#include "movement.h"
#ifdef DISTCA_WITH_SM90
#include "peer_attention.h"
#endif

namespace distca::ops {
namespace {

using Results = std::tuple<at::Tensor, at::Tensor>;                // out, lse
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dq, dk, dv

void forward_round(const Call& call, const Round& round, const Results& results,
                   const VisitingInputs& kept, const attention::Params& params) {
  Session& session = *call.session;
  const auto& [q, k, v] = call.inputs;
  const auto& [out, lse] = results;
  Shipment inputs = send_to_servers(session, call.where.in(kDispatch),
                                    {{{q}, round.queries}, {{k, v}, round.keys}});
  const attention::ForwardRows early{q, k, v, round.early, out, lse};
  in_phase(call, kEarlyTasks, [&] { attention::forward(early, params); });

  const auto visiting = inputs.arrive_for_tasks();
  const auto [visiting_out, visiting_lse] = in_phase(call, kVisitingTasks, [&] {
    return attention::forward(visiting[0][0], visiting[1][0], visiting[1][1], round.visiting,
                              params);
  });
  Shipment sent =
      send_home(session, call.where.in(kCombine), {{{visiting_out, visiting_lse}, round.queries}});
  keep(round, {visiting[0][0], visiting[1][0], visiting[1][1]}, kept);
  const attention::ForwardRows late{q, k, v, round.late, out, lse};
  in_phase(call, kLateTasks, [&] { attention::forward(late, params); });

  const auto arrived = sent.arrive();
  transport::scatter_rows(arrived[0][0], round.queries.home_row, out, arrived[0].seals);
  transport::scatter_rows(arrived[0][1], round.queries.home_row, lse, arrived[0].seals);
}

Results balanced_forward(const Call& call, const Kept& kept, const attention::Params& params) {
  const Results results = attention::new_results(call.inputs.q);
  const std::vector<Round>& rounds = call.layout.rounds;
  for (size_t i = 0; i < rounds.size(); ++i) {
    forward_round(call, rounds[i], results, kept.rounds[i], params);
  }
  return results;
}

void backward_round(const Call& call, const Round& round, const at::Tensor& grad_out,
                    const attention::Saved& saved, const VisitingInputs& kept,
                    const Gradients& gradients, const attention::Params& params) {
  Session& session = *call.session;
  const auto& [q, k, v] = call.inputs;
  const auto& [dq, dk, dv] = gradients;
  Shipment inputs = send_to_servers(session, call.where.in(kDispatch),
                                    {{{grad_out, saved.lse, saved.delta}, round.queries},
                                     {{q}, queries_again(round)},
                                     {{k, v}, keys_again(round)}});
  const attention::BackwardRows early{grad_out, q, k, v, saved, round.early, dq, dk, dv};
  in_phase(call, kEarlyTasks, [&] { attention::backward(early, params); });

  const auto visiting = inputs.arrive_for_tasks();
  const auto& of_grad = visiting[0];
  const auto [visiting_dq, visiting_dk, visiting_dv] = in_phase(call, kVisitingTasks, [&] {
    const auto [visiting_q, visiting_k, visiting_v] =
        whole(round, kept, {visiting[1][0], visiting[2][0], visiting[2][1]});
    return attention::backward(of_grad[0], visiting_q, visiting_k, visiting_v,
                               {of_grad[1], of_grad[2], at::Tensor()}, round.visiting, params);
  });
  Shipment sent =
      send_home(session, call.where.in(kCombine),
                {{{visiting_dq}, round.queries}, {{visiting_dk, visiting_dv}, round.keys}});
  const attention::BackwardRows late{grad_out, q, k, v, saved, round.late, dq, dk, dv};
  in_phase(call, kLateTasks, [&] { attention::backward(late, params); });

  const auto arrived = sent.arrive();
  transport::scatter_rows(arrived[0][0], round.queries.home_row, dq, arrived[0].seals);
  transport::reduce_rows(arrived[1][0], round.key_gradients, dk, arrived[1].seals);
  transport::reduce_rows(arrived[1][1], round.key_gradients, dv, arrived[1].seals);
}

Gradients balanced_backward(const Call& call, const at::Tensor& grad_out, const at::Tensor& out,
                            const at::Tensor& lse, const Kept& kept,
                            const attention::Params& params) {
  const auto& [q, k, v] = call.inputs;
  // Formed at home, so that `out` never travels.
  const attention::Saved saved{lse, attention::row_dots(out, grad_out), out};
  const Round& first = call.layout.rounds[0];  // it has all home tasks
  const auto [dk, dv] = attention::new_key_gradients(k, {&first.early, &first.late});
  const Gradients gradients{at::empty(q.sizes(), q.options()), dk, dv};
  const std::vector<Round>& rounds = call.layout.rounds;
  for (size_t i = 0; i < rounds.size(); ++i) {
    backward_round(call, rounds[i], grad_out, saved, kept.rounds[i], gradients, params);
  }
  return gradients;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> core_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& layout,
    const at::Tensor& rows, double softmax_scale, c10::string_view group_name,
    int64_t num_kept_queries, int64_t num_kept_keys, int64_t caller) {
  const c10::DeviceGuard guard(q.device());
  check_no_capture(q);
  const Call call = begin_call(Pass::kForward, q, k, v, layout, rows, softmax_scale,
                               std::string(group_name), caller);
  const attention::Params params = attention_params(call.layout, softmax_scale);
  const Range range(*call.timeline, call.where.in(kAttention), q.device());
  if (!call.session) {
    const auto& [home_q, home_k, home_v] = call.inputs;
    const Kept nothing = new_kept(call, num_kept_queries, num_kept_keys);
    return std::tuple_cat(
        attention::forward(home_q, home_k, home_v, call.layout.rounds[0].early, params),
        std::tuple(nothing.elements));
  }
  return announcing(*call.session, [&] {
    const Kept kept = new_kept(call, num_kept_queries, num_kept_keys);
#ifdef DISTCA_WITH_SM90
    if (uses_peer_memory(call, softmax_scale)) {
      return std::tuple_cat(peer_forward(call, kept, params), std::tuple(kept.elements));
    }
#endif
    return std::tuple_cat(balanced_forward(call, kept, params), std::tuple(kept.elements));
  });
}

Gradients core_attention_backward(const at::Tensor& grad_out, const at::Tensor& q,
                                  const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                  const at::Tensor& lse, const at::Tensor& layout,
                                  const at::Tensor& rows, double softmax_scale,
                                  c10::string_view group_name,
                                  const std::optional<at::Tensor>& kept, int64_t caller) {
  const c10::DeviceGuard guard(q.device());
  check_no_capture(q);
  const Call call = begin_call(Pass::kBackward, q, k, v, layout, rows, softmax_scale,
                               std::string(group_name), caller);
  const attention::Params params = attention_params(call.layout, softmax_scale);
  const at::Tensor elements = kept.value_or(at::empty({0}, q.options()));
  const Range range(*call.timeline, call.where.in(kAttention), q.device());
  if (!call.session) {
    const auto& [home_q, home_k, home_v] = call.inputs;
    check_saved(grad_out, out, lse, q);
    kept_of(call, elements);
    return attention::backward(grad_out.contiguous(), home_q, home_k, home_v,
                               {lse, at::Tensor(), out}, call.layout.rounds[0].early, params);
  }
  return announcing(*call.session, [&] {
    check_saved(grad_out, out, lse, q);
    const Kept inputs = kept_of(call, elements);
    const at::Tensor grad = grad_out.contiguous();
#ifdef DISTCA_WITH_SM90
    if (uses_peer_memory(call, softmax_scale)) {
      return peer_backward(call, grad, out.contiguous(), lse.contiguous(), inputs, params);
    }
#endif
    return balanced_backward(call, grad, out.contiguous(), lse.contiguous(), inputs, params);
  });
}

void exchange(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
              const at::Tensor& layout, const at::Tensor& rows, c10::string_view group_name) {
  const c10::DeviceGuard guard(q.device());
  check_no_capture(q);
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
