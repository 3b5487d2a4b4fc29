#include "options.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace distca::planner {
namespace {

constexpr double kMaxTotal = 4e18;  // of sums in 64 bits
constexpr int64_t kMaxLength = int64_t{1} << 31;

void check(const RowBytes& bytes, const char* name) {
  require(bytes.query >= 0, "options: ", name, ".query is ", bytes.query, "; expected 0 or more");
  require(bytes.key >= 0, "options: ", name, ".key is ", bytes.key, "; expected 0 or more");
}

void check(const Links& links) {
  require(links.ranks_per_node >= 1, "options: links.ranks_per_node is ", links.ranks_per_node,
          "; expected at least 1");
  require(links.bytes_per_second > 0, "options: links.bytes_per_second is ", links.bytes_per_second,
          "; expected a positive number");
  require(links.node_bytes_per_second > 0, "options: links.node_bytes_per_second is ",
          links.node_bytes_per_second, "; expected a positive number");
  require(links.exposed_part > 0 && links.exposed_part <= 1, "options: links.exposed_part is ",
          links.exposed_part, "; expected a positive number, at most 1");
  for (const double wait : {links.forward_wait, links.backward_wait}) {
    require(wait >= 0 && std::isfinite(wait), "options: links have a wait of ", wait,
            " seconds; expected 0 or a positive number");
  }
  for (const double room : {links.forward_room, links.backward_room}) {
    require(!std::isnan(room), "options: links have a room of NaN seconds; expected a number");
  }
  require(links.hidden_part >= 0, "options: links.hidden_part is ", links.hidden_part,
          "; expected 0 or a positive number");
  require(links.hidden_seconds >= 0, "options: links.hidden_seconds is ", links.hidden_seconds,
          "; expected 0 or a positive number");
  require(links.moving_part >= 0 && std::isfinite(links.moving_part),
          "options: links.moving_part is ", links.moving_part, "; expected 0 or a positive number");
  require(links.other_seconds >= 0 && std::isfinite(links.other_seconds),
          "options: links.other_seconds is ", links.other_seconds,
          "; expected 0 or a positive number");
}

void check(const std::vector<Server>& servers, int64_t num_ranks) {
  if (servers.empty()) return;
  require(static_cast<int64_t>(servers.size()) == num_ranks, "options: servers is ", servers.size(),
          " entries; expected one for each of ", num_ranks, " ranks, or none");
  bool any = false;
  for (size_t i = 0; i < servers.size(); ++i) {
    const auto& [speed, cap_bytes, lag_seconds] = servers[i];
    require(speed >= 0 && std::isfinite(speed), "options: servers[", i, "].speed is ", speed,
            "; expected 0 or a positive number");
    require(cap_bytes >= 0, "options: servers[", i, "].cap_bytes is ", cap_bytes,
            "; expected 0 or more");
    require(lag_seconds >= 0 && std::isfinite(lag_seconds), "options: servers[", i,
            "].lag_seconds is ", lag_seconds, "; expected 0 or a positive number");
    any = any || speed > 0;
  }
  require(any,
          "options: servers is without any speed above 0; expected at least one that computes");
}

// Keeps every count of pairs and bytes below 2^62.
void check_size(const Pack& pack, const PlanOptions& options) {
  double tokens = 0;
  for (const Document& document : pack.documents) {
    require(document.length <= kMaxLength, "plan: document ", document.id, " has ", document.length,
            " tokens; expected at most 2^31");
    tokens += static_cast<double>(document.length);
  }
  const double ranks = static_cast<double>(pack.num_ranks);
  for (const RowBytes& bytes : {options.row_bytes, options.held_bytes, options.kept_bytes}) {
    const double most = static_cast<double>(bytes.query) + static_cast<double>(bytes.key) * ranks;
    require(tokens * most <= kMaxTotal, "options: row_bytes is ", bytes.query, " a query and ",
            bytes.key, " a key; expected less than 4e18 bytes for all ", tokens,
            " tokens together");
  }
}

}  // namespace

void validate(const PlanOptions& options, const Pack& pack) {
  validate(options.mask);
  validate(options.cost);
  check(options.row_bytes, "row_bytes");
  check(options.held_bytes, "held_bytes");
  check(options.kept_bytes, "kept_bytes");
  require(options.kept_cap_bytes >= 0, "options: kept_cap_bytes is ", options.kept_cap_bytes,
          "; expected 0 or more");
  require(options.kept_gain >= 0, "options: kept_gain is ", options.kept_gain,
          "; expected 0 or more");
  check(options.links);
  check(options.servers, pack.num_ranks);
  require(options.tolerance >= 0 && std::isfinite(options.tolerance), "options: tolerance is ",
          options.tolerance, "; expected 0 or a positive number");
  check_size(pack, options);
}

}  // namespace distca::planner
