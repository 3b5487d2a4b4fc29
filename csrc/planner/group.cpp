#include "group.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace distca::planner {
namespace {

constexpr int kMaxReceivers = 8;  // tried per move before the donor is given up
constexpr int kMaxPairs = 64;     // of receivers that are weighed for a donor's last two slices
// Bytes into a receiver, over the least for its room; and, over the least for the largest room,
// what no receiver is refused.
constexpr double kFairBytes = 1.49;
constexpr double kUnnoticedBytes = 1.4;

}  // namespace

Group::Group(Assignment& assignment, const PlanOptions& options, const Prices& prices,
             const Style& style, Range ranks)
    : assignment_(assignment), options_(options), prices_(prices), style_(style), ranks_(ranks) {
  double largest = 0;
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    list(rank);
    fair_bytes_.push_back(std::max(0.0, -assignment_.surplus(rank)));
    largest = std::max(largest, fair_bytes_.back());
  }
  const double unnoticed = kUnnoticedBytes * std::sqrt(largest);
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    double& bytes = fair_bytes_[rank - ranks.begin];
    bytes = prices.bytes_per_root * std::max(kFairBytes * std::sqrt(bytes), unnoticed) +
            static_cast<double>(assignment_.bytes_in(rank));
  }
}

void Group::list(int64_t rank) {
  const double surplus = assignment_.surplus(rank);
  if (surplus > 0) {
    donors_.emplace(-surplus, rank);
  } else if (assignment_.room(rank) > 0) {
    receivers_.emplace(assignment_.room(rank), rank);
  }
}

// Rooms of receivers, the largest first, such as the donor will see when all donors take turns.
std::vector<double> Group::rooms_for(double surplus) const {
  double total = 0;
  for (const auto& [minus_surplus, _] : donors_) total -= minus_surplus;
  const double stride = std::max(1.0, total / surplus);
  std::vector<double> rooms;
  double index = 0, next = 0;
  for (auto at = receivers_.rbegin(); at != receivers_.rend() && surplus > 0; ++at, ++index) {
    if (index < next) continue;
    next += stride;
    rooms.push_back(at->first);
    surplus -= at->first;
  }
  return rooms;
}

Cutter& Group::cutter_of(int64_t donor) {
  const auto found = cutters_.find(donor);
  if (found != cutters_.end()) return found->second;
  const std::vector<double> rooms = rooms_for(assignment_.surplus(donor));
  return cutters_.emplace(donor, Cutter(assignment_, options_, prices_, donor, rooms))
      .first->second;
}

bool Group::is_fair(const Move& move) const {
  const int64_t bytes = assignment_.bytes_in(move.receiver) + move.bytes;
  return static_cast<double>(bytes) <= fair_bytes_[move.receiver - ranks_.begin];
}

std::optional<Move> Group::cut(Cutter& cutter, double surplus, int64_t receiver, bool fair) {
  const Wish wish{receiver, surplus, -assignment_.surplus(receiver)};
  std::optional<Move> move = cutter.best_slice(wish, options_.cost.tile_q);
  if (!move) move = cutter.best_slice(wish, 1);
  if (move && fair && !is_fair(*move)) return std::nullopt;
  return move;
}

// Everything that is too much, to the server whose room is just enough.
std::optional<Move> Group::just_enough(Cutter& cutter, double surplus, bool fair) {
  int num_tried = 0;
  for (auto at = receivers_.lower_bound({surplus, -1});
       at != receivers_.end() && num_tried < kMaxReceivers; ++at, ++num_tried) {
    const std::optional<Move> move = cut(cutter, surplus, at->second, fair);
    if (move && move->relief >= surplus) return move;
  }
  return std::nullopt;
}

// To the receiver whose room, taken off the surplus, leaves what another's room just holds.
std::optional<Move> Group::first_of_two(Cutter& cutter, double surplus, bool fair) {
  int64_t best = -1;
  double least = std::numeric_limits<double>::infinity();
  int num_tried = 0;
  for (auto at = receivers_.rbegin(); at != receivers_.rend() && num_tried < kMaxPairs;
       ++at, ++num_tried) {
    const auto other = receivers_.lower_bound({surplus - at->first, -1});
    if (other == receivers_.end() || other->second == at->second) break;
    const double excess = other->first + at->first - surplus;
    if (excess < least) {
      least = excess;
      best = at->second;
    }
  }
  return best < 0 ? std::nullopt : cut(cutter, surplus, best, fair);
}

// Of the roomiest receivers to the one that is filled for the fewest bytes over the root of
// seconds.
std::optional<Move> Group::to_roomiest(Cutter& cutter, double surplus, bool fair) {
  std::optional<Move> best;
  double least = std::numeric_limits<double>::infinity();
  int num_tried = 0;
  for (auto at = receivers_.rbegin(); at != receivers_.rend() && num_tried < kMaxReceivers;
       ++at, ++num_tried) {
    if (best && num_tried >= style_.num_roomiest) break;
    const std::optional<Move> move = cut(cutter, surplus, at->second, fair);
    if (!move) continue;
    const double waste = std::max(0.0, std::min(at->first, surplus) - move->relief);
    const double bytes =
        static_cast<double>(move->bytes) + prices_.bytes_per_root * std::sqrt(waste);
    const double value = bytes / std::sqrt(std::max(move->relief, prices_.least_relief));
    if (value < least) {
      least = value;
      best = move;
    }
  }
  return best;
}

std::optional<Move> Group::next_move(int64_t donor, bool fair) {
  if (receivers_.empty() || assignment_.own(donor).empty()) return std::nullopt;
  Cutter& cutter = cutter_of(donor);
  const double surplus = assignment_.surplus(donor);
  const double largest = receivers_.rbegin()->first;
  const double dearest = assignment_.own(donor).front().seconds;
  std::optional<Move> move;
  if (surplus <= std::min(largest, dearest)) move = just_enough(cutter, surplus, fair);
  if (!move && surplus > largest && surplus < 2 * largest && dearest > surplus / 2) {
    move = first_of_two(cutter, surplus, fair);
  }
  return move ? move : to_roomiest(cutter, surplus, fair);
}

bool Group::run() {
  bool balanced = true;
  while (!donors_.empty()) {
    const int64_t donor = donors_.begin()->second;
    std::optional<Move> move = next_move(donor, style_.is_fair);
    if (!move && style_.is_fair) move = next_move(donor, false);
    donors_.erase(donors_.begin());
    if (!move) {
      balanced = false;
      continue;
    }
    const int64_t document = assignment_.own(donor)[move->share].document;
    receivers_.erase({assignment_.room(move->receiver), move->receiver});
    assignment_.apply(*move);
    cutter_of(donor).remember(document);
    list(move->receiver);
    const double surplus = assignment_.surplus(donor);
    const double first = -std::numeric_limits<double>::infinity();
    if (surplus > 0) donors_.emplace(style_.takes_turns ? -surplus : first, donor);
  }
  return balanced;
}

}  // namespace distca::planner
