#pragma once

#include <cstdint>

#include "../model/options.h"
#include "../model/pack.h"
#include "heuristics.h"
#include "home_cut.h"

namespace distca::planner {

// The balancing problem, with scales by which slices of different sizes are compared.
struct Problem {
  Problem(const Pack& pack, const PlanOptions& options, const HomeCut& home,
          const Heuristics& heuristics = {});

  const Document& document(int64_t index) const { return pack.documents[index]; }
  Range keys_of(int64_t document_idx, Range rows) const {
    return distca::keys_of(options.mask, rows, document(document_idx).length);
  }
  double seconds(int64_t document_idx, Range rows) const {
    return options.cost.seconds(options.mask, rows, document(document_idx).length);
  }

  const Pack& pack;
  const PlanOptions& options;
  const HomeCut& home;
  Heuristics heuristics;
  double total_seconds = 0;      // at speed 1
  double total_speed = 0;        // of all servers
  double bytes_per_root_second;  // least bytes of a slice over the square root of its seconds
  double min_relief;             // seconds; a slice with less relief is not worth a task
};

}  // namespace distca::planner
