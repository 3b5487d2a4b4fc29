#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"
#include "keeping.h"
#include "transport/head_part.h"

namespace distca::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using transport::HeadPart;
using Results = std::tuple<at::Tensor, at::Tensor>;                // out, lse
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dq, dk, dv

// Returns how the heads of a call are divided, the same on all ranks. Rows of the next part travel
// while visiting tasks of the current part run.
HeadParts parts_of(const Call& call) {
  const int64_t wanted = call.transport->takes_parts() ? call.layout->num_parts : 1;
  return divide_heads(call.inputs.q.size(1), call.inputs.k.size(1), wanted);
}

// On a server, the visiting key heads that several parts share.
class SharedKeys {
 public:
  // Adds k and v to the visiting rows of a part if they came with an earlier part.
  void complete(transport::Inputs& visiting) {
    if (visiting.k.defined()) keys_ = {{}, visiting.k, visiting.v};
    std::tie(visiting.k, visiting.v) = std::tie(keys_.k, keys_.v);
  }

  // Returns the tensors to which backward writes the gradients of a part's k and v.
  std::vector<at::Tensor> gradients(const HeadPart& part, const transport::Visiting& visiting) {
    if (!part.shares_keys()) return visiting.key_results;
    if (part.brings_keys()) of_part_ = {at::empty_like(keys_.k), at::empty_like(keys_.v)};
    return of_part_;
  }

  // Adds the gradients of a part to the sum over earlier parts. The last part rounds the sum.
  void add(const HeadPart& part, const transport::Visiting& visiting) {
    if (!part.shares_keys()) return;
    for (size_t i = 0; i < of_part_.size(); ++i) {
      const at::Tensor& gradient = of_part_[i];
      const auto real = at::toOpMathType(gradient.scalar_type());
      if (part.brings_keys()) {
        sums_[i] = gradient.to(real, /*non_blocking=*/false, /*copy=*/true);
      } else {
        sums_[i].add_(gradient);
      }
      if (part.returns_keys()) visiting.key_results[i].copy_(sums_[i]);
    }
  }

 private:
  transport::Inputs keys_;
  std::vector<at::Tensor> of_part_;
  std::array<at::Tensor, 2> sums_;
};

attention::Params params_of(const Call& call, const attention::Scores& scores) {
  attention::Params params = attention_params(*call.layout, scores);
  params.shares_device = call.session && call.layout->moves_rows && call.transport->shares_device();
  return params;
}

void forward_round(const Call& call, const Round& round, const Results& results,
                   const transport::Inputs& kept, const attention::Params& params) {
  const auto& [q, k, v] = call.inputs;
  const auto& [out, lse] = results;
  const HeadParts parts = parts_of(call);
  const auto trip = call.transport->begin(
      round.routes, {.inputs = call.inputs, .query_results = {out, lse}}, parts, call.where);
  in_phase(call, kDispatch, [&] { trip->dispatch(); });
  call.session->mark_dispatch(q.device());
  // One launch for both lists would be slower by a tenth or more: blocks that alternate between the
  // lists do not share keys in L2.
  in_tasks(call, kEarlyTasks, [&] {
    attention::forward({q, k, v, round.early, out, lse}, params);
  });
  SharedKeys shared;
  for (const HeadPart& part : transport::in_order(parts)) {
    transport::Visiting visiting = in_phase(call, kWaitForRows, [&] { return trip->arrive(); });
    transport::keep(round.routes, visiting.inputs, part.of(kept));
    shared.complete(visiting.inputs);
    in_tasks(call, kVisitingTasks, [&] {
      const auto& [visiting_q, visiting_k, visiting_v] = visiting.inputs;
      attention::forward({visiting_q, visiting_k, visiting_v, round.visiting,
                          visiting.query_results[0], visiting.query_results[1]},
                         params);
    });
    in_phase(call, kCombine, [&] { trip->combine(); });
  }
  in_tasks(call, kLateTasks, [&] { attention::forward({q, k, v, round.late, out, lse}, params); });
  in_phase(call, kWaitForResults, [&] { trip->collect(); });
}

Results balanced_forward(const Call& call, const Kept& kept, const attention::Params& params) {
  const Results results = attention::new_results(call.inputs.q, call.inputs.v);
  const std::vector<Round>& rounds = call.layout->rounds;
  for (size_t i = 0; i < rounds.size(); ++i) {
    forward_round(call, rounds[i], results, kept.rounds[i], params);
  }
  return results;
}

