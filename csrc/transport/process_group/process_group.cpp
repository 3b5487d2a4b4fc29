#include "../registry.h"
#include "exchanges.h"
#include "slot_trip.h"

namespace distca::transport {
namespace {

class ProcessGroupTransport : public Transport {
 public:
  explicit ProcessGroupTransport(const Opening& opening) : exchanges_(opening) {}

  std::unique_ptr<RoundTrip> begin(const Routes& routes, Cargo cargo, const HeadParts& parts,
                                   const Where& where) override {
    return new_slot_trip(exchanges_, routes, cargo, parts, where);
  }
  bool takes_parts() const override { return true; }
  bool shares_device() const override { return true; }
  std::vector<ExchangeTime> take_times() override { return exchanges_.take_times(); }

 private:
  Exchanges exchanges_;
};

}  // namespace

std::unique_ptr<Transport> open_process_group(const Opening& opening) {
  return std::make_unique<ProcessGroupTransport>(opening);
}

}  // namespace distca::transport
