#pragma once

#include <memory>

#include "../transport.h"

namespace distca::transport {

// Moves rows between ranks of a node by one transport, and rows between nodes by another, in one
// call. `inside` owns the memory of visiting rows and serves only the ranks of this node. `between`
// serves all ranks of the group. Routes must have both parts (Routes::by_node).
class HybridTransport : public Transport {
 public:
  HybridTransport(std::shared_ptr<Transport> inside, std::shared_ptr<Transport> between)
      : inside_(std::move(inside)), between_(std::move(between)) {}

  std::unique_ptr<RoundTrip> begin(const Routes& routes, Cargo cargo, const HeadParts& parts,
                                   const Where& where) override;
  bool takes_parts() const override { return between_->takes_parts(); }
  bool shares_device() const override { return between_->shares_device(); }

 private:
  std::shared_ptr<Transport> inside_, between_;
};

}  // namespace distca::transport
