#pragma once

#include <cstdint>
#include <vector>

#include "../task.h"

// How a task list becomes calls of a varlen kernel that knows no shared keys. Standard library
// only.
namespace distca::attention::aten {

struct Waves {
  std::vector<VarlenWave> waves;
  std::vector<int64_t> order;  // task indices by wave; tasks without queries are left out
  std::vector<int32_t>
      cu_seqlens;  // per wave cu_seqlens_q, then cu_seqlens_k, num_sequences + 1 each
};

// Within a wave query ranges increase and key ranges are disjoint and increase. A task goes to the
// first wave that it fits, in order of q_row. Query rows between tasks are sequences without keys,
// key rows between tasks sequences without queries; max_k covers the latter too, since the backward
// kernel zeroes their dk and dv. Throws std::length_error for rows past int32.
Waves make_waves(const std::vector<Task>& tasks);

}  // namespace distca::attention::aten
