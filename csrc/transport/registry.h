#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "process_group/control.h"
#include "transport.h"

namespace distca::transport {

// The arguments that open a transport. Every rank of a group must open the same transport.
struct Opening {
  c10::intrusive_ptr<c10d::ProcessGroup> group;  // carries rows only
  std::shared_ptr<Patience> patience;
  std::shared_ptr<FailureBoard> failures;
  double timeout_s;  // a stream gives up an exchange in which nothing moves for so long
};
using OpenTransport = std::unique_ptr<Transport> (*)(const Opening& opening);

// Rows by all_to_all of a c10d process group: gloo for CPU tensors, NCCL for CUDA tensors.
std::unique_ptr<Transport> open_process_group(const Opening& opening);

// Adds a transport that Options.transport can name. Call it before sessions open.
[[gnu::visibility("default")]] void add_transport(const std::string& name, OpenTransport open);

// Throws ValueError for an unknown name; the message lists the known ones.
std::unique_ptr<Transport> open_transport(const std::string& name, const Opening& opening);

std::vector<std::string> transports();

}  // namespace distca::transport
