#pragma once

#include "../model/options.h"
#include "assignment.h"
#include "slices.h"

namespace distca::planner {

// Ways to pair donors and receivers. None is best for all steps; where ranks are few, several are
// tried.
struct Style {
  int num_roomiest = 8;     // receivers of which the one that a slice fills best gets it
  bool takes_turns = true;  // donors give by turns, so that all get large rooms for dear rows
  bool is_fair = true;      // no receiver gets more bytes than its room is worth
  int num_emptied = 0;   // ranks of a receiving node, at most, which then take the largest slices
  double node_part = 1;  // of what links between nodes could take away, what is planned for
};

// Moves work off the servers above the assignment's limit to servers and over links that stay
// within it, and visiting rows off servers above their memory cap. What a node has too much of goes
// to other nodes first, then each node balances its own ranks. Returns whether all are within their
// limits.
bool schedule(Assignment& assignment, const Pack& pack, const PlanOptions& options,
              const Prices& prices, const Style& style);

}  // namespace distca::planner
