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

void keep_inputs(const Pack& pack, const PlanOptions& options, Plan& plan) {
  PlanOptions inputs = options;
  inputs.row_bytes = options.kept_bytes;
  Traffic spared(pack, inputs);
  for (int64_t server = 0; server < plan.num_ranks; ++server) {
    const std::span<Task> tasks = tasks_of(plan.tasks, server);
    std::vector<std::pair<double, Visit>> visits;
    for (Visit& visit : visits_of(pack, plan.mask, tasks)) {
      visits.emplace_back(bytes_kept(visit, options.kept_bytes), std::move(visit));
    }
    std::stable_sort(visits.begin(), visits.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    double left = options.kept_cap_bytes;
    std::set<int64_t> documents;  // that are kept
    for (const auto& [bytes, visit] : visits) {
      if (bytes > left) continue;
      left -= bytes;
      documents.insert(visit.document);
      spared.add(visit.document, visit.queries, server, 1);
    }
    for (Task& task : tasks) {
      task.is_kept = documents.contains(task.document) && !is_home(pack, plan.mask, task);
    }
  }
  for (int64_t rank = 0; rank < plan.num_ranks; ++rank) {
    Load& load = plan.loads[rank];
    load.bytes_out -= spared[rank].bytes_out;
    load.bytes_in -= spared[rank].bytes_in;
    load.node_bytes_out -= spared[rank].node_bytes_out;
    load.node_bytes_in -= spared[rank].node_bytes_in;
  }
}

}  // namespace distca::planner
