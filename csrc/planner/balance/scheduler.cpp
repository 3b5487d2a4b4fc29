#include "scheduler.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "group.h"
#include "memory_relief.h"

namespace distca::planner {
namespace {

// Part of a node's limit that stays free, so that its ranks can be balanced although tiles do not
// divide.
constexpr double kNodeSlack = 0.004;
constexpr size_t kMaxNodes = 8;         // candidates per move, of more and of less capacity
constexpr double kMaxDonorPart = 0.25;  // of a rank's seconds, moved to another node at once

// A node empties a rank if all of its ranks have less capacity than this part of a limit.
constexpr double kMinCapacityPart = 0.8;

// Moves the surplus of nodes to other nodes. A donor rank need not be above the limit itself: the
// other ranks of its node fill it again.
class Nodes {
 public:
  Nodes(Assignment& assignment, const Pack& pack, const PlanOptions& options,
        const Weights& weights, const Pairing& pairing);

  void run();

 private:
  using Order = std::set<std::pair<double, int64_t>>;

  Range ranks_of(int64_t node) const;
  void list(int64_t node);
  std::vector<double> capacities_for(double surplus) const;
  double link_seconds_left(int64_t donor, double capacity) const;
  int64_t largest_receiver(Range ranks) const;
  void empty(int64_t node);
  std::vector<std::pair<double, int64_t>> receivers_for(double surplus) const;
  bool give(int64_t node);
  bool give_whole_documents(int64_t donor, double surplus);
  std::optional<Move> next_move(int64_t donor, double surplus);
  void apply(const Move& move);
  void moved(int64_t donor, int64_t receiver, double relief, double seconds);

  Assignment& assignment_;
  const Pack& pack_;
  const PlanOptions& options_;
  const Weights& weights_;
  const Pairing& pairing_;
  std::vector<double> surplus_;   // [nodes] seconds at speed 1
  std::vector<char> is_spent_;    // [ranks] whether the rank can give no more to other nodes
  std::vector<int> num_emptied_;  // [nodes]
  Order donors_;                  // nodes by falling surplus
  Order receivers_;               // nodes by rising capacity
  std::map<int64_t, Cutter> cutters_;
};

Nodes::Nodes(Assignment& assignment, const Pack& pack, const PlanOptions& options,
             const Weights& weights, const Pairing& pairing)
    : assignment_(assignment),
      pack_(pack),
      options_(options),
      weights_(weights),
      pairing_(pairing),
      is_spent_(pack.num_ranks, 0) {
  const int64_t size = options.links.ranks_per_node;
  for (int64_t node = 0; node < (pack.num_ranks + size - 1) / size; ++node) {
    double surplus = 0;
    const Range ranks = ranks_of(node);
    for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
      surplus += assignment.seconds(rank) - assignment.limit(rank) * (1 - kNodeSlack);
    }
    surplus_.push_back(surplus);
    num_emptied_.push_back(0);
    list(node);
  }
}

Range Nodes::ranks_of(int64_t node) const {
  const int64_t size = options_.links.ranks_per_node;
  return {node * size, std::min(pack_.num_ranks, (node + 1) * size)};
}

void Nodes::list(int64_t node) {
  if (surplus_[node] > 0) {
    donors_.emplace(-surplus_[node], node);
  } else {
    receivers_.emplace(-surplus_[node], node);
  }
}

std::vector<double> Nodes::capacities_for(double surplus) const {
  std::vector<double> capacities;
  for (auto at = receivers_.rbegin(); at != receivers_.rend() && surplus > 0; ++at) {
    capacities.push_back(at->first / static_cast<double>(num_rows(ranks_of(at->second))));
    surplus -= capacities.back();
  }
  return capacities;
}

// Returns the seconds that the rank's link to other nodes can carry in slices of this capacity.
double Nodes::link_seconds_left(int64_t donor, double capacity) const {
  const double bytes_per_second = weights_.bytes_per_root_second / std::sqrt(capacity);
  return pairing_.node_link_part * assignment_.node_bytes_left(donor) / bytes_per_second;
}

int64_t Nodes::largest_receiver(Range ranks) const {
  int64_t best = ranks.begin;
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    if (assignment_.capacity(rank) > assignment_.capacity(best)) best = rank;
  }
  return best;
}

// Returns (capacity, node) of nodes with just enough capacity, then of those with a little less.
std::vector<std::pair<double, int64_t>> Nodes::receivers_for(double surplus) const {
  std::vector<std::pair<double, int64_t>> nodes;
  const auto enough = receivers_.lower_bound({surplus, -1});
  for (auto at = enough; at != receivers_.end() && nodes.size() < kMaxNodes; ++at) {
    nodes.push_back(*at);
  }
  for (auto at = enough; at != receivers_.begin() && nodes.size() < 2 * kMaxNodes;) {
    nodes.push_back(*--at);
  }
  return nodes;
}

