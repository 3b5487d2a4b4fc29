#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "../model/plan.h"
#include "core/task.h"
#include "visits.h"

namespace distca::planner {

// Rows on their way from homes to servers, as one rank sees them.
struct Movement {
  std::vector<int64_t> send_q_rows, recv_q_rows;  // [num_ranks] rows to and from each peer
  std::vector<int64_t> send_k_rows, recv_k_rows;  // [num_ranks]

  // Home rows of the sent slots, in order; those of queries do not count context.
  std::vector<Run> send_q_runs, send_k_runs;

  // Received slots of the visiting rows that move, in order; empty when slot i is the i-th of them.
  std::vector<Run> q_slot_runs, k_slot_runs;
};

// Where servers keep inputs of visiting rows from the forward to the backward pass.
struct Keeping {
  struct VisitingRows {
    std::vector<Run> queries, keys;
  };
  Movement again;            // for the backward pass: of inputs that are not kept
  VisitingRows moved, kept;  // which visiting rows these are, in order, and which the others
};

// One rank's share of a plan.
//
// A home task has its query rows and all their keys in this rank's own rows, contiguous and in
// document order; it is read in place. Every other task of this server is visiting: all its rows
// arrive by dispatch, rows that this rank itself is home to included (it sends them to itself).
// Home tasks stand in two lists: early ones are for the time in which rows arrive, late ones for
// that in which results travel home. No two tasks of different lists share rows. A rank that has
// nothing to do between them has early ones only.
//
// Rows travel in slots. Sent slots are ordered by peer, then by the order in which the peer's
// visiting tasks list them; received slots by peer, then by this server's order, so the tables of
// any two ranks transpose. A document's keys reach a server once, however many tasks read them.
// Visiting rows are ordered by (document, position): for queries over all visiting tasks, for keys
// over the union of their key ranges.
struct Layout : Movement {
  int64_t rank = 0;
  int64_t num_ranks = 0;
  int64_t num_home_rows = 0;     // of keys
  int64_t num_context_rows = 0;  // of them without queries

  std::optional<Keeping> keeping;  // where this rank keeps any inputs, or servers of its rows do

  std::vector<PlacedTask> early_tasks, late_tasks;  // by q_row; rows of this rank
  std::vector<PlacedTask> visiting_tasks;           // by q_row; visiting rows
};

// How results come home: written by their server alone, or taken in between home tasks, where the
// rank's own stream has a part in it.
enum class Results { kWritten, kTaken };

// `plan` must be valid for `pack` (see validate). Throws std::invalid_argument for a bad rank.
Layout make_layout(const Pack& pack, const Plan& plan, int64_t rank,
                   Results results = Results::kTaken);

// Does the same with home runs that are known already, so that a plan of many rounds finds them
// only once for a rank.
Layout make_layout(const Pack& pack, const Plan& plan, const HomeRuns& home, Results results);

}  // namespace distca::planner
