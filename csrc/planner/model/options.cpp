#include "options.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace distca::planner {
namespace {

constexpr double kMaxTotal = 4e18;  // of sums in 64 bits
constexpr int64_t kMaxLength = int64_t{1} << 31;

[[noreturn]] void reject(const std::string& what) {
  throw std::invalid_argument("plan: " + what);
}

[[noreturn]] void reject(const std::string& field, const std::string& value,
                         const std::string& expected) {
  throw std::invalid_argument("options: " + field + " is " + value + "; expected " + expected);
}

void check(const RowBytes& bytes, const std::string& name) {
  if (bytes.query < 0) reject(name + ".query", std::to_string(bytes.query), "0 or more");
  if (bytes.key < 0) reject(name + ".key", std::to_string(bytes.key), "0 or more");
}

void check(const Links& links) {
  const std::string positive = "a positive number";
  if (links.ranks_per_node < 1) {
    reject("links.ranks_per_node", std::to_string(links.ranks_per_node), "at least 1");
  }
  if (!(links.bytes_per_second > 0)) {
    reject("links.bytes_per_second", std::to_string(links.bytes_per_second), positive);
  }
  if (!(links.node_bytes_per_second > 0)) {
    reject("links.node_bytes_per_second", std::to_string(links.node_bytes_per_second), positive);
  }
}

void check(const std::vector<Server>& servers, int64_t num_ranks) {
  if (servers.empty()) return;
  if (static_cast<int64_t>(servers.size()) != num_ranks) {
    reject("servers", std::to_string(servers.size()) + " entries",
           "one for each of " + std::to_string(num_ranks) + " ranks, or none");
  }
  for (size_t i = 0; i < servers.size(); ++i) {
    const std::string name = "servers[" + std::to_string(i) + "].";
    if (!(servers[i].speed >= 0) || !std::isfinite(servers[i].speed)) {
      reject(name + "speed", std::to_string(servers[i].speed), "0 or a positive number");
    }
    if (!(servers[i].cap_bytes >= 0)) {
      reject(name + "cap_bytes", std::to_string(servers[i].cap_bytes), "0 or more");
    }
  }
  const bool any = std::any_of(servers.begin(), servers.end(),
                               [](const Server& server) { return server.speed > 0; });
  if (!any) reject("servers", "without any speed above 0", "at least one that computes");
}

// Keeps every count of pairs and bytes below 2^62.
void check_size(const Pack& pack, const PlanOptions& options) {
  double tokens = 0;
  for (const Document& document : pack.documents) {
    if (document.length > kMaxLength) {
      reject("document " + std::to_string(document.id) + " has " + std::to_string(document.length) +
             " tokens; expected at most 2^31");
    }
    tokens += static_cast<double>(document.length);
  }
  const double ranks = static_cast<double>(pack.num_ranks);
  for (const RowBytes& bytes : {options.row_bytes, options.held_bytes, options.kept_bytes}) {
    const double most = static_cast<double>(bytes.query) + static_cast<double>(bytes.key) * ranks;
    if (tokens * most > kMaxTotal) {
      reject("row_bytes",
             std::to_string(bytes.query) + " a query and " + std::to_string(bytes.key) + " a key",
             "less than 4e18 bytes for all " + std::to_string(tokens) + " tokens together");
    }
  }
}

}  // namespace

void validate(const PlanOptions& options, const Pack& pack) {
  validate(options.mask);
  validate(options.cost);
  check(options.row_bytes, "row_bytes");
  check(options.held_bytes, "held_bytes");
  check(options.kept_bytes, "kept_bytes");
  if (!(options.kept_cap_bytes >= 0)) {
    reject("kept_cap_bytes", std::to_string(options.kept_cap_bytes), "0 or more");
  }
  check(options.links);
  check(options.servers, pack.num_ranks);
  if (!(options.tolerance >= 0) || !std::isfinite(options.tolerance)) {
    reject("tolerance", std::to_string(options.tolerance), "0 or a positive number");
  }
  check_size(pack, options);
}

}  // namespace distca::planner
