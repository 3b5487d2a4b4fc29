#pragma once

#include <vector>

#include "../model/options.h"
#include "../model/plan.h"
#include "heuristics.h"
#include "home_cut.h"

namespace distca::planner {

// Returns the tasks that minimise the makespan, and among those move few bytes, in plan order.
// Returns the home cut if it is balanced. Throws std::invalid_argument if it finds no tasks within
// the memory caps.
std::vector<Task> balance(const Pack& pack, const PlanOptions& options, const HomeCut& home,
                          const Heuristics& heuristics = {});

}  // namespace distca::planner
