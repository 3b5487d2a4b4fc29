#pragma once

#include <cstdint>
#include <vector>

#include "layout.h"
#include "visits.h"

namespace distca::planner {

// Consecutive rows of a home, where they stand among the visiting rows of a server, and where the
// home finds their results: among the rows returned to it, those of its own server among that
// server's visiting rows.
struct RowPlace {
  int64_t home_row;  // of keys, or of queries: those do not count context
  int64_t visiting_row;
  int64_t result_row;
  int64_t num_rows;
};

// Rows of one document that one home sends to one server, for all tasks that the server has of it.
struct Delivery {
  int64_t server;
  std::vector<RowPlace> queries;
  std::vector<RowPlace> keys;
  bool is_kept;  // whether the server keeps q, k and v of these rows for the backward pass
};

// The same rows as another rank, their server, sees them: whose results it returns, and where to.
struct Return {
  int64_t home;
  std::vector<RowPlace> queries;
  std::vector<RowPlace> keys;
};

// What a rank sends and returns when rows go straight to their place in the others' memory.
struct Deliveries {
  std::vector<Delivery> sent;    // by server, in the order of its visiting rows
  std::vector<Return> returned;  // by home, in the order of its deliveries
  int64_t max_visiting_q = 0;    // rows, of the server that has most
  int64_t max_visiting_k = 0;
  int64_t max_returned_q = 0;  // rows, of the home that has most
  int64_t max_returned_k = 0;
};

// `plan` must be valid for `pack`. Linear in the plan of all ranks: for groups of one node.
Deliveries make_deliveries(const Pack& pack, const Plan& plan, int64_t rank);

}  // namespace distca::planner
