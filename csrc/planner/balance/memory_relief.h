#pragma once

#include "assignment.h"

namespace distca::planner {

// Moves rows that visit their own home, because their keys are elsewhere, to the servers with most
// memory left. Stops when the donor keeps to its cap, or when no server has memory left.
void relieve_memory(Assignment& assignment, int64_t donor);

}  // namespace distca::planner
