#include "checks.h"

#include <ATen/OpMathType.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cmath>
#include <string>

#include "thread_state.h"
#include "version.h"
#ifdef DISTCA_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace distca::ops {
namespace {

void check_same(const at::Tensor& tensor, const char* name, const at::Tensor& q) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == q.scalar_type(), name, " is ", tensor.scalar_type(),
                    ", q is ", q.scalar_type(),
                    "; expected one dtype (cast them, or use autocast)");
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, " is on ", tensor.device(), ", q on ",
                    q.device(), "; expected one device");
}

Signature signature_of(const PlanIdentity& plan, const transport::Inputs& inputs,
                       const attention::Scores& scores) {
  const auto& [q, k, v] = inputs;
  Signature signature;
  signature.values = {0,
                      kVersion,
                      plan.step,
                      plan.digest,
                      q.size(1),
                      k.size(1),
                      q.size(2),
                      v.size(2),
                      static_cast<int64_t>(q.scalar_type()),
                      std::bit_cast<int64_t>(scores.softmax_scale),
                      std::bit_cast<int64_t>(scores.softcap)};
  return signature;
}

void check_device_of_rows(const at::Tensor& tensor, const char* name, const at::Device& rows) {
  TORCH_CHECK_VALUE(rows == tensor.device(), name, " is on ", tensor.device(),
                    ", but the plan was made for ", rows, "; pass device= to distca.plan");
}

// Checks that the layout is of this rank of the session; without a session, of the only rank.
void check_member(const Layout& layout, const Session* session, const std::string& group_name) {
  TORCH_CHECK_VALUE(session || layout.num_ranks == 1,
                    "group_name is empty, but the layout is one of ", layout.num_ranks,
                    " ranks; pass the plan's group_name");
  if (!session) return;
  TORCH_CHECK_VALUE(layout.num_ranks == session->num_ranks() && layout.rank == session->rank(),
                    "the layout is that of rank ", layout.rank, ", but this is rank ",
                    session->rank(), " of group '", group_name, "'; its plan is over ",
                    layout.num_ranks, " ranks, the group has ", session->num_ranks(),
                    ". Pass this rank's own layout, of a plan over this group");
  TORCH_CHECK_VALUE(layout.ranks_per_node == session->ranks_per_node(),
                    "the layout has routes for ", layout.ranks_per_node,
                    " ranks per node, but group '", group_name, "' was opened with ",
                    session->ranks_per_node(), "; pass that as ranks_per_node");
}

// Tells servers of a call, so that they make it too.
void tell_servers(Call& call, Pass pass, const attention::Scores& scores, const KeptOfCall& kept) {
  Servers* servers = call.session ? call.session->servers() : nullptr;
  if (servers == nullptr || call.layout->step < 0) return;  // links are measured before the steps
  if (call.layout->moves_rows) {
    if (kept.will_be) call.kept_number = servers->new_number();
    if (kept.was.defined() && kept.was.numel() > 0) call.kept_number = servers->number_of(kept.was);
  }
  constexpr std::array kKinds{Notice::kForward, Notice::kRecomputed, Notice::kBackward};
  const auto& [q, k, v] = call.inputs;
  servers->tell({.kind = kKinds[static_cast<size_t>(pass)],
                 .step = call.layout->step,
                 .caller = call.where.caller,
                 .kept = call.kept_number,
                 .details = {q.size(1), k.size(1), q.size(2), v.size(2),
                             static_cast<int64_t>(q.scalar_type()),
                             std::bit_cast<int64_t>(scores.softmax_scale),
                             std::bit_cast<int64_t>(scores.softcap)}});
}

// Sizes and dtype that a tensor must have.
struct Expected {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  at::Device device;
  const char* reason;
};

void check_is(const at::Tensor& tensor, const char* name, const Expected& expected) {
  const auto& [sizes, dtype, device, reason] = expected;
  TORCH_CHECK_VALUE(
      tensor.sizes() == sizes && tensor.scalar_type() == dtype && tensor.device() == device, name,
      " is ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device(),
      "; expected ", dtype, " of shape ", at::IntArrayRef(sizes), " on ", device, ", ", reason);
}

}  // namespace

void check_no_capture([[maybe_unused]] const at::Tensor& tensor) {
#ifdef DISTCA_WITH_CUDA
  const bool is_captured = tensor.is_cuda() && c10::cuda::currentStreamCaptureStatusMayInitCtx() !=
                                                   c10::cuda::CaptureStatus::None;
  TORCH_CHECK_VALUE(!is_captured,
                    "core attention is captured into a CUDA graph; expected a call outside, "
                    "because documents differ from step to step, and so do their plans");
#endif
}

void check_shape(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() == 3, name, " has shape ", tensor.sizes(),
                    "; expected [tokens, heads, head_dim]");
  TORCH_CHECK_VALUE(tensor.size(1) > 0 && tensor.size(2) > 0, name, " has shape ", tensor.sizes(),
                    "; expected at least one head and head_dim >= 1");
}

