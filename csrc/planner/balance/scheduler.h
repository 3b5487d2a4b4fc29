#pragma once

#include "assignment.h"

namespace distca::planner {

// A way to pair donors and receivers. None is best for all steps, so with few ranks the search
// tries several.
struct Pairing {
  int num_candidates = 8;     // receivers compared for a slice
  bool takes_turns = true;    // donors alternate, so that each meets large capacities
  bool bounds_bytes = true;   // bytes into a receiver are bounded by its capacity, see ByteBound
  int max_emptied = 0;        // most ranks of a receiving node to empty for large slices
  double node_link_part = 1;  // part of the links between nodes that first slices are planned for
};

// Moves work from servers above the assignment's limit to others, and visiting rows off servers
// above their memory cap; receivers and links stay within their limits. The surplus of a node
// leaves first, then each node balances its own ranks.
void schedule(Assignment& assignment, const Pairing& pairing);

}  // namespace distca::planner
