#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/deliveries.h"

namespace distca::ops {

// Home rows whose keys went to servers, and where each of those keeps their gradients.
struct KeyGradients {
  struct Source {
    int64_t server;
    int64_t visiting_row;
  };
  int64_t home_row;
  int64_t num_rows;
  std::vector<Source> sources;  // added up in this order
};

// Ranks that may write to each other's memory: those of a node. And their arrival flags.
constexpr int64_t kMaxPeers = 64;
constexpr int64_t kMaxFlags = int64_t{1} << 18;

// Where a rank's rows go when they are written straight to the servers' memory.
struct PeerRoutes {
  planner::Deliveries deliveries;
  std::vector<KeyGradients> key_gradients;
};

PeerRoutes peer_routes(planner::Deliveries deliveries);

void append_words(const PeerRoutes& routes, std::vector<int64_t>& words);

// Reads from the front of `words` and moves it on. Throws ValueError for rows outside
// [0, num_home_rows), queries outside [0, num_home_queries), or of servers outside [0, num_ranks),
// or past the most that a server has.
PeerRoutes read_peer_routes(std::span<const int64_t>& words, int64_t num_ranks,
                            int64_t num_home_rows, int64_t num_home_queries);

}  // namespace distca::ops