transport::Inputs check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const Layout& layout, double softcap) {
  TORCH_CHECK_VALUE(softcap >= 0 && std::isfinite(softcap), "softcap is ", softcap,
                    "; expected a positive number, or 0 for uncapped scores");
  check_shape(q, "q");
  check_shape(k, "k");
  check_shape(v, "v");
  check_same(k, "k", q);
  check_same(v, "v", q);
  TORCH_CHECK_VALUE(k.sizes().slice(0, 2) == v.sizes().slice(0, 2), "k has shape ", k.sizes(),
                    ", v ", v.sizes(), "; expected equal shapes except for head_dim");
  TORCH_CHECK_VALUE(q.size(2) == k.size(2), "q has head_dim ", q.size(2), ", k ", k.size(2),
                    "; expected one head_dim for both: only v may have another");
  TORCH_CHECK_VALUE(q.size(1) % k.size(1) == 0, "q has ", q.size(1), " heads, k ", k.size(1),
                    "; expected a multiple");
  TORCH_CHECK_VALUE(q.size(0) == layout.num_home_queries(), "q has ", q.size(0),
                    " tokens, but the documents of this rank have ", layout.num_home_queries(),
                    "; pass the rows that cu_seqlens describes");
  TORCH_CHECK_VALUE(k.size(0) == layout.num_home_rows, "q has ", q.size(0), " tokens, k ",
                    k.size(0), "; expected ",
                    layout.num_context_rows == 0
                        ? std::string("equal numbers")
                        : "k to have the documents' " + std::to_string(layout.num_context_rows) +
                              " context rows more");
  check_device_of_rows(q, "q", layout.device);
  attention::check_supported(q, v, layout.mask, softcap, layout.deterministic);
  return {with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v)};
}

void check_saved(const at::Tensor& grad_out, const at::Tensor& out, const at::Tensor& lse,
                 const at::Tensor& q, const at::Tensor& v) {
  const std::vector<int64_t> sizes = attention::out_sizes(q, v);
  check_is(grad_out, "grad_out", {sizes, q.scalar_type(), q.device(), "like out"});
  const char* saved = "what the forward pass gave for this q and v";
  check_is(out, "out", {sizes, q.scalar_type(), q.device(), saved});
  check_is(lse, "lse",
           {q.sizes().slice(0, 2).vec(), at::toOpMathType(q.scalar_type()), q.device(), saved});
}

void check_grad_lse(const at::Tensor& grad_lse, const at::Tensor& lse) {
  check_is(grad_lse, "grad_lse", {lse.sizes().vec(), lse.scalar_type(), lse.device(), "like lse"});
}

void check_layout_rows(const at::Tensor& tensor, const char* name, int64_t expected,
                       const at::Tensor& rows) {
  check_shape(tensor, name);
  TORCH_CHECK_VALUE(tensor.size(0) == expected, name, " has shape ", tensor.sizes(), "; expected ",
                    expected, " rows, as the layout says");
  TORCH_CHECK_VALUE(at::isFloatingType(tensor.scalar_type()), name, " is ", tensor.scalar_type(),
                    "; expected a floating-point dtype");
  check_device_of_rows(tensor, name, rows.device());
}

at::Tensor with_contiguous_rows(const at::Tensor& tensor) {
  int64_t expected = 1;
  for (int64_t dim = tensor.dim() - 1; dim > 0; --dim) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != expected) return tensor.contiguous();
    expected *= tensor.size(dim);
  }
  // An expanded row dimension has stride 0, which the copies allow but kernels need not.
  return tensor.size(0) > 1 && tensor.stride(0) < expected ? tensor.contiguous() : tensor;
}

Call begin_call(Pass pass, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const at::Tensor& layout, const at::Tensor& rows, const attention::Scores& scores,
                const std::string& group_name, int64_t caller, const KeptOfCall& kept) {
  Call call{.timeline = timeline_of(group_name), .where = {"", name_of(pass), -1, -1, caller}};
  if (pass == Pass::kForward && backward_pass() != -1) {
    pass = Pass::kRecomputed;  // by activation checkpointing, inside the backward pass
  }
  if (!group_name.empty()) {
    call.session = find_session(group_name);
    call.turn = std::unique_lock(call.session->calls());
  }
  try {
    call.layout = shared_layout(layout, rows);
    check_member(*call.layout, call.session.get(), group_name);
    call.inputs = check_inputs(q, k, v, *call.layout, scores.softcap);
    tell_servers(call, pass, scores, kept);
  } catch (const std::exception& error) {
    try {
      if (call.session) {
        call.session->refuse(call.layout ? call.layout->step : -1, transport::message_of(error));
      }
    } catch (const std::exception&) {
      // Telling the others failed; this rank's own error is the one to report.
    }
    throw;
  }
  const auto& [step, batch, moves_rows] =
      std::tie(call.layout->step, call.layout->batch, call.layout->moves_rows);
  if (!call.session) {
    call.where = {"", name_of(pass), -1, step, caller};
    return call;
  }
  const PlanIdentity plan = identity_of(*call.layout);
  call.session->agree(signature_of(plan, call.inputs, scores), plan.mask, moves_rows);
  call.where = call.session->enter(pass, {step, batch}, caller, moves_rows);
  call.times = call.session->times();
  call.transport = &call.session->transport(attention::reads_in_place(q, v, scores));
  if (moves_rows) return call;
  call.turn = {};
  call.session.reset();
  return call;
}

}  // namespace distca::ops
