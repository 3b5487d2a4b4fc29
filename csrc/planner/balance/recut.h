#pragma once

#include <span>

#include "../model/options.h"
#include "assignment.h"
#include "slices.h"

namespace distca::planner {

// Cuts every document that lies on one rank anew, in one row of slices for the receivers that it
// was given to, where that takes fewer bytes: when the first slice was cut, nobody knew what room
// the next receivers would have. No receiver's bytes rise above most_bytes [num_ranks].
void recut(Assignment& assignment, const PlanOptions& options, const Prices& prices,
           std::span<const double> most_bytes);

}  // namespace distca::planner
