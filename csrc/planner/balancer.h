#pragma once

#include <vector>

#include "plan.h"

namespace distca::planner {

struct Candidate {
  std::vector<Task> tasks;  // in plan order
  std::vector<Load> loads;  // without seconds_home
  double seconds;           // of the slowest server's compute
  double makespan;          // of the slowest server's compute, ingress or egress
};

// The home cut itself if it is balanced. Otherwise compute comes first, over links that are never
// used for longer than max_link_ratio allows or than the slowest server would take if nothing
// moved. Where that is not enough, because links are slow or work does not divide, compute and
// links are weighed alike.
Candidate balance(const Pack& pack, const PlanOptions& options, const std::vector<Task>& home);

}  // namespace distca::planner
