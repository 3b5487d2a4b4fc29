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

// This rank's place in a group whose ranks have one device each and reach each other's memory.
struct PeerMembers {
  std::string group_name;  // of torch's process group
  int64_t rank;
  int64_t num_ranks;
  c10::Device device;
  int64_t first_rank;  // number of the group's rank 0 in error messages
};

// Sends `says` to all ranks of the session and returns what each of them sent, once all have
// arrived. Throws DistBackendError naming `where` and the ranks at fault if one is gone, has failed
// or is late.
using Meeting = std::function<std::vector<int64_t>(int64_t says, const Where& where)>;

struct PeerOpening {
  PeerMembers members;
  Meeting meet;
  int64_t reserved_bytes;  // minimum size of this rank's buffers together
  std::shared_ptr<FailureBoard> failures;
  double timeout_s;  // the transport gives up a call in which nothing moves for this long
};

// Returns whether this build has the peer transport, which moves rows straight to other ranks'
// memory.
bool has_peer_transport();

// Opens the peer transport. Throws if has_peer_transport() is false.
std::unique_ptr<Transport> open_peer(PeerOpening opening);

}  // namespace distca::transport
