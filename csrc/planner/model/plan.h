#pragma once

#include <cstdint>
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

// What one rank computes and moves under a plan.
struct Load {
  double seconds_home = 0;  // attention of its own tokens, at its own speed, or at 1 if that is 0
  double seconds = 0;       // attention of the tasks it serves, at its speed
  double seconds_visiting = 0;  // part of `seconds` that needs rows of other homes
  double seconds_lag = 0;       // by which its other work delays its tasks, see Server
  // RowBytes of its rows on other servers, out and back. Inputs that a server keeps travel once,
  // and count once.
  int64_t bytes_out = 0;
  int64_t bytes_in = 0;        // RowBytes of other homes' rows here
  int64_t node_bytes_out = 0;  // part of bytes_out that goes to other nodes
  int64_t node_bytes_in = 0;   // part of bytes_in that comes from other nodes
  int64_t held_bytes = 0;      // of all visiting rows, also those that it sends to itself
  int64_t kept_bytes = 0;      // of the inputs that it keeps for the backward pass
};

// Tasks of a step for all ranks: pure data, equal on every rank.
struct Plan {
  int64_t num_ranks = 0;
  Mask mask;
  std::vector<Task> tasks;  // by (server, document, q_begin); none empty
  std::vector<Load> loads;  // [num_ranks]
  uint64_t digest = 0;      // of pack, mask and tasks
};

// Returns the plan of these tasks, with loads of 0. Clears is_kept of home tasks, so that parts of
// a kept task may become home tasks. Throws as validate does.
Plan plan_of_tasks(const Pack& pack, const Mask& mask, std::vector<Task> tasks);

// Throws std::invalid_argument unless every query row of every document is covered exactly once by
// tasks in range, a server keeps inputs by document, and the digest is right.
void validate(const Plan& plan, const Pack& pack);

uint64_t digest_of(const Pack& pack, const Mask& mask, std::span<const Task> tasks);

}  // namespace distca::planner
