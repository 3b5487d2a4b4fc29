#pragma once

#include <vector>

#include "plan.h"

namespace distca::planner {

// The plan's tasks in rounds, in each of which no server holds more than `cap_bytes` of visiting
// rows; tasks with too many queries are cut. Home tasks are of the first round. At least one round;
// one server may need fewer than another. Each has the plan's digest and covers a part of the pack.
// `held` is what a visiting row occupies, as in PlanOptions. Throws std::invalid_argument naming
// server and bytes where the keys of a single query take more.
std::vector<Plan> rounds_of(const Pack& pack, const Plan& plan, const RowBytes& held,
                            double cap_bytes);

// As make_plan, but a server may hold up to `rounds` times its cap, in rounds within it; in about
// as many. Where rounds cannot hold that plan, one within the caps.
Plan plan_for_rounds(const Pack& pack, const PlanOptions& options, int64_t rounds);

}  // namespace distca::planner
