#pragma once

#include <vector>

#include "../model/options.h"
#include "../model/plan.h"
#include "assignment.h"

namespace distca::planner {

// Tasks, in plan order, whose slowest server or link is early, then few bytes; the home cut where
// that is balanced. Throws std::invalid_argument where no tasks within the memory caps are found.
std::vector<Task> balance(const Pack& pack, const PlanOptions& options, const Home& home);

}  // namespace distca::planner
