#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "process_group/patience.h"
#include "transport.h"

namespace distca::transport {

// What a transport is opened with. Every rank of the group opens the same one.
struct Opening {
  c10::intrusive_ptr<c10d::ProcessGroup> group;  // for rows alone
  std::shared_ptr<Patience> patience;
  std::shared_ptr<FailureBoard> failures;
  double timeout_s;
};
using OpenTransport = std::unique_ptr<Transport> (*)(const Opening& opening);

// Adds a transport for Options.transport to name. Call it before sessions open.
[[gnu::visibility("default")]] void add_transport(const std::string& name, OpenTransport open);

// Throws ValueError naming those that there are.
std::unique_ptr<Transport> open_transport(const std::string& name, const Opening& opening);

std::vector<std::string> transports();

}  // namespace distca::transport
