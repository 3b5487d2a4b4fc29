#pragma once

#include <cstdint>

#include "model/options.h"
#include "model/pack.h"
#include "model/plan.h"

namespace distca::planner {

// Returns the plan for a pack. Equal inputs give equal plans on every rank and machine of one
// build. Throws std::invalid_argument for bad options, and if it finds no plan within the memory
// caps; the error then names server and bytes.
Plan make_plan(const Pack& pack, const PlanOptions& options);

// Like make_plan, but a server may hold up to `rounds` times its cap, in about that many rounds,
// each within the cap. If rounds cannot hold that plan, returns a plan within the caps.
Plan plan_for_rounds(const Pack& pack, const PlanOptions& options, int64_t rounds);

}  // namespace distca::planner
