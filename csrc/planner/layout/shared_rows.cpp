#include "shared_rows.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace distca::planner {

std::vector<SharedRows> shared_rows(const std::vector<Run>& runs) {
  struct End {
    int64_t row;
    int64_t first_slot;  // of the run
    bool opens;
  };
  std::vector<End> ends;
  int64_t slot = 0;
  for (const Run& run : runs) {
    ends.push_back({run.first, slot, true});
    ends.push_back({run.first + run.length, slot, false});
    slot += run.length;
  }
  std::sort(ends.begin(), ends.end(), [](const End& a, const End& b) {
    return std::tie(a.row, a.first_slot) < std::tie(b.row, b.first_slot);
  });
  std::vector<SharedRows> shared;
  std::vector<std::pair<int64_t, int64_t>> open;  // (first slot, first row) of runs, sorted
  for (size_t i = 0; i < ends.size();) {
    const int64_t row = ends[i].row;
    for (; i < ends.size() && ends[i].row == row; ++i) {
      const auto at =
          std::lower_bound(open.begin(), open.end(), std::pair{ends[i].first_slot, int64_t{-1}});
      if (ends[i].opens) {
        open.insert(at, {ends[i].first_slot, row});
      } else {
        open.erase(at);
      }
    }
    if (open.empty()) continue;
    shared.push_back({row, ends[i].row - row, {}});
    for (const auto& [first_slot, first_row] : open) {
      shared.back().slots.push_back(static_cast<int32_t>(first_slot + row - first_row));
    }
  }
  return shared;
}

}  // namespace distca::planner
