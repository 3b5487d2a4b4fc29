#pragma once

#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "../model/options.h"
#include "assignment.h"
#include "scheduler.h"
#include "slices.h"

namespace distca::planner {

// Bytes that a receiver may be given.
struct Fairness {
  double of_largest;  // over the least for the largest room: nobody notices so few
  double least_part;  // of what is wanted and has room; a slice cut shorter than that is refused
};

// Returns the seconds that the donor should give in whole documents. If its surplus takes many
// documents, that is all but the last few; else 0. If no budget is left for cuts, or documents are
// too short to be worth a task each, it is the whole surplus.
double most_of_wholes(Assignment& assignment, const Prices& prices, int64_t donor, double surplus);

// Moves work between the ranks of one group, from those above the assignment's limit, the donors,
// to those below it, the receivers.
class Group {
 public:
  Group(Assignment& assignment, const PlanOptions& options, const Prices& prices,
        const Style& style, Range ranks);

  // Whether every rank's seconds are within the limit then.
  bool run();
  // Then cuts documents anew; for the group of all ranks.
  void save_bytes();

 private:
  using Order = std::set<std::pair<double, int64_t>>;  // (key, rank)

  void list(int64_t rank);
  bool give(int64_t donor);
  bool give_wholes(int64_t donor);
  Cutter& cutter_of(int64_t donor);
  std::vector<double> rooms_for(double surplus) const;
  double fair_bytes(int64_t receiver) const;
  std::optional<Move> next_move(int64_t donor);
  std::optional<Move> next_fair_move(int64_t donor);
  std::optional<Move> just_enough(Cutter& cutter, double surplus);
  std::optional<Move> first_of_two(Cutter& cutter, double surplus);
  std::optional<Move> to_roomiest(Cutter& cutter, double surplus);
  std::optional<Move> cut(Cutter& cutter, double surplus, int64_t receiver);

  Assignment& assignment_;
  const PlanOptions& options_;
  const Prices& prices_;
  const Style& style_;
  const Range ranks_;
  Order donors_;                        // by falling surplus
  Order receivers_;                     // by rising room
  std::vector<double> least_bytes_;     // [ranks] for each rank's room at first
  std::vector<int64_t> bytes_before_;   // [ranks] into each rank at first
  double largest_bytes_ = 0;            // for the largest room
  double surplus_at_first_ = 0;         // of all donors
  std::vector<double> rooms_at_first_;  // by falling room; walking the tree for each donor is slow
  const Fairness* fairness_ = nullptr;
  std::map<int64_t, Cutter> cutters_;
};

}  // namespace distca::planner
