#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "layout_tensor.h"
#include "session.h"

namespace distca::ops {

// Returns an operator of schemas.cpp. F is the type of its kernel. Calls go through the dispatcher,
// so that modes (fake tensors, selective checkpointing, torch.compile) see them.
template <typename F>
auto operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

// Returns core attention's inputs with rows contiguous. Throws a ValueError that names the
// argument, its value and the allowed values. Local: no rank communicates.
transport::Inputs check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const Layout& layout, double softcap);

// Throws if a CUDA graph is captured, which would repeat the call with this step's documents.
// `tensor` is on the current device. Local: call it before any rank communicates.
void check_no_capture(const at::Tensor& tensor);

// `tensor` is [rows, heads, head_dim].
void check_shape(const at::Tensor& tensor, const char* name);

// Checks that the backward pass's inputs fit the forward pass of q, [rows, heads, head_dim], and v.
void check_saved(const at::Tensor& grad_out, const at::Tensor& out, const at::Tensor& lse,
                 const at::Tensor& q, const at::Tensor& v);

// Checks that lse's gradient is like lse.
void check_grad_lse(const at::Tensor& grad_lse, const at::Tensor& lse);

// Checks that `tensor` is [expected, heads, head_dim], as the layout says, and on the device of
// `rows`.
void check_layout_rows(const at::Tensor& tensor, const char* name, int64_t expected,
                       const at::Tensor& rows);

// A tensor whose rows are contiguous: itself, or a copy.
at::Tensor with_contiguous_rows(const at::Tensor& tensor);

// Everything an operator call starts with.
struct Call {
  std::shared_ptr<const Layout> layout;
  transport::Inputs inputs;
  std::shared_ptr<Session> session;    // null when no rank moves rows
  transport::Transport* transport;     // the session's, for these rows
  std::unique_lock<std::mutex> turn;   // holds Session::calls()
  std::shared_ptr<Timeline> timeline;  // of the group
  std::shared_ptr<CallTimes> times;    // of the session, null outside of one
  transport::Where where;              // in the step
  int64_t kept_number = 0;             // see Servers; 0 where no inputs are kept
};

// What a call keeps of its inputs for the backward pass, or kept in the forward pass.
struct KeptOfCall {
  bool will_be = false;  // by this forward call
  at::Tensor was{};      // by the forward call of this backward pass
};

// Decodes and checks on this rank, then makes sure that all ranks agree. A refusal here reaches the
// other ranks too, before any row is sent. `caller` is the module that calls: see name_caller.
Call begin_call(Pass pass, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const at::Tensor& layout, const at::Tensor& rows, const attention::Scores& scores,
                const std::string& group_name, int64_t caller = -1, const KeptOfCall& kept = {});

// Times a call that has begun, until the end of this scope. The call is a phase of the timeline,
// and it separates two gaps between calls.
class WholeCall {
 public:
  explicit WholeCall(const Call& call)
      : call_(call), range_(*call.timeline, call.where.in(kAttention), call.inputs.q.device()) {
    if (call.times) call.times->gaps.begin(call.where, call.layout->batch, call.inputs.q.device());
  }
  WholeCall(const WholeCall&) = delete;
  ~WholeCall() {
    if (!call_.times) return;
    try {
      call_.times->gaps.end(call_.where, call_.layout->batch, call_.inputs.q.device());
    } catch (const std::exception&) {
      // The next call reports an error of the device. Here, only the gap is lost.
    }
  }

 private:
  const Call& call_;
  Range range_;
};

// Runs a part of a call as a phase of it.
template <typename F>
auto in_phase(const Call& call, const char* phase, F&& part) {
  const Range range(*call.timeline, call.where.in(phase), call.inputs.q.device());
  return part();
}

// Runs and times tasks of a call: their seconds tell how fast this rank is.
template <typename F>
auto timed(const Call& call, F&& tasks) {
  if (!call.times) return tasks();
  const ScopedSpan span(call.times->tasks, call.where, call.inputs.q.device());
  return tasks();
}

// Runs and times tasks of a call that moves rows, as a phase of the call.
template <typename F>
void in_tasks(const Call& call, const char* phase, F&& tasks) {
  in_phase(call, phase, [&] { timed(call, tasks); });
}

// Runs a step of a call. An exception is announced to the other ranks, which wait for this one, and
// that ends the group. GroupOutOfMemory is not announced, because all ranks throw it.
template <typename F>
auto announcing(Session& session, F&& step) {
  try {
    return step();
  } catch (const transport::GroupOutOfMemory&) {
    throw;
  } catch (const std::exception& error) {
    session.failures().announce(transport::message_of(error));
    throw;
  }
}

}  // namespace distca::ops
