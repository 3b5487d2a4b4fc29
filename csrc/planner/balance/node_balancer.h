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

// Moves the surplus of nodes to other nodes. A donor rank need not be above the limit itself: the
// other ranks of its node fill it again.
class NodeBalancer {
 public:
  NodeBalancer(Assignment& assignment, const Pairing& pairing);

  void run();

 private:
  using Order = std::set<std::pair<double, int64_t>>;

  Range ranks_of(int64_t node) const;
  void list(int64_t node);
  double link_seconds_left(int64_t donor, double capacity) const;
  int64_t largest_receiver(Range ranks) const;
  void empty_rank(int64_t node);
  std::vector<std::pair<double, int64_t>> receivers_for(double surplus) const;
  bool give(int64_t node);
  bool give_whole_documents(int64_t donor, double surplus);
  bool give_slice(int64_t donor, double surplus);
  void update(int64_t donor, int64_t receiver, double relief, double seconds);

  Assignment& assignment_;
  const Problem& problem_;
  const Pairing& pairing_;
  std::vector<double> surplus_;   // [nodes] seconds at speed 1
  std::vector<char> is_spent_;    // [ranks] whether the rank can give no more to other nodes
  std::vector<int> num_emptied_;  // [nodes]
  Order donors_;                  // nodes by descending surplus
  Order receivers_;               // nodes by ascending capacity
  std::map<int64_t, Cutter> cutters_;
};

}  // namespace distca::planner
