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
  // Returns the loads of ranks that compute `seconds` [num_ranks], at speed 1. `visiting` is the
  // part of these that needs rows of other homes.
  std::vector<Load> loads(std::span<const double> seconds, std::span<const double> visiting) const;

 private:
  void send(int64_t home, int64_t server, int64_t num_bytes);

  const Pack& pack_;
  const PlanOptions& options_;
  std::vector<Load> ranks_;
  RangeSet keys_;  // scratch
};

// Weight of transfers where both passes are taken together. The forward pass has 2/7 of the seconds
// and 0.37 of the bytes, so transfers can be exposed in it although they take less than the layer's
// seconds. A weight of 1 would ignore this, and 1.3 would rule it out.
constexpr double kTransferWeight = 1.15;

// Returns the seconds of a rank's transfers for the bytes that it receives (or sends). Inputs
// travel before visiting tasks and results after them, so both count.
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

// Returns the load of every rank under `tasks`, which are in plan order. `seconds` take the
// server's speed into account; seconds_home is left 0.
std::vector<Load> loads_of(const Pack& pack, const PlanOptions& options,
                           std::span<const Task> tasks);

// Returns the seconds of a layer's attention, forward and backward. Ranks wait for each other in
// both passes. In a pass a rank computes visiting tasks, and home tasks beside its transfers. Other
// work hides `hidden_seconds` of the transfers of both passes.
double makespan(const std::vector<Load>& loads, const Links& links, double hidden_seconds);

// Returns the seconds of the slowest rank, with both passes taken together.
double slowest(const std::vector<Load>& loads, const Links& links, double hidden_seconds);

// Returns the seconds by which a layer takes longer because rows move, even if other work hides the
// transfers: ranks wait for each other in both passes, attention runs in more and shorter kernels,
// and FSDP's traffic is delayed. Measured on four H200.
double friction(const std::vector<Load>& loads, const Links& links);

// Like makespan, but the rows of `spared` do not travel in the backward pass. `loads` includes
// their bytes.
double makespan(std::vector<Load> loads, const Traffic& spared, const Links& links,
                double hidden_seconds);

// Subtracts `times` the bytes of `spared` from the load.
void take_off(Load& load, const Load& spared, double times);

// Returns the bytes that all ranks move.
double total_bytes(const std::vector<Load>& loads);

}  // namespace distca::planner
