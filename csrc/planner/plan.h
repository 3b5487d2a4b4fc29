#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "cost.h"
#include "pack.h"

namespace distca::planner {

// Query rows of one document, computed on one server with all the keys they may see.
struct Task {
  int64_t document;  // index into Pack::documents
  int64_t q_begin;   // positions in the document
  int64_t q_end;
  int64_t server;        // rank that computes it
  bool is_kept = false;  // whether the server keeps its inputs for the backward pass
};

// Bytes of one row that travels forward and backward together, one layer.
struct RowBytes {
  int64_t query = 0;  // q, grad_out, lse, delta out; out, lse, dq back
  int64_t key = 0;    // k, v twice out; dk, dv back
};

// A rank that computes tasks.
struct Server {
  double speed = 1;  // CostModel's seconds are those of speed 1; 0 serves nothing
  double cap_bytes = std::numeric_limits<double>::infinity();  // of visiting rows, one layer
};

// Two links of each rank, one direction: both carry at once.
struct Links {
  int64_t ranks_per_node = std::numeric_limits<int64_t>::max();  // consecutive ranks
  double bytes_per_second = 200e9;                               // to ranks of the same node
  double node_bytes_per_second = 200e9;                          // to ranks of other nodes

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
  RowBytes kept_bytes;          // of a row's inputs: what a server holds that keeps them
  double kept_cap_bytes = 0;    // of them, most that any server may keep for one layer
  Links links;
  // Excess of the slowest server's seconds, or link's, over the mean compute to be left alone.
  double tolerance = 0.005;

  double speed(int64_t rank) const { return servers.empty() ? 1.0 : servers[rank].speed; }
  double cap_bytes(int64_t rank) const {
    return servers.empty() ? std::numeric_limits<double>::infinity() : servers[rank].cap_bytes;
  }
};

// What one rank computes and moves under a plan.
struct Load {
  double seconds_home = 0;  // attention of its own tokens, at its own speed, or at 1 if that is 0
  double seconds = 0;       // attention of the tasks it serves, at its speed
  int64_t bytes_out = 0;    // RowBytes of its rows on other servers, whichever way they travel; of
                            // rows that are kept without their inputs, which travel once
  int64_t bytes_in = 0;     // RowBytes of other homes' rows here
  int64_t node_bytes_out = 0;  // part of bytes_out that goes to other nodes
  int64_t node_bytes_in = 0;   // part of bytes_in that comes from other nodes
  int64_t held_bytes = 0;      // of all visiting rows, its own among them: they arrive as well
};

// Tasks of a step for all ranks: pure data, equal on every rank.
struct Plan {
  int64_t num_ranks = 0;
  Mask mask;
  std::vector<Task> tasks;  // by (server, document, q_begin); none empty
  std::vector<Load> loads;  // [num_ranks]
  uint64_t digest = 0;      // of pack, mask and tasks
};

// Deterministic: equal inputs give equal plans on every rank and machine of one build. Throws
// std::invalid_argument for bad options, naming server and bytes where no plan within the memory
// caps is found.
Plan make_plan(const Pack& pack, const PlanOptions& options);

// Throws std::invalid_argument unless every query row of every document is covered exactly once by
// tasks in range, a server keeps inputs by document, and the digest is right.
void validate(const Plan& plan, const Pack& pack);

uint64_t digest_of(const Pack& pack, const Mask& mask, std::span<const Task> tasks);

}  // namespace distca::planner
