#include <algorithm>
#include <set>

#include "../model/loads.h"
#include "layout.h"
#include "visits.h"

namespace distca::planner {
namespace {

// What the server keeps if it keeps a visit.
double bytes_kept(const Visit& visit, const RowBytes& bytes) {
  int64_t num_bytes = 0;
  for (const Range rows : visit.queries) num_bytes += num_rows(rows) * bytes.query;
  for (const Range keys : visit.keys.ranges()) num_bytes += num_rows(keys) * bytes.key;
  return static_cast<double>(num_bytes);
}

}  // namespace

double keep_inputs(const Pack& pack, const PlanOptions& options, double hidden_seconds,
                   Plan& plan) {
  PlanOptions inputs = options;
  inputs.row_bytes = inputs.held_bytes = options.kept_bytes;
  Traffic spared(pack, inputs);
  std::set<std::pair<int64_t, int64_t>> kept;  // (server, document)
  for (int64_t server = 0; server < plan.num_ranks; ++server) {
    std::vector<std::pair<double, Visit>> visits;
    for (Visit& visit : visits_of(pack, plan.mask, tasks_of(plan.tasks, server))) {
      visits.emplace_back(bytes_kept(visit, options.kept_bytes), std::move(visit));
    }
    std::stable_sort(visits.begin(), visits.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    double left = options.kept_cap_bytes;
    for (const auto& [bytes, visit] : visits) {
      if (bytes > left) continue;
      left -= bytes;
      kept.emplace(server, visit.document);
      spared.add(visit.document, visit.queries, server, 1);
    }
  }
  const double seconds = makespan(plan.loads, spared, options.links, hidden_seconds);
  for (Task& task : plan.tasks) {
    task.is_kept = kept.contains({task.server, task.document}) && !is_home(pack, plan.mask, task);
  }
  for (int64_t rank = 0; rank < plan.num_ranks; ++rank) {
    take_off(plan.loads[rank], spared[rank], 1);
    plan.loads[rank].kept_bytes = spared[rank].held_bytes;
  }
  return seconds;
}

}  // namespace distca::planner
