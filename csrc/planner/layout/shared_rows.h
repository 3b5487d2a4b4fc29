#pragma once

#include <cstdint>
#include <vector>

#include "layout.h"

namespace distca::planner {

// Consecutive home rows that the same sent runs hold, and the slots of the first in each of them.
struct SharedRows {
  int64_t first;
  int64_t length;
  std::vector<int32_t> slots;
};

// All home rows that any run holds, in order. Slots count the rows of the runs one after the other.
std::vector<SharedRows> shared_rows(const std::vector<Run>& runs);

}  // namespace distca::planner
