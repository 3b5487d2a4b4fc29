#include "keeping.h"

#include <algorithm>
#include <numeric>

#include "../model/loads.h"
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

// Of visits that take `bytes` each: those that are kept.
std::vector<bool> choose(const std::vector<double>& bytes, double cap_bytes) {
  std::vector<size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return bytes[a] > bytes[b]; });
  std::vector<bool> is_kept(bytes.size(), false);
  for (const size_t idx : order) {
    if (bytes[idx] > cap_bytes) continue;
    is_kept[idx] = true;
    cap_bytes -= bytes[idx];
  }
  return is_kept;
}

// Marks visiting tasks of the kept documents, which are in the tasks' order.
void mark(const Pack& pack, const Mask& mask, const std::vector<int64_t>& documents,
          std::span<Task> tasks) {
  auto document = documents.begin();
  for (Task& task : tasks) {
    while (document != documents.end() && *document < task.document) ++document;
    if (document == documents.end()) return;
    if (*document == task.document) task.is_kept = !is_home(pack, mask, task);
  }
}

}  // namespace

void keep_inputs(const Pack& pack, const PlanOptions& options, Plan& plan) {
  PlanOptions inputs = options;
  inputs.row_bytes = options.kept_bytes;
  Traffic spared(pack, inputs);
  for (int64_t server = 0; server < plan.num_ranks; ++server) {
    const std::span<const Task> found = tasks_of(plan, server);
    const std::span<Task> tasks(plan.tasks.data() + (found.data() - plan.tasks.data()),
                                found.size());
    const std::vector<Visit> visits = visits_of(pack, plan.mask, found);
    std::vector<double> bytes;
    bytes.reserve(visits.size());
    for (const Visit& visit : visits) bytes.push_back(bytes_kept(visit, options.kept_bytes));
    const std::vector<bool> is_kept = choose(bytes, options.kept_cap_bytes);
    std::vector<int64_t> documents;
    for (size_t i = 0; i < visits.size(); ++i) {
      if (!is_kept[i]) continue;
      documents.push_back(visits[i].document);
      spared.add(visits[i].document, visits[i].queries, server, 1);
    }
    mark(pack, plan.mask, documents, tasks);
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
