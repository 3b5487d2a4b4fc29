#pragma once

#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "assignment.h"
#include "cutter.h"
#include "scheduler.h"

namespace distca::planner {

// Bounds the bytes into a receiver.
struct ByteBound {
  double part_of_largest;  // any receiver may get this many least bytes of the largest capacity
  double min_part;         // a slice is refused if the bound cuts it below this part of its request
};

// Returns the seconds that the donor should give in whole documents. That is its surplus if it
// takes many documents, if no budget is left for cuts, or if documents are too short to be worth a
// task each; otherwise 0.
double seconds_in_whole_documents(Assignment& assignment, int64_t donor, double surplus);

// Moves work from donors, the ranks above the assignment's limit, to receivers, the ranks below it.
class RankBalancer {
 public:
  RankBalancer(Assignment& assignment, const Pairing& pairing, Range ranks);

  void run();
  // Returns the bytes that each rank may get in all, under the first byte bound.
  std::vector<double> most_bytes();

 private:
  using Order = std::set<std::pair<double, int64_t>>;  // (key, rank)

  void list(int64_t rank);
  bool give(int64_t donor);
  bool give_whole_documents(int64_t donor);
  Cutter& cutter_of(int64_t donor);
  double bytes_left(int64_t receiver) const;
  std::optional<Move> next_move(int64_t donor);
  std::optional<Move> next_bounded_move(int64_t donor);
  std::optional<Move> just_enough(Cutter& cutter, double surplus);
  std::optional<Move> first_of_two(Cutter& cutter, double surplus);
  std::optional<Move> best_candidate(Cutter& cutter, double surplus);
  std::optional<Move> cut(Cutter& cutter, double surplus, int64_t receiver);

  Assignment& assignment_;
  const Problem& problem_;
  const Pairing& pairing_;
  const Range ranks_;
  Order donors_;                            // by falling surplus
  Order receivers_;                         // by rising capacity
  std::vector<double> least_bytes_;         // [ranks] for the rank's initial capacity
  std::vector<int64_t> bytes_before_;       // [ranks] into the rank before run()
  double largest_bytes_ = 0;                // for the largest capacity
  double initial_surplus_ = 0;              // of all donors
  std::vector<double> initial_capacities_;  // descending
  const ByteBound* byte_bound_ = nullptr;
  std::map<int64_t, Cutter> cutters_;
};

}  // namespace distca::planner
