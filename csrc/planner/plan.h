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
  int64_t server;  // rank that computes it
};

// Bytes of one row that travels forward and backward together, one layer.
struct RowBytes {
  int64_t query = 0;  // q, grad_out, lse, delta out; out, lse, dq back
  int64_t key = 0;    // k, v twice out; dk, dv back
};

struct PlanOptions {
  Mask mask;
  CostModel cost;
  RowBytes row_bytes;
  double link_bytes_per_second = 200e9;  // one direction, per rank
  double tolerance = 0.02;  // excess of the slowest server's seconds over the mean to be left alone

  // Compute is balanced first while no rank sends or receives for longer than this many times the
  // mean compute, nor than the slowest rank would compute if nothing moved. Beyond that compute and
  // links are weighed alike: 1 gives the plan whose slowest compute or link is fastest.
  double max_link_ratio = std::numeric_limits<double>::infinity();
};

// What one rank computes and moves under a plan.
struct Load {
  double seconds_home = 0;  // attention of its own tokens, nothing moved
  double seconds = 0;       // attention of the tasks it serves
  int64_t bytes_out = 0;    // RowBytes of its rows on other servers, whichever way they travel
  int64_t bytes_in = 0;     // RowBytes of other homes' rows here
};

// Tasks of a step for all ranks: pure data, equal on every rank.
struct Plan {
  int64_t num_ranks = 0;
  Mask mask;
  std::vector<Task> tasks;  // by (server, document, q_begin); none empty
  std::vector<Load> loads;  // [num_ranks]
  uint64_t digest = 0;      // of pack, mask and tasks
};

// Deterministic: equal inputs give equal plans on every rank and machine of one build.
Plan make_plan(const Pack& pack, const PlanOptions& options);

// Throws std::invalid_argument unless every query row of every document is covered exactly once by
// tasks in range and the digest is right.
void validate(const Plan& plan, const Pack& pack);

uint64_t digest_of(const Pack& pack, const Mask& mask, std::span<const Task> tasks);

}  // namespace distca::planner
