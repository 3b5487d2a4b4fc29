#pragma once

#include <functional>
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

// A device of each rank of a group, all of which reach each other's memory.
struct PeerMembers {
  std::string group_name;  // of torch's process group
  int64_t rank;
  int64_t num_ranks;
  c10::Device device;
  int64_t first_rank;  // of the members, among all ranks that errors name
};

// What every rank says, [num_ranks], once all have said something. Throws DistBackendError naming
// `where` and the ranks at fault when one is gone, has failed or does not come in time.
using Meeting = std::function<std::vector<int64_t>(int64_t says, const Where& where)>;

struct PeerOpening {
  PeerMembers members;
  Meeting meet;
  int64_t reserved_bytes;  // least size of a rank's buffers
  std::shared_ptr<FailureBoard> failures;
  double timeout_s;  // it gives up a call in which nothing moves for so long
};

// Whether this build can move rows straight to other ranks' memory.
bool has_peer_transport();

// Opens the transport that does. Throws where has_peer_transport() is false.
std::unique_ptr<Transport> open_peer(PeerOpening opening);

}  // namespace distca::transport
