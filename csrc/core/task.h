#pragma once

#include <cstdint>

#include "rows.h"

namespace distca {

// Query rows [q_row, q_row + num_q_rows) of tensors that a server holds, over their key rows
// [k_row, k_row + num_k_rows). Query i of the task stands at key q_offset + i of the task's keys,
// so that a mask needs no document position. Tasks may share key rows; their query rows are
// disjoint.
struct PlacedTask {
  int64_t q_row;
  int64_t num_q_rows;
  int64_t k_row;
  int64_t num_k_rows;
  int64_t q_offset;
};

constexpr Range query_rows(const PlacedTask& task) {
  return {task.q_row, task.q_row + task.num_q_rows};
}

constexpr Range key_rows(const PlacedTask& task) {
  return {task.k_row, task.k_row + task.num_k_rows};
}

}  // namespace distca
