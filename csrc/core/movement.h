#pragma once

#include <cstdint>
#include <vector>

#include "rows.h"

// How rows move between their homes and the servers that compute with them. Without torch.
namespace distca {

// Appends rows [first, first + length), to the last run if they follow it.
void append_run(int64_t first, int64_t length, std::vector<Run>& runs);

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
  int64_t peer;  // the rank at the other end
  std::vector<RowPlace> queries;
  std::vector<RowPlace> keys;
  bool is_kept;  // whether the server keeps q, k and v of these rows for the backward pass
};

// The rows that one rank sends as their home, and those that visit it as their server. Results
// travel the same ways back.
struct Movement {
  std::vector<Delivery> sent;      // by server, in the order of its visiting rows; to itself too
  std::vector<Delivery> received;  // by home, in the order of its deliveries; from other ranks only
  int64_t max_visiting_q = 0;      // rows, of the server that has most
  int64_t max_visiting_k = 0;
  int64_t max_returned_q = 0;  // rows, of the home that has most
  int64_t max_returned_k = 0;
};

// Whether this rank, or a server of its rows, keeps any.
bool keeps_any(const Movement& movement);

// Returns all deliveries to this rank as a server, by home: those of other ranks, and its own.
[[gnu::visibility("default")]] std::vector<const Delivery*> visitors(const Movement& movement,
                                                                     int64_t rank);

// Visiting rows whose inputs their server keeps, or the others, in order.
struct VisitingRuns {
  std::vector<Run> queries, keys;
};
VisitingRuns visiting_runs(const Movement& movement, int64_t rank, bool are_kept);

// Consecutive home rows that the same runs hold, and the slots of the first in each of them. Slots
// count the rows of the runs one after the other.
struct SharedRows {
  int64_t first;
  int64_t length;
  std::vector<int32_t> slots;
};

// Returns all home rows that any run holds, in order.
std::vector<SharedRows> shared_rows(const std::vector<Run>& runs);

// Home rows whose keys went to servers, and where their gradients are: see RowPlace.
struct KeyGradients {
  struct Source {
    int64_t server;
    int64_t result_row;
  };
  int64_t home_row;
  int64_t num_rows;
  std::vector<Source> sources;  // added up in this order: by server, one of each
};
std::vector<KeyGradients> key_gradients(const Movement& movement);

}  // namespace distca
