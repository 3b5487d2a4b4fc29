#include "memory_relief.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cutter.h"

namespace distca::planner {
namespace {

bool visits_home(const Problem& problem, const Item& item, int64_t home) {
  const Task task{item.document, item.rows.begin, item.rows.end, home};
  return num_rows(item.rows) > 0 && !is_home(problem.pack, problem.options.mask, task);
}

// Returns the servers that have memory left, those with the most first.
std::vector<int64_t> receivers_for(const Assignment& assignment, int64_t donor) {
  const PlanOptions& options = assignment.problem().options;
  std::vector<std::pair<double, int64_t>> sorted;
  for (int64_t rank = 0; rank < assignment.problem().pack.num_ranks; ++rank) {
    const double left =
        options.cap_bytes(rank) - static_cast<double>(assignment.load(rank).held_bytes);
    if (rank != donor && options.speed(rank) > 0 && left > 0) sorted.emplace_back(-left, rank);
  }
  std::sort(sorted.begin(), sorted.end());
  std::vector<int64_t> ranks;
  for (const auto& [_, rank] : sorted) ranks.push_back(rank);
  return ranks;
}

// Moves the first rows of the item and leaves the others in it. Returns whether any moved.
bool give(Assignment& assignment, Cutter& cutter, int64_t donor, int64_t receiver, Item& item) {
  const Request request{receiver, item.seconds, item.seconds};
  const auto move = cutter.first_rows(request, assignment.find_own(donor, item));
  if (!move) return false;
  assignment.apply(*move);
  item.rows.begin = move->slice.end;
  item.seconds = assignment.problem().seconds(item.document, item.rows);
  return true;
}

}  // namespace

void relieve_memory(Assignment& assignment, int64_t donor) {
  const Problem& problem = assignment.problem();
  Cutter cutter(assignment, donor);
  std::vector<Item> waiting;  // for the next receiver, the largest first
  for (const Item& item : assignment.own(donor)) {
    if (visits_home(problem, item, donor)) waiting.push_back(item);
  }
  for (const int64_t receiver : receivers_for(assignment, donor)) {
    bool has_place = true;
    auto item = waiting.begin(), rest = item;
    for (; has_place && item != waiting.end() && assignment.is_over_cap(donor); ++item) {
      while (assignment.is_over_cap(donor) && visits_home(problem, *item, donor)) {
        if (give(assignment, cutter, donor, receiver, *item)) continue;
        *rest++ = *item;
        has_place = !assignment.is_budget_spent();
        break;
      }
    }
    if (!assignment.is_over_cap(donor)) return;
    if (rest != item) waiting.erase(rest, item);
  }
}

}  // namespace distca::planner