// Returns rowsum(out * grad_out) for the rows that are sent and a few between them. Other rows are
// uninitialised. The home computes it, so that `out` never travels. Home tasks compute their own.
at::Tensor delta_of_sent(const std::vector<Round>& rounds, const at::Tensor& out,
                         const at::Tensor& grad_out, const at::Tensor& lse) {
  constexpr int64_t kRowsOfALaunch = 1024;  // rows that cost about as much as a launch
  std::vector<Run> runs;
  for (const Round& round : rounds) {
    for (const Delivery& delivery : round.routes.movement.sent) {
      for (const RowPlace& place : delivery.queries) {
        runs.push_back({place.home_row, place.num_rows});
      }
    }
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.first < b.first; });
  const at::Tensor delta = at::empty_like(lse);
  for (size_t i = 0; i < runs.size();) {
    const int64_t first = runs[i].first;
    int64_t last = first;
    for (; i < runs.size() && (last == first || runs[i].first <= last + kRowsOfALaunch); ++i) {
      last = std::max(last, runs[i].first + runs[i].length);
    }
    const auto rows = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, first, last - first);
    };
    attention::row_dots(rows(out), rows(grad_out), rows(delta));
  }
  return delta;
}

// The gradient of out, and what home tasks know of the forward pass.
struct BackwardInputs {
  at::Tensor grad_out;
  attention::Saved saved;
};

// Kernels form delta from `out`. If lse has a gradient, delta includes it: d lse / d scores are the
// probabilities, so d scores = p * (dp - (delta - grad_lse)).
BackwardInputs backward_inputs(const Call& call, const at::Tensor& grad_out, const at::Tensor& out,
                               const at::Tensor& lse, const std::optional<at::Tensor>& grad_lse,
                               const attention::Params& params) {
  if (!grad_lse) return {grad_out, {lse, {}, out}};
  const at::Tensor delta = at::empty_like(lse);
  attention::row_dots(out, grad_out, delta);
  delta.sub_(*grad_lse);
  const Mask& mask = call.layout->mask;
  return {attention::grad_for_delta(grad_out, delta, call.inputs.q, mask, params),
          {lse, delta, {}}};
}

void backward_round(const Call& call, const Round& round, const BackwardInputs& inputs,
                    const at::Tensor& delta, const transport::Inputs& kept,
                    const Gradients& gradients, const attention::Params& params) {
  const auto& [q, k, v] = call.inputs;
  const auto& [grad_out, saved] = inputs;
  const auto& [dq, dk, dv] = gradients;
  const HeadParts parts = parts_of(call);
  transport::Cargo cargo{.inputs = call.inputs,
                         .with_queries = {grad_out, saved.lse, delta},
                         .query_results = {dq},
                         .key_results = {dk, dv},
                         .kept = &kept};
  const auto trip = call.transport->begin(round.routes, std::move(cargo), parts, call.where);
  in_phase(call, kDispatch, [&] { trip->dispatch(); });
  call.session->mark_dispatch(q.device());
  in_tasks(call, kEarlyTasks, [&] {
    attention::backward({grad_out, q, k, v, saved, round.early, dq, dk, dv}, params);
  });
  SharedKeys shared;
  for (const HeadPart& part : transport::in_order(parts)) {
    transport::Visiting visiting = in_phase(call, kWaitForRows, [&] { return trip->arrive(); });
    shared.complete(visiting.inputs);
    in_tasks(call, kVisitingTasks, [&] {
      const auto& [visiting_q, visiting_k, visiting_v] = visiting.inputs;
      const auto& sent = visiting.with_queries;
      const std::vector<at::Tensor> key_gradients = shared.gradients(part, visiting);
      attention::backward({sent[0],
                           visiting_q,
                           visiting_k,
                           visiting_v,
                           {sent[1], sent[2], {}},
                           round.visiting,
                           visiting.query_results[0],
                           key_gradients[0],
                           key_gradients[1]},
                          params);
      shared.add(part, visiting);
    });
    in_phase(call, kCombine, [&] { trip->combine(); });
  }
  in_tasks(call, kLateTasks, [&] {
    attention::backward({grad_out, q, k, v, saved, round.late, dq, dk, dv}, params);
  });
  in_phase(call, kWaitForResults, [&] { trip->collect(); });
}

