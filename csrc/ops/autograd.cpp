#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "attend.h"
#include "core_attention.h"

namespace distca::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using Pair = std::tuple<at::Tensor, at::Tensor>;
using Triple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Calls an operator below autograd through the dispatcher, so that modes (fake tensors, selective
// checkpointing, torch.compile) see it.
template <const char* kName, typename F, typename... Args>
auto redispatch(F*, const Args&... args) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(kName, "").typed<F>();
  return op.call(args...);
}

constexpr char kCoreAttention[] = "distca::core_attention";
constexpr char kCoreAttentionBackward[] = "distca::core_attention_backward";
constexpr char kAttend[] = "distca::attend";
constexpr char kAttendBackward[] = "distca::attend_backward";

// As core_attention, whose lengths may be symbols under torch.compile.
using CoreAttentionFunction = Triple(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                     const at::Tensor&, const at::Tensor&, double, c10::string_view,
                                     c10::SymInt, c10::SymInt, int64_t);

class CoreAttention : public torch::autograd::Function<CoreAttention> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& q, const Variable& k,
                               const Variable& v, const Variable& layout, const Variable& rows,
                               double softmax_scale, const std::string& group_name,
                               const c10::SymInt& num_kept_queries,
                               const c10::SymInt& num_kept_keys, int64_t caller) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, lse, kept] = redispatch<kCoreAttention, CoreAttentionFunction>(
        nullptr, q, k, v, layout, rows, softmax_scale, c10::string_view(group_name),
        num_kept_queries, num_kept_keys, caller);
    ctx->save_for_backward({q, k, v, out, lse, layout, rows, kept});
    ctx->mark_non_differentiable({lse, kept});
    ctx->saved_data["softmax_scale"] = softmax_scale;
    ctx->saved_data["group_name"] = group_name;
    ctx->saved_data["caller"] = caller;
    return {out, lse, kept};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const std::string group_name = ctx->saved_data["group_name"].toStringRef();
    auto [dq, dk, dv] = redispatch<kCoreAttentionBackward>(
        &core_attention_backward, grads[0], saved[0], saved[1], saved[2], saved[3], saved[4],
        saved[5], saved[6], ctx->saved_data["softmax_scale"].toDouble(),
        c10::string_view(group_name), std::optional<at::Tensor>(saved[7]),
        ctx->saved_data["caller"].toInt());
    return {dq,         dk,         dv,         Variable(), Variable(),
            Variable(), Variable(), Variable(), Variable(), Variable()};
  }
};

class Attend : public torch::autograd::Function<Attend> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& q, const Variable& k,
                               const Variable& v, const Variable& layout, const Variable& rows,
                               double softmax_scale, const std::string& tasks) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, lse] =
        redispatch<kAttend>(&attend, q, k, v, layout, rows, softmax_scale, c10::string_view(tasks));
    ctx->save_for_backward({q, k, v, out, lse, layout, rows});
    ctx->mark_non_differentiable({lse});
    ctx->saved_data["softmax_scale"] = softmax_scale;
    ctx->saved_data["tasks"] = tasks;
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const std::string tasks = ctx->saved_data["tasks"].toStringRef();
    auto [dq, dk, dv] = redispatch<kAttendBackward>(
        &attend_backward, grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5],
        saved[6], ctx->saved_data["softmax_scale"].toDouble(), c10::string_view(tasks));
    return {dq, dk, dv, Variable(), Variable(), Variable(), Variable()};
  }
};

Triple core_attention_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& layout, const at::Tensor& rows,
                               double softmax_scale, c10::string_view group_name,
                               c10::SymInt num_kept_queries, c10::SymInt num_kept_keys,
                               int64_t caller) {
  auto results = CoreAttention::apply(q, k, v, layout, rows, softmax_scale, std::string(group_name),
                                      num_kept_queries, num_kept_keys, caller);
  return {results[0], results[1], results[2]};
}

Pair attend_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& layout, const at::Tensor& rows, double softmax_scale,
                     c10::string_view tasks) {
  auto results = Attend::apply(q, k, v, layout, rows, softmax_scale, std::string(tasks));
  return {results[0], results[1]};
}

}  // namespace
}  // namespace distca::ops

TORCH_LIBRARY_IMPL(distca, Autograd, m) {
  m.impl("core_attention", distca::ops::core_attention_autograd);
  m.impl("attend", distca::ops::attend_autograd);
  for (const char* name : {"core_attention_backward", "attend_backward"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}
