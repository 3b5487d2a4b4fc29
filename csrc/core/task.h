#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

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

// Returns the ranges in order and without empty ones. Ranges that overlap or touch are joined.
inline std::vector<Range> joined(std::vector<Range> ranges) {
  std::erase_if(ranges, [](Range range) { return range.begin == range.end; });
  std::ranges::sort(ranges, {}, &Range::begin);
  std::vector<Range> all;
  for (const Range range : ranges) {
    if (all.empty() || all.back().end < range.begin) all.push_back(range);
    all.back().end = std::max(all.back().end, range.end);
  }
  return all;
}

// Tasks that share keys, directly or through other tasks: those of one copy of a document's keys.
// Different runs share no row of dk and dv. A task without keys is a run of its own.
struct TaskRun {
  Range keys;
  std::vector<PlacedTask> tasks;  // by key row, then by query row
};

// Returns the runs of tasks in order of key rows. Leaves out tasks without rows.
inline std::vector<TaskRun> runs_of(std::vector<PlacedTask> tasks) {
  std::ranges::sort(tasks, {}, [](const PlacedTask& task) {
    return std::tuple(task.num_k_rows == 0, task.k_row, task.q_row);
  });
  std::vector<TaskRun> runs;
  for (const PlacedTask& task : tasks) {
    const Range keys = key_rows(task);
    if (task.num_q_rows + task.num_k_rows == 0) continue;
    const bool shares = !runs.empty() && keys.begin < std::min(keys.end, runs.back().keys.end);
    TaskRun& run = shares ? runs.back() : runs.emplace_back(keys);
    run.keys.end = std::max(run.keys.end, keys.end);
    run.tasks.push_back(task);
  }
  return runs;
}

}  // namespace distca
