#pragma once

#include <cstdint>

// The plain part of attention.h, for code without torch.
namespace distca::attention {

// Query rows [q_row, q_row + num_q_rows) over key rows [k_row, k_row + num_k_rows). Query i of the
// task stands at key index q_offset + i. Tasks may share key rows; query rows of tasks are
// disjoint.
struct Task {
  int64_t q_row;
  int64_t num_q_rows;
  int64_t k_row;
  int64_t num_k_rows;
  int64_t q_offset;
};

// Query at key index p sees keys [p - window_left, p + window_right]; -1 is no limit.
struct Mask {
  int64_t window_left = -1;
  int64_t window_right = 0;
};

// One call of ATen's varlen flash attention: sequences tile all query rows and all key rows up to
// the last used one. Rows between tasks become sequences with no keys, or no queries.
struct VarlenWave {
  int64_t num_sequences;
  int64_t max_q;
  int64_t max_k;
  int64_t first_task;  // tasks [first_task, last_task) of TaskList::wave_order run in this wave
  int64_t last_task;
};

}  // namespace distca::attention
