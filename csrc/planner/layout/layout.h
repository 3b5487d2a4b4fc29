#pragma once

#include <cstdint>
#include <vector>

#include "../model/options.h"
#include "../model/plan.h"
#include "core/movement.h"
#include "core/task.h"

namespace distca::planner {

// One rank's share of a plan.
//
// A home task has its query rows and all their keys in this rank's own rows, contiguous and in
// document order; it is read in place. Every other task of this server is visiting: all its rows
// arrive by dispatch, even those whose home is this rank, which sends them to itself. Home tasks
// stand in two lists: early tasks run while rows arrive, and late tasks run while results travel
// home. No two tasks of different lists share rows. If a rank has no visiting tasks but takes
// results (Results::kTaken), all its home tasks are late, so that it is ready for the first
// results. If it has nothing to do between the two lists, all its home tasks are early.
//
// A document's keys reach a server once, however many tasks read them.
// Visiting rows are ordered by (document, position): for queries over all visiting tasks, for keys
// over the union of their key ranges.
struct Layout {
  int64_t rank = 0;
  int64_t num_ranks = 0;
  int64_t num_home_rows = 0;     // of keys
  int64_t num_context_rows = 0;  // of them without queries

  Movement movement;
  std::vector<PlacedTask> early_tasks, late_tasks;  // by q_row; rows of this rank
  std::vector<PlacedTask> visiting_tasks;           // by q_row; visiting rows
};

// How results come home: their server writes them without this rank's help, or this rank's stream
// takes them between home tasks.
enum class Results { kWritten, kTaken };

// Returns one rank's layout. `plan` must be valid for `pack` (see validate). If the rank has
// visiting tasks, about `early_part` of the work of its home tasks is early. Throws
// std::invalid_argument for a bad rank.
Layout make_layout(const Pack& pack, const Plan& plan, int64_t rank,
                   Results results = Results::kTaken, double early_part = 0.5);

// Returns the rows that a rank sends and those that visit it. `plan` must be valid for `pack`.
// Linear in the plan of all ranks, because places depend on the rows of other ranks.
Movement movement_of(const Pack& pack, const Plan& plan, int64_t rank);

// Deals the plan's tasks out to rounds, and returns a plan for each round, at least one. In a
// round, no server holds more than `cap_bytes` of visiting rows; tasks with too many queries are
// cut. Home tasks belong to the first round. Servers may need different numbers of rounds. Each
// plan has the digest of the whole plan and covers a part of the pack. `held` is what a visiting
// row occupies, as in PlanOptions. Throws std::invalid_argument naming server and bytes if the keys
// of a single query take more.
std::vector<Plan> rounds_of(const Pack& pack, const Plan& plan, const RowBytes& held,
                            double cap_bytes);

// Marks the tasks whose inputs their servers keep from the forward to the backward pass, so that
// they travel once. A server keeps the documents with most bytes first, as long as they fit in
// kept_cap_bytes. Subtracts the bytes that do not travel again from the loads. Returns the makespan
// with kept inputs.
double keep_inputs(const Pack& pack, const PlanOptions& options, double hidden_seconds, Plan& plan);

}  // namespace distca::planner
