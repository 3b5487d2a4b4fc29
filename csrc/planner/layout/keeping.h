#pragma once

#include "../model/options.h"
#include "../model/plan.h"

namespace distca::planner {

// Marks the tasks whose inputs their servers keep from the forward to the backward pass, so that
// they travel once: documents of which a server has most bytes first, as long as they fit in its
// kept_cap_bytes. Takes the bytes that do not travel again off the loads.
void keep_inputs(const Pack& pack, const PlanOptions& options, Plan& plan);

}  // namespace distca::planner
