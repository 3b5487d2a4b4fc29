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

// Of a node's limit: what its ranks need to be balanced among themselves, since tiles do not
// divide.
constexpr double kNodeSlack = 0.004;
constexpr size_t kMaxNodes = 8;        // receiving nodes tried per move
constexpr double kMostOfDonor = 0.25;  // of a rank's seconds, given to another node at once

// Of a rank's limit: a node whose ranks all have less room empties one.
constexpr double kEmptyPart = 0.8;

// Moves what nodes have too much of between nodes. A rank gives to another node whatever it has,
// also when it is not above the limit itself: its own node's ranks fill it up again.
class Nodes {
 public:
  Nodes(Assignment& assignment, const Pack& pack, const PlanOptions& options, const Prices& prices,
        const Style& style);

  void run();

 private:
  using Order = std::set<std::pair<double, int64_t>>;

  Range ranks_of(int64_t node) const;
  void list(int64_t node);
  std::vector<double> rooms_for(double surplus) const;
  double planned_by(int64_t donor, double room) const;
  int64_t roomiest(Range ranks) const;
  void empty(int64_t node);
  std::vector<std::pair<double, int64_t>> receivers_for(double surplus) const;
  bool give(int64_t node);
  bool give_wholes(int64_t donor, double surplus);
  std::optional<Move> next_move(int64_t donor, double surplus);
  void apply(const Move& move);
  void moved(int64_t donor, int64_t receiver, double relief, double seconds);

  Assignment& assignment_;
  const Pack& pack_;
  const PlanOptions& options_;
  const Prices& prices_;
  const Style& style_;
  std::vector<double> surplus_;   // [nodes] seconds at speed 1
  std::vector<char> is_spent_;    // [ranks] whether the rank can give no more to other nodes
  std::vector<int> num_emptied_;  // [nodes]
  Order donors_;                  // nodes by falling surplus
  Order receivers_;               // nodes by rising room
  std::map<int64_t, Cutter> cutters_;
};

Nodes::Nodes(Assignment& assignment, const Pack& pack, const PlanOptions& options,
             const Prices& prices, const Style& style)
    : assignment_(assignment),
      pack_(pack),
      options_(options),
      prices_(prices),
      style_(style),
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

std::vector<double> Nodes::rooms_for(double surplus) const {
  std::vector<double> rooms;
  for (auto at = receivers_.rbegin(); at != receivers_.rend() && surplus > 0; ++at) {
    rooms.push_back(at->first / static_cast<double>(num_rows(ranks_of(at->second))));
    surplus -= rooms.back();
  }
  return rooms;
}

// Seconds that the rank's link to other nodes may take away in slices for such rooms. From the ones
// of fewest bytes, its documents' first and last rows stay in the node.
double Nodes::planned_by(int64_t donor, double room) const {
  const double bytes_per_second = prices_.bytes_per_root / std::sqrt(room);
  return style_.node_part * assignment_.node_bytes_left(donor) / bytes_per_second;
}

int64_t Nodes::roomiest(Range ranks) const {
  int64_t best = ranks.begin;
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    if (assignment_.room(rank) > assignment_.room(best)) best = rank;
  }
  return best;
}

// Returns (room, node) of nodes that have just enough room, and of those that have a little less.
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

// Works like Group::give_wholes, but takes only a part of what the donor has at a time, because
// another rank of its node may then have more.
bool Nodes::give_wholes(int64_t donor, double surplus) {
  const double most = std::min(most_of_wholes(assignment_, prices_, donor, surplus),
                               assignment_.seconds(donor) * kMostOfDonor);
  if (most <= 0) return false;
  for (const auto& [node_room, node] : receivers_for(surplus)) {
    const int64_t receiver = roomiest(ranks_of(node));
    const double room = std::min(node_room, assignment_.room(receiver));
    const double given =
        room <= 0 ? 0 : assignment_.give_wholes(donor, receiver, std::min(room / 2, most));
    if (given == 0) continue;
    moved(donor, receiver, given, given);
    return true;
  }
  return false;
}

// Returns a move to the roomiest rank of one of the nodes.
std::optional<Move> Nodes::next_move(int64_t donor, double surplus) {
  auto cutter = cutters_.find(donor);
  if (cutter == cutters_.end()) {
    const std::vector<double> rooms = rooms_for(surplus);
    cutter = cutters_.emplace(donor, Cutter(assignment_, options_, prices_, donor, rooms)).first;
  }
  for (const auto& [node_room, node] : receivers_for(surplus)) {
    const Range ranks = ranks_of(node);
    int64_t receiver = roomiest(ranks);
    if (num_emptied_[node] < style_.num_emptied &&
        assignment_.room(receiver) < kEmptyPart * assignment_.limit(receiver)) {
      empty(node);
      receiver = roomiest(ranks);
    }
    const double room = std::min(node_room, -assignment_.surplus(receiver));
    if (room <= 0) continue;
    Wish wish{receiver, surplus, room};
    wish.planned = std::min(surplus, planned_by(donor, room));
    wish.is_thrifty = true;
    if (auto move = cutter->second.best_slice(wish, options_.cost.tile_q)) return move;
  }
  return std::nullopt;
}

// Gives work of the rank that is most above its limit, or least below it. Returns whether the node
// gave anything.
bool Nodes::give(int64_t node) {
  const Range ranks = ranks_of(node);
  while (true) {
    int64_t donor = -1;
    for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
      if (is_spent_[rank] || assignment_.own(rank).empty()) continue;
      if (donor < 0 || assignment_.surplus(rank) > assignment_.surplus(donor)) donor = rank;
    }
    if (donor < 0) return false;
    if (give_wholes(donor, surplus_[node])) return true;
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
  const int64_t document = assignment_.own(move.donor)[move.share].document;
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

// Moves what the rank of fewest documents computes to the other ranks of its node, so that it can
// take slices as large as a server: their bytes grow with the root of work.
void Nodes::empty(int64_t node) {
  ++num_emptied_[node];
  const Range ranks = ranks_of(node);
  int64_t donor = -1;
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    if (assignment_.own(rank).empty() || assignment_.surplus(rank) > 0) continue;
    if (donor < 0 || assignment_.own(rank).size() < assignment_.own(donor).size()) donor = rank;
  }
  if (donor < 0 || -surplus_[node] <= assignment_.limit(donor)) return;
  Cutter cutter(assignment_, options_, prices_, donor, {});
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    if (rank == donor) continue;
    while (assignment_.surplus(rank) < 0 && !assignment_.own(donor).empty()) {
      const double room = -assignment_.surplus(rank);
      const Wish wish{rank, std::min(assignment_.seconds(donor), room), room};
      const std::optional<Move> move = cutter.best_slice(wish, options_.cost.tile_q);
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
              const Prices& prices, const Style& style) {
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    if (!assignment.is_over_cap(rank)) continue;
    relieve_memory(assignment, pack, options, prices, rank);
  }
  const Range all{0, pack.num_ranks};
  const Links& links = options.links;
  if (links.are_slow_between_nodes(pack.num_ranks)) {
    Nodes(assignment, pack, options, prices, style).run();
    for (int64_t first = 0; first < pack.num_ranks; first += links.ranks_per_node) {
      const Range ranks{first, std::min(pack.num_ranks, first + links.ranks_per_node)};
      Group(assignment, options, prices, style, ranks).run();
    }
  }
  Group group(assignment, options, prices, style, all);
  const bool balanced = group.run();
  group.save_bytes();
  return balanced;
}

}  // namespace distca::planner
