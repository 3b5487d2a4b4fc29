#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "../model/ranges.h"

namespace distca::planner {

// The visiting tasks of one document on one server.
struct Visit {
  int64_t document;
  std::vector<Range> queries;  // of its tasks, in order
  RangeSet keys;               // the union of its tasks' keys
  bool is_kept;                // whether the server keeps their inputs
};

// Returns the tasks of one server. `tasks` are in plan order, and may be const.
template <typename Tasks>
auto tasks_of(Tasks& tasks, int64_t server) {
  const auto [first, last] =
      std::equal_range(tasks.begin(), tasks.end(), Task{0, 0, 0, server},
                       [](const Task& a, const Task& b) { return a.server < b.server; });
  return std::span(first, last);
}

// Returns the visits of one server. `tasks` are its tasks, in plan order.
inline std::vector<Visit> visits_of(const Pack& pack, const Mask& mask,
                                    std::span<const Task> tasks) {
  std::vector<Visit> visits;
  for (const Task& task : tasks) {
    if (is_home(pack, mask, task)) continue;
    if (visits.empty() || visits.back().document != task.document) {
      visits.push_back({task.document, {}, {}, task.is_kept});
    }
    const int64_t length = pack.documents[task.document].length;
    visits.back().queries.push_back(queries(task));
    visits.back().keys.insert(keys_of(mask, queries(task), length));
  }
  return visits;
}

}  // namespace distca::planner
