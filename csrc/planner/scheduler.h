#pragma once

#include <vector>

#include "plan.h"

namespace distca::planner {

// Every segment computed where its rows live, in plan order.
std::vector<Task> home_cut(const Pack& pack);

struct Schedule {
  std::vector<Task> tasks;  // by (server, document, q_begin)
  bool balanced = false;    // every server's seconds are within Limits::seconds
};

// What a move is chosen for: few bytes for the seconds moved, or many seconds moved at once, which
// leaves less room unused where work divides badly.
enum class Preference { kFewBytes, kFullServers };

struct Limits {
  double seconds;       // of compute, per server
  double link_seconds;  // of ingress and of egress, per server
};

// Moves work off the servers above the limit to servers and over links that stay within theirs.
// `home` and `home_loads` are the home cut and its loads.
Schedule schedule(const Pack& pack, const PlanOptions& options, const std::vector<Task>& home,
                  const std::vector<Load>& home_loads, const Limits& limits, Preference preference);

}  // namespace distca::planner
