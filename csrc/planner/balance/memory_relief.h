#pragma once

#include "../model/options.h"
#include "assignment.h"
#include "slices.h"

namespace distca::planner {

// Moves rows that visit their own home, because their keys are elsewhere, to the servers with most
// memory left. Stops when the donor keeps to its cap, or when no server has memory left.
void relieve_memory(Assignment& assignment, const Pack& pack, const PlanOptions& options,
                    const Weights& weights, int64_t donor);

}  // namespace distca::planner
