#include "visits.h"

#include <algorithm>
#include <stdexcept>
#include <string>

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

HomeRuns::HomeRuns(const Pack& pack, int64_t rank) : rank_(rank) {
  if (rank < 0 || rank >= pack.num_ranks) {
    throw std::invalid_argument("rank is " + std::to_string(rank) + "; expected 0 <= rank < " +
                                std::to_string(pack.num_ranks));
  }
  first_.reserve(pack.documents.size() + 1);
  first_.push_back(0);
  for (const Document& document : pack.documents) {
    for (const Segment& segment : pack.segments_of(document)) {
      if (segment.rank == rank) {
        runs_.push_back({positions(segment), segment.row, segment.q_row});
      }
    }
    first_.push_back(static_cast<int32_t>(runs_.size()));
  }
}

}  // namespace distca::planner
