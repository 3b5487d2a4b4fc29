#include "registry.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>

#include "process_group/process_group.h"

namespace distca::transport {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, OpenTransport> by_name{{"process_group", [](const Opening& opening) {
                                                  return make_process_group_transport(
                                                      opening.group, opening.patience,
                                                      opening.failures, opening.timeout_s);
                                                }}};
};

Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

void add_transport(const std::string& name, OpenTransport open) {
  std::lock_guard lock(registry().mutex);
  registry().by_name[name] = open;
}

std::vector<std::string> transports() {
  std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, open] : registry().by_name) names.push_back(name);
  return names;
}

std::unique_ptr<Transport> open_transport(const std::string& name, const Opening& opening) {
  const OpenTransport open = [&]() -> OpenTransport {
    std::lock_guard lock(registry().mutex);
    const auto found = registry().by_name.find(name);
    return found == registry().by_name.end() ? nullptr : found->second;
  }();
  TORCH_CHECK_VALUE(open != nullptr, "transport is '", name, "'; expected one of ", transports());
  return open(opening);
}

}  // namespace distca::transport
