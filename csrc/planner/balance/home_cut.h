#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../model/loads.h"
#include "../model/options.h"
#include "../model/pack.h"
#include "items.h"

namespace distca::planner {

// The assignment that moves nothing: every segment is computed where its rows live.
struct HomeCut {
  HomeCut(const Pack& pack, const PlanOptions& options);

  std::span<const Item> items_of(int64_t rank) const {
    return {items.data() + first[rank], static_cast<size_t>(first[rank + 1] - first[rank])};
  }
  std::span<const Item> items_of(int64_t rank, int64_t document) const;
  // Returns the rank's items in descending order of seconds, sorted on first use.
  std::span<const Item> largest_first(int64_t rank) const;

  std::vector<Item> items;      // by rank, document, position
  std::vector<int64_t> first;   // [num_ranks + 1] index into items
  std::vector<double> seconds;  // [num_ranks] at speed 1
  Traffic traffic;

 private:
  mutable std::vector<std::vector<Item>> largest_first_;  // [num_ranks] empty until asked for
};

}  // namespace distca::planner
