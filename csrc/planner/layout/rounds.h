#pragma once

#include <vector>

#include "../model/options.h"
#include "../model/plan.h"

namespace distca::planner {

// The plan's tasks in rounds, in each of which no server holds more than `cap_bytes` of visiting
// rows; tasks with too many queries are cut. Home tasks are of the first round. At least one round;
// one server may need fewer than another. Each has the plan's digest and covers a part of the pack.
// `held` is what a visiting row occupies, as in PlanOptions. Throws std::invalid_argument naming
// server and bytes where the keys of a single query take more.
std::vector<Plan> rounds_of(const Pack& pack, const Plan& plan, const RowBytes& held,
                            double cap_bytes);

}  // namespace distca::planner
