#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/layout/deliveries.h"

namespace distca::ops {

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

// Ranks that may write to each other's memory: those of a node.
constexpr int64_t kMaxPeers = 64;

// Where a rank's rows go when they are written straight to the servers' memory, and where results
// go that it returns.
struct PeerRoutes {
  planner::Deliveries deliveries;
  std::vector<KeyGradients> key_gradients;
};

PeerRoutes peer_routes(planner::Deliveries deliveries);

void append_words(const PeerRoutes& routes, std::vector<int64_t>& words);

// Whose routes they are, and the rows that are there.
struct RouteLimits {
  int64_t rank;
  int64_t num_ranks;
  int64_t num_home_rows;
  int64_t num_home_queries;
};

// Reads from the front of `words` and moves it on. Throws ValueError for rows outside the limits,
// or past the most that a server or a home has.
PeerRoutes read_peer_routes(std::span<const int64_t>& words, const RouteLimits& limits);

}  // namespace distca::ops
