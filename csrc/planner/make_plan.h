#pragma once

#include <cstdint>

#include "model/options.h"
#include "model/pack.h"
#include "model/plan.h"

namespace distca::planner {

// Deterministic: equal inputs give equal plans on every rank and machine of one build. Throws
// std::invalid_argument for bad options, naming server and bytes where no plan within the memory
// caps is found.
Plan make_plan(const Pack& pack, const PlanOptions& options);

// As make_plan, but a server may hold up to `rounds` times its cap, in rounds within it; in about
// as many. Where rounds cannot hold that plan, one within the caps.
Plan plan_for_rounds(const Pack& pack, const PlanOptions& options, int64_t rounds);

}  // namespace distca::planner
