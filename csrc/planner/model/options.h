#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "cost.h"
#include "pack.h"

namespace distca::planner {

// Bytes of one row that travels forward and backward together, one layer.
struct RowBytes {
  int64_t query = 0;  // q, grad_out, lse, delta out; out, lse, dq back
  int64_t key = 0;    // k, v twice out; dk, dv back
};

// A rank that computes tasks.
struct Server {
  double speed = 1;  // CostModel's seconds are those of speed 1; 0 serves nothing
  double cap_bytes = std::numeric_limits<double>::infinity();  // of visiting rows, one layer
  // By how much a layer's work outside of attention, in both passes, takes longer than on the
  // fastest rank.
  double lag_seconds = 0;
};

// The two links of each rank, in one direction. Both carry rows at once.
struct Links {
  int64_t ranks_per_node = std::numeric_limits<int64_t>::max();  // consecutive ranks
  double bytes_per_second = 200e9;                               // to ranks of the same node
  double node_bytes_per_second = 200e9;                          // to ranks of other nodes
  double hidden_part = 0;  // seconds of transfers that other work hides, over the mean compute
  // Part of a rank's transfers that travels while no visiting task runs: less than 1 if rows travel
  // in parts.
  double exposed_part = 1;
  // Seconds that the transfers of a rank, if it has any, wait for other traffic in a pass.
  double forward_wait = 0, backward_wait = 0;
  double hidden_seconds = 0;  // more seconds of transfers that other work hides, in both passes
  // Seconds of a layer's other work in a pass, minus those of other traffic on the links. All
  // transfers of a rank must fit into its attention plus this time.
  double forward_room = std::numeric_limits<double>::infinity();
  double backward_room = std::numeric_limits<double>::infinity();
  // If any rows move, a layer takes longer by this part of its seconds: attention of the mean rank,
  // and `other_seconds` of other work, in both passes together.
  double moving_part = 0, other_seconds = 0;

  // Returns the seconds of transfers that other work hides, if ranks compute attention for `mean`
  // seconds on average.
  double hidden(double mean) const { return hidden_part * mean + hidden_seconds; }
  // Returns the seconds by which a layer takes longer if any rows move.
  double moving(double mean) const { return moving_part * (mean + other_seconds); }
  bool are_slow_between_nodes(int64_t num_ranks) const {
    return ranks_per_node < num_ranks && node_bytes_per_second < bytes_per_second;
  }
};

struct PlanOptions {
  Mask mask;
  CostModel cost;
  RowBytes row_bytes;
  RowBytes held_bytes;          // what a visiting row occupies on its server
  std::vector<Server> servers;  // [num_ranks], or empty: all of speed 1 without a cap
  RowBytes kept_bytes;          // of a row's inputs, on a server that keeps them
  double kept_cap_bytes = 0;    // the most bytes of inputs that a server may keep for one layer
  double kept_gain = 0;         // least fraction of a layer's seconds for which inputs are kept
  Links links;
  // Imbalance that is left alone: the excess of the slowest server's or link's seconds over the
  // mean compute.
  double tolerance = 0.005;

  double speed(int64_t rank) const { return servers.empty() ? 1.0 : servers[rank].speed; }
  double lag_seconds(int64_t rank) const {
    return servers.empty() ? 0.0 : servers[rank].lag_seconds;
  }
  double cap_bytes(int64_t rank) const {
    return servers.empty() ? std::numeric_limits<double>::infinity() : servers[rank].cap_bytes;
  }
};

// Throws std::invalid_argument naming the field, its value and what is allowed.
void validate(const PlanOptions& options, const Pack& pack);

}  // namespace distca::planner
