#pragma once

#include <vector>

#include "assignment.h"
#include "problem.h"

namespace distca::planner {

// Returns the Budget of one search. It bounds planning time to about the time of a step's
// attention, wherever documents lie.
Budget budget_for(const Problem& problem);

// Returns the tasks that minimise the makespan, and among those move few bytes, in plan order.
// Returns the items at home if they are balanced. All attempts of the search share the budget; once
// it is spent, the search returns its best plan. Throws std::invalid_argument if it finds no tasks
// within the memory caps.
std::vector<Task> balance(const Problem& problem, Budget& budget);

}  // namespace distca::planner
