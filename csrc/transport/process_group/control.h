#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "patience.h"

namespace distca::transport {

// Small exchanges between all ranks on the CPU.
class ControlPlane {
 public:
  ControlPlane(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<Patience> patience)
      : group_(std::move(group)), patience_(std::move(patience)) {}

  // Collective: [num_ranks, ...] of every rank's `tensor`, which has the same shape on all of them.
  // `activity` is what all ranks do at this point, for the error if one of them does not.
  at::Tensor all_gather(const at::Tensor& tensor, const Where& where, const std::string& activity);

  // Whether the training waits for what is gathered here: see Patience.
  void set_awaited(bool is_awaited) { patience_->set_awaited(is_awaited); }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Patience> patience_;
};

}  // namespace distca::transport
