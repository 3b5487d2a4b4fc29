#pragma once

#include <cstdint>
#include <vector>

#include "core/mask.h"
#include "core/task.h"

// How a task list becomes calls of a varlen kernel that knows no shared keys. Standard library
// only.
namespace distca::attention::aten {

// One call of ATen's varlen flash attention: sequences tile all query rows and all key rows up to
// the last used one. Rows between tasks become sequences with no keys, or no queries.
struct Wave {
  std::vector<PlacedTask> tasks;
  Mask window;  // from the positions that the kernel knows: a task's last query is at its last key
  std::vector<int32_t> cu_seqlens_q{0}, cu_seqlens_k{0};  // [sequences + 1]
  int64_t max_q = 0;  // of tasks, since query rows between them need no kernel
  int64_t max_k = 0;
};

// Within a wave query ranges increase and key ranges are disjoint and increase, and all tasks have
// as many keys after their last query: the kernel shifts queries by so many positions, and windows
// are shifted back. A task goes to the first wave that it fits, in order of q_row. Tasks without
// queries are left out. Query rows between tasks become sequences without keys, and key rows
// between tasks become sequences without queries. max_k covers the latter too, since the backward
// kernel zeroes their dk and dv. Throws std::length_error for rows past int32.
std::vector<Wave> make_waves(std::vector<PlacedTask> tasks, const Mask& mask);

// Returns the number of a task's keys after its last query's position. May be negative.
constexpr int64_t num_later_keys(const PlacedTask& task) {
  return task.num_k_rows - task.q_offset - task.num_q_rows;
}

}  // namespace distca::attention::aten
