#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../model/plan.h"
#include "../model/ranges.h"

namespace distca::planner {

// The visiting tasks of one document on one server.
struct Visit {
  int64_t document;
  std::vector<Range> queries;  // of its tasks, in order
  RangeSet keys;               // the union of its tasks' keys
  bool is_kept;                // whether their inputs are
};

// The tasks of one server, in plan order.
std::span<const Task> tasks_of(const Plan& plan, int64_t server);

// Visits of one server, given its tasks in plan order.
std::vector<Visit> visits_of(const Pack& pack, const Mask& mask, std::span<const Task> tasks);

}  // namespace distca::planner
