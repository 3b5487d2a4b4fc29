#include "thread_state.h"

#include <ATen/SequenceNumber.h>
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>

namespace distca::ops {
namespace {

thread_local int64_t applied_backward_pass = -1;

// State that torch keeps for each thread: grad mode, dispatch modes, hooks of saved tensors and so
// on, and the backward pass that runs.
class ThreadState : public torch::CustomClassHolder {
 public:
  // Gives the calling thread the state of the thread that created this object.
  void apply() {
    at::ThreadLocalState::setThreadLocalState(state_);
    applied_backward_pass = backward_pass_;
  }

 private:
  at::ThreadLocalState state_;
  int64_t backward_pass_ = backward_pass();
};

// Raises the number of this thread's next autograd node to at least `number`, and returns it. The
// backward pass runs nodes that are ready in descending order of their numbers.
int64_t raise_sequence_number(int64_t number) {
  const auto least = static_cast<uint64_t>(std::max<int64_t>(0, number));
  while (at::sequence_number::peek() < least) at::sequence_number::get_and_increment();
  return static_cast<int64_t>(at::sequence_number::peek());
}

TORCH_LIBRARY_FRAGMENT(distca, m) {
  m.class_<ThreadState>("ThreadState")
      .def(torch::init<>())
      .def("apply", [](const c10::intrusive_ptr<ThreadState>& self) { self->apply(); });
  m.def("raise_sequence_number(int number) -> int", raise_sequence_number);
  m.def("backward_pass() -> int", backward_pass);
}

}  // namespace

int64_t backward_pass() {
  const int64_t own = torch::autograd::get_current_graph_task_id();
  return own != -1 ? own : applied_backward_pass;
}

}  // namespace distca::ops
