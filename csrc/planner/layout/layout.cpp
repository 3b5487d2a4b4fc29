#include "layout.h"

#include <algorithm>

#include "core/check.h"
#include "visits.h"

namespace distca::planner {
namespace {

// A home task, and the (query, key) pairs that it scores.
struct HomeTask {
  PlacedTask task;
  int64_t num_pairs;
};

// How many of the tasks, which are in order, come before the cut that halves their pairs best and
// separates their keys.
int64_t middle_of(const std::vector<HomeTask>& tasks) {
  int64_t num_pairs = 0, num_before = 0, num_early = static_cast<int64_t>(tasks.size());
  for (const HomeTask& home : tasks) num_pairs += home.num_pairs;
  int64_t smallest = num_pairs;  // difference of the two sides
  for (size_t i = 0; i + 1 < tasks.size(); ++i) {
    num_before += tasks[i].num_pairs;
    const PlacedTask& task = tasks[i].task;
    const int64_t difference = std::abs(num_pairs - 2 * num_before);
    if (task.k_row + task.num_k_rows > tasks[i + 1].task.k_row || difference >= smallest) continue;
    smallest = difference;
    num_early = static_cast<int64_t>(i) + 1;
  }
  return num_early;
}

// `are_cut`: whether something comes between early and late ones.
void fill_home_tasks(const Pack& pack, const Plan& plan, bool are_cut, Layout& layout) {
  std::vector<HomeTask> tasks;
  for (const Task& task : tasks_of(plan.tasks, layout.rank)) {
    if (!is_home(pack, plan.mask, task)) continue;
    const Document& document = pack.documents[task.document];
    const std::span<const Segment> segments = pack.segments_of(document);
    const Segment& segment = segments[segment_at(segments, task.q_begin)];
    const Range keys = keys_of(plan.mask, queries(task), document.length);
    tasks.push_back(
        {{segment.q_row + task.q_begin - segment.start, num_rows(queries(task)),
          segment.row + keys.begin - segment.start, num_rows(keys), task.q_begin - keys.begin},
         num_pairs(plan.mask, queries(task), document.length)});
  }
  std::sort(tasks.begin(), tasks.end(),
            [](const HomeTask& a, const HomeTask& b) { return a.task.q_row < b.task.q_row; });
  int64_t num_left = are_cut ? middle_of(tasks) : static_cast<int64_t>(tasks.size());
  for (const HomeTask& home : tasks) {
    (num_left-- > 0 ? layout.early_tasks : layout.late_tasks).push_back(home.task);
  }
}

void fill_visiting_tasks(const Pack& pack, const Plan& plan, const std::vector<Visit>& visits,
                         Layout& layout) {
  int64_t q_row = 0;
  int64_t k_row = 0;  // of the first key of a range
  for (const Visit& visit : visits) {
    const int64_t length = pack.documents[visit.document].length;
    auto range = visit.keys.ranges().begin();
    for (Range rows : visit.queries) {  // in ascending order of their first key
      const Range keys = keys_of(plan.mask, rows, length);
      for (; range->end <= keys.begin; ++range) k_row += num_rows(*range);
      layout.visiting_tasks.push_back({q_row, num_rows(rows), k_row + keys.begin - range->begin,
                                       num_rows(keys), rows.begin - keys.begin});
      q_row += num_rows(rows);
    }
    for (; range != visit.keys.ranges().end(); ++range) k_row += num_rows(*range);
  }
}

}  // namespace

Layout make_layout(const Pack& pack, const Plan& plan, int64_t rank, Results results) {
  require(0 <= rank && rank < pack.num_ranks, "rank is ", rank, "; expected 0 <= rank < ",
          pack.num_ranks);
  Layout layout;
  layout.rank = rank;
  layout.num_ranks = plan.num_ranks;
  layout.num_home_rows = pack.num_rows[rank];
  layout.num_context_rows = pack.num_context_rows[rank];
  layout.movement = movement_of(pack, plan, rank);
  const std::vector<Visit> visits = visits_of(pack, plan.mask, tasks_of(plan.tasks, rank));
  const bool sends = !layout.movement.sent.empty();
  fill_home_tasks(pack, plan, !visits.empty() || (sends && results == Results::kTaken), layout);
  fill_visiting_tasks(pack, plan, visits, layout);
  return layout;
}

}  // namespace distca::planner
