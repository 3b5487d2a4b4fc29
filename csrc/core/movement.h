#pragma once

#include <cstdint>
#include <vector>

#include "rows.h"

// How rows move between their homes and the servers that compute with them.
namespace distca {

// Appends rows [first, first + length) to `runs`. Extends the last run if they follow it.
void append_run(int64_t first, int64_t length, std::vector<Run>& runs);

// The place of consecutive rows at their home, among the visiting rows of a server, and among the
// results that return to the home. For rows that the home itself serves, result_row counts its own
// visiting rows.
struct RowPlace {
  int64_t home_row;  // among the home's keys or queries; queries do not count context
  int64_t visiting_row;
  int64_t result_row;
  int64_t num_rows;
};

// Rows of one document that a home sends to a server, for all of the document's tasks there.
struct Delivery {
  int64_t peer;  // the rank at the other end
  std::vector<RowPlace> queries;
  std::vector<RowPlace> keys;
  bool is_kept;  // whether the server keeps q, k and v of these rows for the backward pass
};

// The rows that a rank sends as their home and receives as their server. Results return the same
// way.
struct Movement {
  std::vector<Delivery> sent;  // by server, in the order of its visiting rows; includes this rank
  std::vector<Delivery> received;  // by home, in the order of its deliveries; excludes this rank
  int64_t max_visiting_q = 0;      // rows of the server with most
  int64_t max_visiting_k = 0;
  int64_t max_returned_q = 0;  // rows of the home with most
  int64_t max_returned_k = 0;
};

// Returns whether this rank, or a server of its rows, keeps any rows.
bool keeps_any(const Movement& movement);

// Returns all deliveries that this rank computes, its own included, by home.
[[gnu::visibility("default")]] std::vector<const Delivery*> visitors(const Movement& movement,
                                                                     int64_t rank);

// Visiting rows whose inputs the server keeps, in order.
struct VisitingRuns {
  std::vector<Run> queries, keys;
};
VisitingRuns kept_runs(const Movement& movement, int64_t rank);

// Consecutive home rows that the same runs contain, and the slots of the first row, one per run.
// Slots number the rows of all runs in sequence.
struct SharedRows {
  int64_t first;
  int64_t length;
  std::vector<int32_t> slots;
};

// Returns all home rows that at least one run contains, in order.
std::vector<SharedRows> shared_rows(const std::vector<Run>& runs);

// Home rows whose keys went to servers, and the places of their gradients (see RowPlace).
struct KeyGradients {
  struct Source {
    int64_t server;
    int64_t result_row;
  };
  int64_t home_row;
  int64_t num_rows;
  std::vector<Source> sources;  // summed in this order: by server, at most one of each
};
std::vector<KeyGradients> key_gradients(const Movement& movement);

// Returns the ranks of a rank's node. Nodes hold `ranks_per_node` consecutive ranks, the last one
// perhaps fewer.
Range node_of(int64_t rank, int64_t num_ranks, int64_t ranks_per_node);

enum class Reach { kInside, kBetween };

// The part of a movement whose peers are on one node (kInside; they are numbered from its first
// rank), or on all other nodes (kBetween).
struct Part {
  Movement movement;
  // One entry for each result of a key. home_row is its place among the results of all sent keys,
  // in the order of the deliveries.
  std::vector<KeyGradients> key_results;
};
Part part_of(const Movement& movement, Range node, Reach reach);

}  // namespace distca
