#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "layout.h"
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

}  // namespace distca::planner