Gradients balanced_backward(const Call& call, const BackwardInputs& inputs, const Kept& kept,
                            const attention::Params& params) {
  const auto& [q, k, v] = call.inputs;
  const std::vector<Round>& rounds = call.layout->rounds;
  const auto& [grad_out, saved] = inputs;
  const at::Tensor delta =
      saved.delta.defined() ? saved.delta : delta_of_sent(rounds, saved.out, grad_out, saved.lse);
  const Round& first = rounds[0];  // all home tasks are in the first round
  const auto [dk, dv] = attention::new_key_gradients(k, v, {&first.early, &first.late});
  const Gradients gradients{at::empty(q.sizes(), q.options()), dk, dv};
  for (size_t i = 0; i < rounds.size(); ++i) {
    backward_round(call, rounds[i], inputs, delta, kept.rounds[i], gradients, params);
  }
  return gradients;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_call(
    Pass pass, const transport::Inputs& inputs, const at::Tensor& layout, const at::Tensor& rows,
    const attention::Scores& scores, c10::string_view group_name, int64_t num_kept_queries,
    int64_t num_kept_keys, int64_t caller) {
  const auto& [q, k, v] = inputs;
  const c10::DeviceGuard guard(q.device());
  check_no_capture(q);
  const KeptOfCall keeps{.will_be = num_kept_queries + num_kept_keys > 0};
  const Call call =
      begin_call(pass, q, k, v, layout, rows, scores, std::string(group_name), caller, keeps);
  const attention::Params params = params_of(call, scores);
  const WholeCall whole_call(call);
  if (!call.session) {
    const auto& [home_q, home_k, home_v] = call.inputs;
    const Kept nothing = new_kept(call, num_kept_queries, num_kept_keys);
    const Results results = timed(call, [&] {
      return attention::forward(home_q, home_k, home_v, call.layout->rounds[0].early, params);
    });
    return std::tuple_cat(results, std::tuple(nothing.elements));
  }
  return announcing(*call.session, [&] {
    const Kept kept = new_kept(call, num_kept_queries, num_kept_keys);
    if (call.kept_number > 0) call.session->servers()->watch(kept.elements, call.kept_number);
    const Results results = balanced_forward(call, kept, params);
    call.session->mark_results(q.device(), call.layout->moves_rows);
    return std::tuple_cat(results, std::tuple(kept.elements));
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> core_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& layout,
    const at::Tensor& rows, double softmax_scale, c10::string_view group_name,
    int64_t num_kept_queries, int64_t num_kept_keys, int64_t caller, double softcap) {
  return forward_call(Pass::kForward, {q, k, v}, layout, rows, {softmax_scale, softcap}, group_name,
                      num_kept_queries, num_kept_keys, caller);
}

Gradients core_attention_backward(const at::Tensor& grad_out, const at::Tensor& q,
                                  const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                  const at::Tensor& lse, const at::Tensor& layout,
                                  const at::Tensor& rows, double softmax_scale,
                                  c10::string_view group_name,
                                  const std::optional<at::Tensor>& kept, int64_t caller,
                                  const std::optional<at::Tensor>& grad_lse, double softcap) {
  const c10::DeviceGuard guard(q.device());
  check_no_capture(q);
  const attention::Scores scores{softmax_scale, softcap};
  const at::Tensor elements = kept.value_or(at::empty({0}, q.options()));
  const Call call = begin_call(Pass::kBackward, q, k, v, layout, rows, scores,
                               std::string(group_name), caller, {.was = elements});
  const attention::Params params = params_of(call, scores);
  const WholeCall whole_call(call);
  const auto inputs = [&] {
    check_saved(grad_out, out, lse, q, v);
    if (grad_lse) check_grad_lse(*grad_lse, lse);
    return backward_inputs(call, grad_out.contiguous(), out.contiguous(), lse.contiguous(),
                           grad_lse, params);
  };
  if (!call.session) {
    const auto& [home_q, home_k, home_v] = call.inputs;
    kept_of(call, elements);
    const auto [grad, saved] = inputs();
    return timed(call, [&] {
      return attention::backward(grad, home_q, home_k, home_v, saved, call.layout->rounds[0].early,
                                 params);
    });
  }
  return announcing(*call.session, [&] {
    const BackwardInputs home = inputs();
    return balanced_backward(call, home, kept_of(call, elements), params);
  });
}

void exchange(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
              const at::Tensor& layout, const at::Tensor& rows, c10::string_view group_name) {
  const c10::DeviceGuard guard(q.device());
  check_no_capture(q);
  const attention::Scores any{.softmax_scale = 1};
  const Call call = begin_call(Pass::kForward, q, k, v, layout, rows, any, std::string(group_name));
  if (!call.session) return;
  announcing(*call.session, [&] {
    for (const Round& round : call.layout->rounds) {
      call.transport->begin(round.routes, {.inputs = call.inputs}, {}, call.where)->deliver();
    }
  });
}

// Computes this rank's tasks of a call that rank 0 announced, as a server without rows of its own.
// Returns the inputs that it keeps. `kept` are those of the forward call.
at::Tensor serve_call(at::IntArrayRef words, const at::Tensor& layout, const at::Tensor& rows,
                      const std::optional<at::Tensor>& kept, c10::string_view group_name) {
  const Notice notice = Notice::of(words.vec());
  const auto& details = notice.details;
  const auto options = rows.options().dtype(static_cast<at::ScalarType>(details[Notice::kDtype]));
  const auto no_rows = [&](Notice::Detail heads, Notice::Detail head_dim) {
    return at::empty({0, details[heads], details[head_dim]}, options);
  };
  const at::Tensor q = no_rows(Notice::kHeadsQ, Notice::kHeadDim),
                   k = no_rows(Notice::kHeadsKv, Notice::kHeadDim),
                   v = no_rows(Notice::kHeadsKv, Notice::kHeadDimV),
                   out = no_rows(Notice::kHeadsQ, Notice::kHeadDimV);
  const attention::Scores scores{std::bit_cast<double>(details[Notice::kSoftmaxScale]),
                                 std::bit_cast<double>(details[Notice::kSoftcap])};
  if (notice.kind == Notice::kBackward) {
    const auto dtype = at::toOpMathType(q.scalar_type());
    const at::Tensor lse = at::empty({0, q.size(1)}, options.dtype(dtype));
    core_attention_backward(out, q, k, v, out, lse, layout, rows, scores.softmax_scale, group_name,
                            kept, notice.caller, std::nullopt, scores.softcap);
    return kept.value_or(at::empty({0}, options));
  }
  const Pass pass = notice.kind == Notice::kRecomputed ? Pass::kRecomputed : Pass::kForward;
  const auto keeps = notice.kept > 0 ? kept_rows(layout) : std::vector<int64_t>{0, 0};
  return std::get<2>(forward_call(pass, {q, k, v}, layout, rows, scores, group_name, keeps[0],
                                  keeps[1], notice.caller));
}

// As core_attention, whose lengths may be symbols under torch.compile.
using SymbolicForward = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    double, c10::string_view, c10::SymInt, c10::SymInt, int64_t, double);

class CoreAttention : public torch::autograd::Function<CoreAttention> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& q, const Variable& k,
                               const Variable& v, const Variable& layout, const Variable& rows,
                               double softmax_scale, const std::string& group_name,
                               const c10::SymInt& num_kept_queries,
                               const c10::SymInt& num_kept_keys, int64_t caller, double softcap) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = operator_of<SymbolicForward>("distca::core_attention");
    auto [out, lse, kept] =
        op.call(q, k, v, layout, rows, softmax_scale, c10::string_view(group_name),
                num_kept_queries, num_kept_keys, caller, softcap);
    ctx->save_for_backward({q, k, v, out, lse, layout, rows, kept});
    ctx->mark_non_differentiable({kept});
    ctx->set_materialize_grads(false);  // lse seldom has a gradient
    ctx->saved_data["softmax_scale"] = softmax_scale;
    ctx->saved_data["group_name"] = group_name;
    ctx->saved_data["caller"] = caller;
    ctx->saved_data["softcap"] = softcap;
    return {out, lse, kept};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const std::string group_name = ctx->saved_data["group_name"].toStringRef();
    static const auto op =
        operator_of<decltype(core_attention_backward)>("distca::core_attention_backward");
    // This rank takes part even without a gradient: others may send it rows.
    const at::Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(saved[3]);
    const auto grad_lse = grads[1].defined() ? std::optional(grads[1]) : std::nullopt;
    auto [dq, dk, dv] =
        op.call(grad_out, saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6],
                ctx->saved_data["softmax_scale"].toDouble(), c10::string_view(group_name),
                std::optional<at::Tensor>(saved[7]), ctx->saved_data["caller"].toInt(), grad_lse,
                ctx->saved_data["softcap"].toDouble());
    return {dq,         dk,         dv,         Variable(), Variable(), Variable(),
            Variable(), Variable(), Variable(), Variable(), Variable()};
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> core_attention_autograd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& layout,
    const at::Tensor& rows, double softmax_scale, c10::string_view group_name,
    c10::SymInt num_kept_queries, c10::SymInt num_kept_keys, int64_t caller, double softcap) {
  auto results = CoreAttention::apply(q, k, v, layout, rows, softmax_scale, std::string(group_name),
                                      num_kept_queries, num_kept_keys, caller, softcap);
  return {results[0], results[1], results[2]};
}

void bind_core_attention(torch::Library& m) {
  m.impl("core_attention", core_attention);
  m.impl("core_attention_backward", core_attention_backward);
  m.impl("exchange", exchange);
  m.impl("serve_call", serve_call);
}

}  // namespace
}  // namespace distca::ops

TORCH_LIBRARY_IMPL(distca, CPU, m) {
  distca::ops::bind_core_attention(m);
}

// Also in a library without CUDA, so that a CUDA tensor gets distca's error and not the
// dispatcher's.
TORCH_LIBRARY_IMPL(distca, CUDA, m) {
  distca::ops::bind_core_attention(m);
}

TORCH_LIBRARY_IMPL(distca, Autograd, m) {
  m.impl("core_attention", distca::ops::core_attention_autograd);
  m.impl("core_attention_backward", torch::autograd::autogradNotImplementedFallback());
}
