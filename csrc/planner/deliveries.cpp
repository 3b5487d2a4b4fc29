#include "deliveries.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace distca::planner {
namespace {

std::set<int64_t> homes_of(const Pack& pack, const Visit& visit) {
  const std::span<const Segment> segments = pack.segments_of(pack.documents[visit.document]);
  std::set<int64_t> homes;
  const auto add = [&](Range range) {
    for_each_segment(segments, range, [&](const Segment& s, Range) { homes.insert(s.rank); });
  };
  for (Range rows : visit.queries) add(rows);
  for (Range keys : visit.keys.ranges()) add(keys);
  return homes;
}

// The parts of `ranges` that are at home here; `next_row` is the visiting row of the first range,
// and then of what follows the last.
std::vector<RowPlace> places_of(const HomeRuns& home, int64_t document, int64_t HomeRun::*row,
                                const std::vector<Range>& ranges, int64_t& next_row) {
  std::vector<RowPlace> places;
  for (Range range : ranges) {
    home.for_each_part(document, row, range, [&](int64_t home_row, Range part) {
      places.push_back({home_row, next_row + part.begin - range.begin, num_rows(part)});
    });
    next_row += num_rows(range);
  }
  return places;
}

}  // namespace

std::vector<Flags> flags_of(const Pack& pack, const std::vector<Visit>& visits) {
  std::vector<Flags> flags;
  int64_t next = 0;
  for (const Visit& visit : visits) {
    const auto num_homes = static_cast<int64_t>(homes_of(pack, visit).size());
    flags.push_back({next, next + num_homes});
    next += num_homes;
  }
  return flags;
}

Deliveries make_deliveries(const Pack& pack, const Plan& plan, int64_t rank) {
  const HomeRuns home(pack, rank);
  Deliveries deliveries;
  for (int64_t server = 0; server < plan.num_ranks; ++server) {
    int64_t q_row = 0, k_row = 0, num_flags = 0;
    for (const Visit& visit : visits_of(pack, plan.mask, tasks_of(plan, server))) {
      const std::set<int64_t> homes = homes_of(pack, visit);
      const auto own = static_cast<int64_t>(std::distance(homes.begin(), homes.find(rank)));
      Delivery ours{server, num_flags + own, {}, {}, visit.is_kept};
      num_flags += static_cast<int64_t>(homes.size());
      ours.queries = places_of(home, visit.document, &HomeRun::q_row, visit.queries, q_row);
      ours.keys = places_of(home, visit.document, &HomeRun::row, visit.keys.ranges(), k_row);
      if (homes.contains(rank)) deliveries.sent.push_back(std::move(ours));
    }
    deliveries.max_visiting_q = std::max(deliveries.max_visiting_q, q_row);
    deliveries.max_visiting_k = std::max(deliveries.max_visiting_k, k_row);
    deliveries.max_flags = std::max(deliveries.max_flags, num_flags);
  }
  return deliveries;
}

}  // namespace distca::planner
