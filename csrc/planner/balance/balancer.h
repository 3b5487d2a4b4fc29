#pragma once

#include <vector>

#include "problem.h"

namespace distca::planner {

// Returns the tasks that minimise the makespan, and among those move few bytes, in plan order.
// Returns the items at home if they are balanced. Throws std::invalid_argument if it finds no tasks
// within the memory caps.
std::vector<Task> balance(const Problem& problem);

}  // namespace distca::planner
