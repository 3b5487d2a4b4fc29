#pragma once

#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "assignment.h"
#include "scheduler.h"
#include "slices.h"

namespace distca::planner {

// Moves work between the ranks of one group, from those above the assignment's limit, the donors,
// to those below it, the receivers.
class Group {
 public:
  Group(Assignment& assignment, const PlanOptions& options, const Prices& prices,
        const Style& style, Range ranks);

  // Whether every rank's seconds are within the limit then.
  bool run();

 private:
  using Order = std::set<std::pair<double, int64_t>>;  // (key, rank)

  void list(int64_t rank);
  Cutter& cutter_of(int64_t donor);
  std::vector<double> rooms_for(double surplus) const;
  bool is_fair(const Move& move) const;
  std::optional<Move> next_move(int64_t donor, bool fair);
  std::optional<Move> just_enough(Cutter& cutter, double surplus, bool fair);
  std::optional<Move> first_of_two(Cutter& cutter, double surplus, bool fair);
  std::optional<Move> to_roomiest(Cutter& cutter, double surplus, bool fair);
  std::optional<Move> cut(Cutter& cutter, double surplus, int64_t receiver, bool fair);

  Assignment& assignment_;
  const PlanOptions& options_;
  const Prices& prices_;
  const Style& style_;
  const Range ranks_;
  Order donors_;                    // by falling surplus
  Order receivers_;                 // by rising room
  std::vector<double> fair_bytes_;  // [ranks] into each rank
  std::map<int64_t, Cutter> cutters_;
};

}  // namespace distca::planner
