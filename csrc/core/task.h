#pragma once

#include <cstdint>

#include "rows.h"

namespace distca {

// A task whose rows have places in a server's tensors: query rows [q_row, q_row + num_q_rows)
// attend to key rows [k_row, k_row + num_k_rows). Query i has the position of the task's key
// q_offset + i, so masks need no document positions. Tasks may share key rows; their query rows
// are disjoint.
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
