#pragma once

#include <cstdint>

namespace distca::planner {

// The search's rules of thumb and their constants. Plans use the defaults; planner_ablation
// measures the gain of each rule. Least bytes are the bytes of the cheapest slice for a number of
// seconds. many_documents counts a surplus in items as large as the largest one of its donor.
struct Heuristics {
  // The search for the least limit, see balancer.cpp.
  int max_limits = 9;              // limits to try: the wanted one, then by bisection
  double close_enough = 1.01;      // ratio of makespan to infeasible limit that ends the search
  double least_bytes_slack = 1.2;  // slack in the bound on bytes that gives the first limit
  double near_limit = 1.1;         // ratio of slowest rank to limit up to which kUnbounded is tried
  double hopeless = 1.05;          // ratio of a node's seconds to its limit that ends an attempt
  double equal_makespans = 1.002;  // ratio of makespans up to which bytes decide
  double limit_slack = 2e-4;       // part of a limit kept free for surpluses too small for a task
  double min_relief = 1e-4;        // least relief of a slice worth a task, over the mean compute
  bool tries_unbounded = true;     // drop byte bounds that make a limit infeasible
  int64_t many_ranks = 512;        // pairings to try for fewer bytes: at most this / ranks
  int64_t many_items = 1 << 17;    // and this / items
  bool plans_for_links = true;     // fit split points to the links between nodes
  // Pairing of nodes, see node_balancer.cpp.
  double node_slack = 0.004;  // part of a node's limit kept free, since tiles do not divide
  // Pairing of ranks, see rank_balancer.cpp.
  int max_receivers = 8;          // receivers compared for a slice before the donor gives up
  bool fits_last_slice = true;    // the last slice goes to the least sufficient capacity
  int many_documents = 64;        // a larger surplus moves whole documents
  double max_bytes_ratio = 1.49;  // bytes into a receiver, over the least for its capacity
  // Cuts, see cutter.cpp and recut.cpp.
  bool splits_high = true;    // a document's last rows stay at home
  int num_split_points = 4;   // intervals between split points tried for the first slice
  double missing_part = 0.5;  // part of the least bytes of the missing target, charged as cost
  double keys_part = 0.7;     // part of the least bytes that the keys of a last slice take
  int num_near = 1;           // candidates on either side of the target
  int max_recut_slices = 8;   // of a document that is cut anew; 0: never cut anew
  int num_recut_points = 4;   // split points tried before those near the best
};

}  // namespace distca::planner
