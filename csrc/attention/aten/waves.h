#pragma once

#include <cstdint>
#include <vector>

#include "core/task.h"

// How a task list becomes calls of a varlen kernel that knows no shared keys. Standard library
// only.
namespace distca::attention::aten {

// One call of ATen's varlen flash attention: sequences tile all query rows and all key rows up to
// the last used one. Rows between tasks become sequences with no keys, or no queries.
struct VarlenWave {
  int64_t num_sequences;
  int64_t max_q;
  int64_t max_k;
  int64_t first_task;  // tasks [first_task, last_task) of the order run in this wave
  int64_t last_task;
};

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
Waves make_waves(const std::vector<PlacedTask>& tasks);

// Writes waves and their order as a layout's host words, without cu_seqlens, and reads them back.
// read_waves throws std::invalid_argument if words are missing or name tasks that do not exist.
std::vector<int64_t> host_words(const Waves& waves);
Waves read_waves(const std::vector<int64_t>& words, int64_t num_tasks);

}  // namespace distca::attention::aten
