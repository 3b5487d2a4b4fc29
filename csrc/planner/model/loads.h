#pragma once

#include <span>
#include <vector>

#include "options.h"
#include "plan.h"
#include "ranges.h"

namespace distca::planner {

// What ranks send each other and hold, as tasks come and go. A row's bytes count as out at its home
// and as in at the server, whichever way they travel.
class Traffic {
 public:
  Traffic(const Pack& pack, const PlanOptions& options)
      : pack_(pack), options_(options), ranks_(pack.num_ranks) {}

  // Adds (times = 1) or takes back (times = -1) what the server needs for the given queries of one
  // document, which are all that it computes of it.
  void add(int64_t document, std::span<const Range> queries, int64_t server, int64_t times);

  bool same_node(int64_t a, int64_t b) const {
    return a / options_.links.ranks_per_node == b / options_.links.ranks_per_node;
  }
  const Load& operator[](int64_t rank) const { return ranks_[rank]; }  // without seconds
  // Returns the loads of all ranks that compute `seconds` [num_ranks], at speed 1.
  std::vector<Load> loads(std::span<const double> seconds) const;

 private:
  void send(int64_t home, int64_t server, int64_t num_bytes);

  const Pack& pack_;
  const PlanOptions& options_;
  std::vector<Load> ranks_;
  RangeSet keys_;  // scratch
};

// The part of a row's bytes that goes the same way, at most: keys and values go out for the forward
// and for the backward pass, their gradients come back; queries send 3 rows and get 2.
constexpr double kOneWay = 2.0 / 3;

// Seconds that the links of the rank are busy with what it takes in.
double link_seconds_in(const Load& load, const Links& links);

// Of every rank under `tasks`, which are in plan order. seconds are those of the server's speed;
// seconds_home is left 0.
std::vector<Load> loads_of(const Pack& pack, const PlanOptions& options,
                           std::span<const Task> tasks);

// Seconds of the slowest server, or link.
double makespan(const std::vector<Load>& loads, const Links& links);

// Bytes that all ranks move.
double total_bytes(const std::vector<Load>& loads);

}  // namespace distca::planner
