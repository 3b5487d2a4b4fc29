#pragma once

#include <cstdint>
#include <vector>

#include "core/mask.h"

namespace distca::planner {

// Seconds of kernel time (forward + backward of one layer) for one task.
//
// Without a table: kernel tiles of tile_q x tile_k that hold any visible pair, times
// seconds_per_tile, plus seconds_per_task. With a table: `table_seconds[i][j]` is the time of
// table_rows[i] queries over table_keys[j] keys (full rectangle), seconds_per_task included,
// interpolated linearly in both directions. The time above seconds_per_task is scaled by the share
// of the rectangle's tiles that the mask leaves.
struct CostModel {
  int64_t tile_q = 128;
  int64_t tile_k = 128;
  double seconds_per_tile = 1e-6;
  double seconds_per_task = 0.0;
  std::vector<int64_t> table_rows;    // increasing
  std::vector<int64_t> table_keys;    // increasing
  std::vector<double> table_seconds;  // [table_rows][table_keys], row-major

  double seconds(const Mask& mask, Range q, int64_t length) const;
};

// Throws std::invalid_argument naming the field.
void validate(const CostModel& cost);

}  // namespace distca::planner
