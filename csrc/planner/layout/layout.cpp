#include "layout.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"
#include "visits.h"

namespace distca::planner {
namespace {

// Rows of a visit that come from one home.
struct Part {
  std::vector<RowPlace> queries, keys;
};

// Next rows of queries and of keys, of one rank.
struct NextRows {
  int64_t q = 0;
  int64_t k = 0;
};

// By home. `next` are the server's visiting rows, `returned` those returned to each rank; both move
// on.
std::map<int64_t, Part> parts_of(const Pack& pack, const Visit& visit, int64_t server,
                                 NextRows& next, std::vector<NextRows>& returned) {
  const std::span<const Segment> segments = pack.segments_of(pack.documents[visit.document]);
  std::map<int64_t, Part> parts;
  const auto add = [&](const std::vector<Range>& ranges, int64_t Segment::*row,
                       int64_t NextRows::*next_row, std::vector<RowPlace> Part::*places) {
    for (Range range : ranges) {
      for_each_segment(segments, range, [&](const Segment& segment, Range rows) {
        const int64_t visiting_row = next.*next_row + rows.begin - range.begin;
        int64_t& returned_row = returned[segment.rank].*next_row;
        const bool is_own = segment.rank == server;
        (parts[segment.rank].*places)
            .push_back({segment.*row + rows.begin - segment.start, visiting_row,
                        is_own ? visiting_row : returned_row, num_rows(rows)});
        if (!is_own) returned_row += num_rows(rows);
      });
      next.*next_row += num_rows(range);
    }
  };
  add(visit.queries, &Segment::q_row, &NextRows::q, &Part::queries);
  add(visit.keys.ranges(), &Segment::row, &NextRows::k, &Part::keys);
  return parts;
}

// Returns how many of the tasks, which are in order, come before a cut. No key is read on both
// sides of the cut. As nearly as possible, `part` of the (query, key) pairs are before it.
int64_t num_before_cut(const std::vector<PlacedTask>& tasks, const Mask& mask, double part) {
  const auto pairs_of = [&](const PlacedTask& task) {
    return num_pairs(mask, {task.q_offset, task.q_offset + task.num_q_rows}, task.num_k_rows);
  };
  double pairs = 0, pairs_before = 0;
  for (const PlacedTask& task : tasks) pairs += static_cast<double>(pairs_of(task));
  const bool all_early = part >= 0.5;  // unless a cut between tasks is closer to `part`
  auto num_early = static_cast<int64_t>(all_early ? tasks.size() : 0);
  double smallest = (all_early ? 1 - part : part) * pairs;  // difference from `part`
  for (size_t i = 0; i + 1 < tasks.size(); ++i) {
    pairs_before += static_cast<double>(pairs_of(tasks[i]));
    const double difference = std::abs(part * pairs - pairs_before);
    if (key_rows(tasks[i]).end > tasks[i + 1].k_row || difference >= smallest) continue;
    smallest = difference;
    num_early = static_cast<int64_t>(i) + 1;
  }
  return num_early;
}

// Returns the part of home tasks that is early: see Layout.
double early_part_of(bool has_visiting_tasks, bool takes_results, double of_server) {
  if (has_visiting_tasks) return of_server;
  return takes_results ? 0 : 1;
}

// Early tasks get about `early_part` of the (query, key) pairs of home tasks.
void fill_home_tasks(const Pack& pack, const Plan& plan, double early_part, Layout& layout) {
  std::vector<PlacedTask>& tasks = layout.early_tasks;
  for (const Task& task : tasks_of(plan.tasks, layout.rank)) {
    if (!is_home(pack, plan.mask, task)) continue;
    const Document& document = pack.documents[task.document];
    const std::span<const Segment> segments = pack.segments_of(document);
    const Segment& segment = segments[segment_at(segments, task.q_begin)];
    const Range keys = keys_of(plan.mask, queries(task), document.length);
    tasks.push_back({segment.q_row + task.q_begin - segment.start, num_rows(queries(task)),
                     segment.row + keys.begin - segment.start, num_rows(keys),
                     task.q_begin - keys.begin});
  }
  std::sort(tasks.begin(), tasks.end(),
            [](const PlacedTask& a, const PlacedTask& b) { return a.q_row < b.q_row; });
  if (early_part == 1) return;
  const auto cut = tasks.begin() + num_before_cut(tasks, plan.mask, early_part);
  layout.late_tasks.assign(cut, tasks.end());
  tasks.erase(cut, tasks.end());
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

Movement movement_of(const Pack& pack, const Plan& plan, int64_t rank) {
  Movement movement;
  std::vector<NextRows> returned(plan.num_ranks);
  for (int64_t server = 0; server < plan.num_ranks; ++server) {
    NextRows next;
    for (const Visit& visit : visits_of(pack, plan.mask, tasks_of(plan.tasks, server))) {
      for (auto& [home, part] : parts_of(pack, visit, server, next, returned)) {
        if (home != rank && server != rank) continue;
        auto& deliveries = home == rank ? movement.sent : movement.received;
        deliveries.push_back({home == rank ? server : home, std::move(part.queries),
                              std::move(part.keys), visit.is_kept});
      }
    }
    movement.max_visiting_q = std::max(movement.max_visiting_q, next.q);
    movement.max_visiting_k = std::max(movement.max_visiting_k, next.k);
  }
  for (const NextRows& rows : returned) {
    movement.max_returned_q = std::max(movement.max_returned_q, rows.q);
    movement.max_returned_k = std::max(movement.max_returned_k, rows.k);
  }
  std::stable_sort(movement.received.begin(), movement.received.end(),
                   [](const Delivery& a, const Delivery& b) { return a.peer < b.peer; });
  return movement;
}

Layout make_layout(const Pack& pack, const Plan& plan, int64_t rank, Results results,
                   double early_part) {
  require(0 <= rank && rank < pack.num_ranks, "rank is ", rank, "; expected 0 <= rank < ",
          pack.num_ranks);
  Layout layout;
  layout.rank = rank;
  layout.num_ranks = plan.num_ranks;
  layout.num_home_rows = pack.num_rows[rank];
  layout.num_context_rows = pack.num_context_rows[rank];
  layout.movement = movement_of(pack, plan, rank);
  const std::vector<Visit> visits = visits_of(pack, plan.mask, tasks_of(plan.tasks, rank));
  const bool takes = !layout.movement.sent.empty() && results == Results::kTaken;
  fill_home_tasks(pack, plan, early_part_of(!visits.empty(), takes, early_part), layout);
  fill_visiting_tasks(pack, plan, visits, layout);
  return layout;
}

}  // namespace distca::planner
