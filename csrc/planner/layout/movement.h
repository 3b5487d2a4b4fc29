#pragma once

#include <cstdint>

#include "../model/plan.h"
#include "core/movement.h"

namespace distca::planner {

// Returns the rows that a rank sends and those that visit it. `plan` must be valid for `pack`.
// Linear in the plan of all ranks, because places depend on the rows of other ranks.
Movement movement_of(const Pack& pack, const Plan& plan, int64_t rank);

}  // namespace distca::planner
