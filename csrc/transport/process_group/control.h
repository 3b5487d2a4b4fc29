#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "patience.h"

namespace distca::transport {

// Small exchanges between all ranks on the CPU. The process group never gets a Python tensor: its
// threads might release the tensor after the interpreter has ended.
class ControlPlane {
 public:
  ControlPlane(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<Patience> patience)
      : group_(std::move(group)), patience_(std::move(patience)) {}

  // Collective: returns every rank's `own`, which may have any length, by rank. `activity` says in
  // words what all ranks do at this point, for errors. Throws ValueError on every rank if ranks are
  // in different phases.
  std::vector<std::string> gather(std::string_view own, const Where& where,
                                  const std::string& activity);

  // Collective: returns every rank's `tensor`, [num_ranks, ...]. All have the same shape.
  at::Tensor all_gather(const at::Tensor& tensor, const Where& where, const std::string& activity);

  // Ends all waits here, now and from now on: see Patience.
  void stop() noexcept { patience_->stop(); }

  // Sets whether training waits for what is gathered here: see Patience.
  void set_awaited(bool is_awaited) { patience_->set_awaited(is_awaited); }

 private:
  at::Tensor exchange(std::string_view own, const Where& where, const std::string& activity);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Patience> patience_;
};

}  // namespace distca::transport
