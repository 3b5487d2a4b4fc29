#pragma once

#include <span>
#include <vector>

#include "plan.h"

namespace distca::planner {

// Seconds and bytes of every rank under `tasks`, which are in plan order; seconds_home is left 0.
// A row's bytes count as out at its home and as in at the server, whichever way they travel.
std::vector<Load> loads_of(const Pack& pack, const PlanOptions& options,
                           std::span<const Task> tasks);

}  // namespace distca::planner
