#pragma once

#include "assignment.h"

namespace distca::planner {

// A way to pair donors and receivers. None is best for all steps, so with few ranks the search
// tries several.
struct Pairing {
  int num_candidates = 8;     // receivers compared for a slice
  bool takes_turns = true;    // donors alternate, so that each meets large capacities
  bool bounds_bytes = true;   // bytes into a receiver are bounded by its capacity, see ByteBound
  double node_link_part = 1;  // part of the links between nodes that first slices are planned for
};

// Moves work from servers above the assignment's limit to others, and visiting rows off servers
// above their memory cap; receivers and links stay within their limits. The surplus of a node
// leaves first, then each node balances its own ranks. Returns false and gives up if a node keeps
// work for more than `most` seconds of its ranks.
bool schedule(Assignment& assignment, const Pairing& pairing, double most);

// Moves the surplus of nodes to other nodes. A donor rank need not be above the limit itself: the
// other ranks of its node fill it again.
void balance_nodes(Assignment& assignment, const Pairing& pairing);

// Moves work from donors, the ranks above the assignment's limit, to receivers, the ranks below it.
// Returns the bytes that each of the ranks may get in all, under the first byte bound.
std::vector<double> balance_ranks(Assignment& assignment, const Pairing& pairing, Range ranks);

// Returns the seconds that the donor should give in whole documents. That is its surplus if it
// takes many documents, if no budget is left for cuts, or if documents are too short to be worth a
// task each; otherwise 0.
double seconds_in_whole_documents(Assignment& assignment, int64_t donor, double surplus);

// Cuts every document with one home rank anew, in one row of slices for its receivers, if that
// moves fewer bytes: the first cut did not know the capacities of later receivers. No receiver's
// bytes rise above most_bytes [num_ranks].
void recut(Assignment& assignment, std::span<const double> most_bytes);

}  // namespace distca::planner