// Works like Group::give_whole_documents, but takes only a part of the donor's work at a time,
// because another rank of its node may have more afterwards.
bool Nodes::give_whole_documents(int64_t donor, double surplus) {
  const double most = std::min(seconds_in_whole_documents(assignment_, weights_, donor, surplus),
                               assignment_.seconds(donor) * kMaxDonorPart);
  if (most <= 0) return false;
  for (const auto& [node_capacity, node] : receivers_for(surplus)) {
    const int64_t receiver = largest_receiver(ranks_of(node));
    const double capacity = std::min(node_capacity, assignment_.capacity(receiver));
    const double relief = capacity <= 0 ? 0
                                        : assignment_.give_whole_documents(
                                              donor, receiver, std::min(capacity / 2, most));
    if (relief == 0) continue;
    moved(donor, receiver, relief, relief);
    return true;
  }
  return false;
}

// Returns a move to the rank with most capacity of one of the nodes.
std::optional<Move> Nodes::next_move(int64_t donor, double surplus) {
  auto cutter = cutters_.find(donor);
  if (cutter == cutters_.end()) {
    const std::vector<double> capacities = capacities_for(surplus);
    cutter =
        cutters_.emplace(donor, Cutter(assignment_, options_, weights_, donor, capacities)).first;
  }
  for (const auto& [node_capacity, node] : receivers_for(surplus)) {
    const Range ranks = ranks_of(node);
    int64_t receiver = largest_receiver(ranks);
    if (num_emptied_[node] < pairing_.max_emptied &&
        assignment_.capacity(receiver) < kMinCapacityPart * assignment_.limit(receiver)) {
      empty(node);
      receiver = largest_receiver(ranks);
    }
    const double capacity = std::min(node_capacity, -assignment_.surplus(receiver));
    if (capacity <= 0) continue;
    Request request{receiver, surplus, capacity};
    request.planned_seconds = std::min(surplus, link_seconds_left(donor, capacity));
    request.is_thrifty = true;
    if (auto move = cutter->second.best_slice(request, options_.cost.tile_q)) return move;
  }
  return std::nullopt;
}

// Moves work of the rank with the largest surplus, which may be negative. Returns whether anything
// moved.
bool Nodes::give(int64_t node) {
  const Range ranks = ranks_of(node);
  while (true) {
    int64_t donor = -1;
    for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
      if (is_spent_[rank] || assignment_.own(rank).empty()) continue;
      if (donor < 0 || assignment_.surplus(rank) > assignment_.surplus(donor)) donor = rank;
    }
    if (donor < 0) return false;
    if (give_whole_documents(donor, surplus_[node])) return true;
    if (!assignment_.is_budget_spent()) {
      if (const auto move = next_move(donor, surplus_[node])) {
        apply(*move);
        return true;
      }
    }
    is_spent_[donor] = 1;
  }
}

void Nodes::apply(const Move& move) {
  const int64_t document = assignment_.own(move.donor)[move.item].document;
  assignment_.apply(move);
  cutters_.at(move.donor).remember(document);
  moved(move.donor, move.receiver, move.relief, move.seconds);
}

void Nodes::moved(int64_t donor, int64_t receiver, double relief, double seconds) {
  const int64_t size = options_.links.ranks_per_node;
  const int64_t from = donor / size, to = receiver / size;
  donors_.erase({-surplus_[from], from});
  receivers_.erase({-surplus_[to], to});
  surplus_[from] -= relief;
  surplus_[to] += seconds;
  list(from);
  list(to);
}

// Moves the work of the rank with fewest documents to the other ranks of its node, so that it can
// receive large slices: bytes grow only with the square root of a slice's work.
void Nodes::empty(int64_t node) {
  ++num_emptied_[node];
  const Range ranks = ranks_of(node);
  int64_t donor = -1;
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    if (assignment_.own(rank).empty() || assignment_.surplus(rank) > 0) continue;
    if (donor < 0 || assignment_.own(rank).size() < assignment_.own(donor).size()) donor = rank;
  }
  if (donor < 0 || -surplus_[node] <= assignment_.limit(donor)) return;
  Cutter cutter(assignment_, options_, weights_, donor, {});
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    if (rank == donor) continue;
    while (assignment_.surplus(rank) < 0 && !assignment_.own(donor).empty()) {
      const double capacity = -assignment_.surplus(rank);
      const Request request{rank, std::min(assignment_.seconds(donor), capacity), capacity};
      const std::optional<Move> move = cutter.best_slice(request, options_.cost.tile_q);
      if (!move) break;
      assignment_.apply(*move);
    }
  }
}

void Nodes::run() {
  while (!donors_.empty() && !receivers_.empty()) {
    if (!give(donors_.begin()->second)) donors_.erase(donors_.begin());
  }
}

}  // namespace

bool schedule(Assignment& assignment, const Pack& pack, const PlanOptions& options,
              const Weights& weights, const Pairing& pairing) {
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    if (!assignment.is_over_cap(rank)) continue;
    relieve_memory(assignment, pack, options, weights, rank);
  }
  const Range all{0, pack.num_ranks};
  const Links& links = options.links;
  if (links.are_slow_between_nodes(pack.num_ranks)) {
    Nodes(assignment, pack, options, weights, pairing).run();
    for (int64_t first = 0; first < pack.num_ranks; first += links.ranks_per_node) {
      const Range ranks{first, std::min(pack.num_ranks, first + links.ranks_per_node)};
      Group(assignment, options, weights, pairing, ranks).run();
    }
  }
  Group group(assignment, options, weights, pairing, all);
  const bool balanced = group.run();
  group.save_bytes();
  return balanced;
}

}  // namespace distca::planner
