#pragma once

#include <span>

#include "../model/options.h"
#include "assignment.h"
#include "slices.h"

namespace distca::planner {

// Cuts every document with one home rank anew, in one row of slices for its receivers, if that
// moves fewer bytes: the first cut did not know the capacities of later receivers. No receiver's
// bytes rise above max_bytes [num_ranks].
void recut(Assignment& assignment, const PlanOptions& options, const Weights& weights,
           std::span<const double> max_bytes);

}  // namespace distca::planner
