#pragma once

#include <span>

#include "assignment.h"

namespace distca::planner {

// Cuts every document with one home rank anew, in one row of slices for its receivers, if that
// moves fewer bytes: the first cut did not know the capacities of later receivers. No receiver's
// bytes rise above most_bytes [num_ranks].
void recut(Assignment& assignment, std::span<const double> most_bytes);

}  // namespace distca::planner
