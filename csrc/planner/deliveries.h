#pragma once

#include <cstdint>
#include <vector>

#include "layout.h"
#include "visits.h"

namespace distca::planner {

// Consecutive rows of a home, and where they stand among the visiting rows of a server.
struct RowPlace {
  int64_t home_row;  // of keys, or of queries: those do not count context
  int64_t visiting_row;
  int64_t num_rows;
};

// Rows of one document that one home sends to one server, for all tasks that the server has of it.
struct Delivery {
  int64_t server;
  int64_t flag;  // of the server: raised when these rows are there
  std::vector<RowPlace> queries;
  std::vector<RowPlace> keys;
  bool is_kept;  // whether the server keeps q, k and v of these rows for the backward pass
};

// What a rank sends when rows go straight to their place in the server's memory.
struct Deliveries {
  std::vector<Delivery> sent;  // by server, in the order of its visiting rows
  int64_t max_visiting_q = 0;  // rows, of the server that has most
  int64_t max_visiting_k = 0;
  int64_t max_flags = 0;
};

// Flags [first, last) of a server.
struct Flags {
  int64_t first = 0;
  int64_t last = 0;
};

// For each visit of a server the flags of its rows: one for each of their homes, by rank.
std::vector<Flags> flags_of(const Pack& pack, const std::vector<Visit>& visits);

// `plan` must be valid for `pack`. Linear in the plan of all ranks: for groups of one node.
Deliveries make_deliveries(const Pack& pack, const Plan& plan, int64_t rank);

}  // namespace distca::planner
