#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "patience.h"

namespace distca::transport {

// Small exchanges between all ranks on the CPU. The process group never sees a tensor of Python's:
// its threads may be the last to hold one, when the interpreter is gone.
class ControlPlane {
 public:
  ControlPlane(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<Patience> patience)
      : group_(std::move(group)), patience_(std::move(patience)) {}

  // Collective: what every rank says, by rank, of any length. `activity` is what all ranks do at
  // this point, for the error if one of them does not. Throws ValueError on every rank when they
  // are in different phases.
  std::vector<std::string> gather(std::string_view own, const Where& where,
                                  const std::string& activity);

  // Collective: [num_ranks, ...] of every rank's `tensor`, which has the same shape on all of them.
  at::Tensor all_gather(const at::Tensor& tensor, const Where& where, const std::string& activity);

  // From now on this rank waits for nobody here.
  void stop() noexcept { patience_->stop(); }

  // Whether the training waits for what is gathered here: see Patience.
  void set_awaited(bool is_awaited) { patience_->set_awaited(is_awaited); }

 private:
  at::Tensor exchange(std::string_view own, const Where& where, const std::string& activity);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Patience> patience_;
};

}  // namespace distca::transport
