#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "cutter.h"
#include "schedule.h"

namespace distca::planner {
namespace {

class NodeBalancer {
 public:
  NodeBalancer(Assignment& assignment, const Pairing& pairing)
      : assignment_(assignment),
        problem_(assignment.problem()),
        pairing_(pairing),
        is_spent_(problem_.pack.num_ranks, 0) {
    const double part = 1 - problem_.heuristics.node_slack;
    for (int64_t node = 0; ranks_of(node).begin < problem_.pack.num_ranks; ++node) {
      const Range ranks = ranks_of(node);
      double surplus = 0;
      for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
        surplus += assignment.seconds(rank) - assignment.limit(rank) * part;
      }
      surplus_.push_back(surplus);
      list(node);
    }
  }

  void run() {
    while (!donors_.empty() && !receivers_.empty()) {
      if (!give(donors_.begin()->second)) donors_.erase(donors_.begin());
    }
  }

 private:
  using Order = std::set<std::pair<double, int64_t>>;  // (key, node)

  Range ranks_of(int64_t node) const {
    const int64_t size = problem_.options.links.ranks_per_node;
    return {node * size, std::min(problem_.pack.num_ranks, (node + 1) * size)};
  }

  void list(int64_t node) {
    (surplus_[node] > 0 ? donors_ : receivers_).emplace(-surplus_[node], node);
  }

  // Moves work of the rank with the largest surplus, even if that is negative. Returns whether
  // anything moved.
  bool give(int64_t node) {
    const Range ranks = ranks_of(node);
    while (true) {
      int64_t donor = -1;
      for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
        if (is_spent_[rank] || assignment_.own(rank).empty()) continue;
        if (donor < 0 || assignment_.surplus(rank) > assignment_.surplus(donor)) donor = rank;
      }
      if (donor < 0) return false;
      if (give_whole_documents(donor, surplus_[node])) return true;
      if (!assignment_.is_budget_spent() && give_slice(donor, surplus_[node])) return true;
      is_spent_[donor] = 1;
    }
  }

  // Moves at most the surplus of the donor's node, and at most half of a rank's capacity at a time.
  bool give_whole_documents(int64_t donor, double surplus) {
    const double most = seconds_in_whole_documents(assignment_, donor, surplus);
    if (most <= 0) return false;
    for (const auto& [node_capacity, node] : receivers_for(surplus)) {
      const int64_t receiver = largest_receiver(ranks_of(node));
      const double capacity = std::min(node_capacity, assignment_.capacity(receiver));
      if (capacity <= 0) continue;
      const double relief =
          assignment_.give_whole_documents(donor, receiver, std::min(capacity / 2, most));
      if (relief == 0) continue;
      update(donor, receiver, relief, relief);
      return true;
    }
    return false;
  }

  // Moves a slice to one of the nodes, to its rank with most capacity.
  bool give_slice(int64_t donor, double surplus) {
    const Heuristics& heuristics = problem_.heuristics;
    Cutter& cutter = cutters_.try_emplace(donor, assignment_, donor).first->second;
    for (const auto& [node_capacity, node] : receivers_for(surplus)) {
      const Range ranks = ranks_of(node);
      const int64_t receiver = largest_receiver(ranks);
      const double capacity = std::min(node_capacity, -assignment_.surplus(receiver));
      if (capacity <= 0) continue;
      Request request{receiver, surplus, capacity};
      if (heuristics.plans_for_links) {
        request.planned_seconds = std::min(surplus, link_seconds_left(donor, capacity));
      }
      if (const auto move = cutter.best_slice(request)) {
        cutter.apply(*move);
        update(donor, receiver, move->relief, move->seconds);
        return true;
      }
    }
    return false;
  }

  // Returns (capacity, node) of the nodes with the least sufficient and the next smaller capacity.
  std::vector<std::pair<double, int64_t>> receivers_for(double surplus) const {
    std::vector<std::pair<double, int64_t>> nodes;
    auto at = receivers_.lower_bound({surplus, -1});
    if (at != receivers_.end()) ++at;
    while (at != receivers_.begin() && nodes.size() < 2) nodes.push_back(*--at);
    return nodes;
  }

  int64_t largest_receiver(Range ranks) const {
    int64_t best = ranks.begin;
    for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
      if (assignment_.capacity(rank) > assignment_.capacity(best)) best = rank;
    }
    return best;
  }

  // Returns the seconds that the rank's link to other nodes can carry in slices of this capacity.
  double link_seconds_left(int64_t donor, double capacity) const {
    const double bytes_per_second = problem_.bytes_per_root_second / std::sqrt(capacity);
    return pairing_.node_link_part * assignment_.node_bytes_left(donor) / bytes_per_second;
  }

  void update(int64_t donor, int64_t receiver, double relief, double seconds) {
    const int64_t size = problem_.options.links.ranks_per_node;
    const int64_t from = donor / size, to = receiver / size;
    donors_.erase({-surplus_[from], from});
    receivers_.erase({-surplus_[to], to});
    surplus_[from] -= relief;
    surplus_[to] += seconds;
    list(from);
    list(to);
  }

  Assignment& assignment_;
  const Problem& problem_;
  const Pairing& pairing_;
  std::vector<double> surplus_;  // [nodes] seconds at speed 1
  std::vector<char> is_spent_;   // [ranks] whether the rank can give no more to other nodes
  Order donors_;                 // by descending surplus
  Order receivers_;              // by ascending capacity
  std::map<int64_t, Cutter> cutters_;
};

}  // namespace

void balance_nodes(Assignment& assignment, const Pairing& pairing) {
  NodeBalancer(assignment, pairing).run();
}

}  // namespace distca::planner
