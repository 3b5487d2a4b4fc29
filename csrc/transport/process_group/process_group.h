#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "../transport.h"
#include "patience.h"

namespace distca::transport {

// Rows by all_to_all of a c10d process group: gloo for CPU tensors, NCCL for CUDA tensors. Where a
// stream waits, it gives up an exchange in which nothing moves for `timeout_s`.
std::unique_ptr<Transport> make_process_group_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<Patience> patience,
    std::shared_ptr<FailureBoard> failures, double timeout_s);

}  // namespace distca::transport
