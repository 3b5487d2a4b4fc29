#pragma once

#include <algorithm>
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
  // Returns the loads of all ranks that compute `seconds` [num_ranks], at speed 1, and of these
  // `visiting` for other homes' rows.
  std::vector<Load> loads(std::span<const double> seconds, std::span<const double> visiting) const;

 private:
  void send(int64_t home, int64_t server, int64_t num_bytes);

  const Pack& pack_;
  const PlanOptions& options_;
  std::vector<Load> ranks_;
  RangeSet keys_;  // scratch
};

// Weight of transfers where both passes are taken together. The forward pass has 2/7 of the seconds
// and 0.37 of the bytes, so a layer's transfers can be exposed although they take less than its
// seconds: 1 would leave that alone, 1.3 would forbid it.
constexpr double kTransferWeight = 1.15;

// Seconds of a rank's transfers, in (or out of) the rank: inputs travel before visiting tasks and
// results after them, so both count.
double link_seconds(int64_t bytes, int64_t node_bytes, const Links& links);
inline double link_seconds_in(const Load& load, const Links& links) {
  return link_seconds(load.bytes_in, load.node_bytes_in, links);
}
inline double link_seconds_out(const Load& load, const Links& links) {
  return link_seconds(load.bytes_out, load.node_bytes_out, links);
}
inline double link_seconds(const Load& load, const Links& links) {
  return std::max(link_seconds_in(load, links), link_seconds_out(load, links));
}

// Of every rank under `tasks`, which are in plan order. seconds are those of the server's speed;
// seconds_home is left 0.
std::vector<Load> loads_of(const Pack& pack, const PlanOptions& options,
                           std::span<const Task> tasks);

// Seconds of one layer's attention, forward and backward: ranks wait for each other in both passes.
// In a pass a rank computes its visiting tasks, and beside its transfers home tasks; other work
// hides `hidden_seconds` of them.
double makespan(const std::vector<Load>& loads, const Links& links, double hidden_seconds);

// Seconds of the slowest rank, both passes taken together.
double slowest(const std::vector<Load>& loads, const Links& links, double hidden_seconds);

// Bytes that all ranks move.
double total_bytes(const std::vector<Load>& loads);

}  // namespace distca::planner
