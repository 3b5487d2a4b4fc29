#include "visits.h"

#include <algorithm>

namespace distca::planner {

std::span<const Task> tasks_of(const Plan& plan, int64_t server) {
  const auto [first, last] =
      std::equal_range(plan.tasks.begin(), plan.tasks.end(), Task{0, 0, 0, server},
                       [](const Task& a, const Task& b) { return a.server < b.server; });
  return {first, last};
}

std::vector<Visit> visits_of(const Pack& pack, const Mask& mask, std::span<const Task> tasks) {
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
