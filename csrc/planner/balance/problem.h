#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <tuple>
#include <vector>

#include "../model/loads.h"
#include "heuristics.h"

namespace distca::planner {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Query rows of one document on one server. Items are packed into servers, the bins.
struct Item {
  int64_t document;
  Range rows;
  double seconds;  // at speed 1
};

inline bool is_larger(const Item& a, const Item& b) {
  return std::tie(b.seconds, a.document, a.rows.begin) <
         std::tie(a.seconds, b.document, b.rows.begin);
}

// The balancing problem: items at home, where every segment's queries are computed if nothing
// moves, and scales by which slices of different sizes are compared.
struct Problem {
  Problem(const Pack& pack, const PlanOptions& options, const Heuristics& heuristics = {});

  const Document& document(int64_t index) const { return pack.documents[index]; }
  Range keys_of(int64_t document_idx, Range rows) const {
    return distca::keys_of(options.mask, rows, document(document_idx).length);
  }
  double seconds(int64_t document_idx, Range rows) const {
    return options.cost.seconds(options.mask, rows, document(document_idx).length);
  }
  // Returns the seconds, at speed 1, that a rank may compute if it must finish within `limit`.
  double most_seconds(int64_t rank, double limit) const {
    return std::max(0.0, limit - options.lag_seconds(rank)) * options.speed(rank);
  }
  // Returns whether the rank needs rows of other homes to compute these rows.
  bool are_visiting(int64_t document_idx, Range rows, int64_t rank) const {
    return !is_home(pack.segments_of(document(document_idx)), rows, keys_of(document_idx, rows),
                    rank);
  }
  std::span<const Item> home_items(int64_t rank) const {
    return {items.data() + first[rank], static_cast<size_t>(first[rank + 1] - first[rank])};
  }
  std::span<const Item> home_items(int64_t rank, int64_t document_idx) const;
  // Returns the rank's items in descending order of seconds, sorted on first use.
  std::span<const Item> largest_first(int64_t rank) const;

  const Pack& pack;
  const PlanOptions& options;
  const Heuristics heuristics;
  std::vector<Item> items;               // at home, by rank, document, position; none empty
  std::vector<int64_t> first;            // [num_ranks + 1] index into items
  std::vector<double> home_seconds;      // [num_ranks] at speed 1
  std::vector<double> visiting_seconds;  // [num_ranks] part of them whose keys are elsewhere
  Traffic home_traffic;
  double total_seconds = 0;      // at speed 1
  double total_speed = 0;        // of all servers
  double balanced_seconds;       // until all servers finish, if balanced perfectly; with lags
  double hidden_seconds = 0;     // of transfers that other work hides
  double transfers_wait;         // seconds, of both passes: see Links
  double link_room;              // likewise
  double bytes_per_root_second;  // least bytes of a slice over the square root of its seconds
  double min_relief;             // seconds; a slice with less relief is not worth a task

 private:
  mutable std::vector<std::vector<Item>> largest_first_;  // [num_ranks] empty until asked for
};

}  // namespace distca::planner
