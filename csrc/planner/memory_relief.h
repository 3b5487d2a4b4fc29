#pragma once

#include "assignment.h"
#include "slices.h"

namespace distca::planner {

// Gives rows that visit their own home, because their keys lie elsewhere, to the servers with most
// memory left until the donor's cap is kept, or nobody has place.
void relieve_memory(Assignment& assignment, const Pack& pack, const PlanOptions& options,
                    const Prices& prices, int64_t donor);

}  // namespace distca::planner
