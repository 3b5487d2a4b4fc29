#include "registry.h"

#include <c10/util/Exception.h>
#include <c10/util/Synchronized.h>

#include <map>

#ifdef DISTCA_WITH_SM90
#include "peer/peer.h"
#endif

namespace distca::transport {
namespace {

using ByName = std::map<std::string, OpenTransport>;

c10::Synchronized<ByName>& registry() {
  static auto* instance =
      new c10::Synchronized<ByName>(ByName{{"process_group", open_process_group}});
  return *instance;
}

}  // namespace

void add_transport(const std::string& name, OpenTransport open) {
  registry().withLock([&](ByName& by_name) { by_name[name] = open; });
}

std::vector<std::string> transports() {
  std::vector<std::string> names;
  for (const auto& [name, open] : registry().withLock([](ByName& all) { return all; })) {
    names.push_back(name);
  }
  return names;
}

std::unique_ptr<Transport> open_transport(const std::string& name, const Opening& opening) {
  const ByName by_name = registry().withLock([](ByName& all) { return all; });
  TORCH_CHECK_VALUE(by_name.contains(name), "transport is '", name, "'; expected one of ",
                    transports());
  return by_name.at(name)(opening);
}

bool has_peer_transport() {
#ifdef DISTCA_WITH_SM90
  return true;
#else
  return false;
#endif
}

std::unique_ptr<Transport> open_peer([[maybe_unused]] PeerOpening opening) {
#ifdef DISTCA_WITH_SM90
  return std::make_unique<peer::PeerTransport>(std::move(opening));
#else
  TORCH_CHECK(false, "distca was built without its peer transport");
#endif
}

}  // namespace distca::transport
