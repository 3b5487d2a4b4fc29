#include "group.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "recut.h"

namespace distca::planner {
namespace {

constexpr int kMaxReceivers = 8;     // tried per move before the donor is given up
constexpr int kNumShorter = 4;       // slices, by a tile row each, that smaller rooms may just hold
constexpr int kMaxPairs = 64;        // of receivers that are weighed for a donor's last two slices
constexpr double kPairSpare = 100;   // least reliefs that both hold more, since rows are whole
constexpr double kWastePart = 0.5;   // of a slice's bytes for what a slice leaves unfilled
constexpr int kManyWholes = 64;      // surplus, in dearest documents, above which they go whole
constexpr int kLastWholes = 32;      // surplus, in dearest documents, left to be weighed
constexpr double kFairBytes = 1.49;  // into a receiver, over the least for its room

// Tried in this order; then anything goes.
constexpr Fairness kFairness[] = {{1.3, 0.9}, {1.48, 0.6}};

}  // namespace

double most_of_wholes(Assignment& assignment, const Prices& prices, int64_t donor, double surplus) {
  const std::span<const Share> own = assignment.own(donor);
  if (own.empty()) return 0;
  const double dearest = own.front().seconds;
  const bool gives_all = assignment.limit(donor) == 0;
  if (assignment.is_budget_spent() && gives_all) return std::numeric_limits<double>::infinity();
  if (assignment.is_budget_spent() || (dearest < prices.least_relief && !gives_all)) return surplus;
  return surplus > kManyWholes * dearest ? surplus - kLastWholes * dearest : 0;
}

Group::Group(Assignment& assignment, const PlanOptions& options, const Prices& prices,
             const Style& style, Range ranks)
    : assignment_(assignment), options_(options), prices_(prices), style_(style), ranks_(ranks) {
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    list(rank);
    const double room = std::max(0.0, -assignment_.surplus(rank));
    least_bytes_.push_back(prices.bytes_per_root * std::sqrt(room));
    bytes_before_.push_back(assignment_.bytes_in(rank));
    largest_bytes_ = std::max(largest_bytes_, least_bytes_.back());
  }
  for (const auto& [minus_surplus, _] : donors_) surplus_at_first_ -= minus_surplus;
  for (auto at = receivers_.rbegin(); at != receivers_.rend(); ++at) {
    rooms_at_first_.push_back(at->first);
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
  const double stride = std::max(1.0, surplus_at_first_ / surplus);
  std::vector<double> rooms;
  for (double next = 0; surplus > 0; next += stride) {
    const auto index = static_cast<size_t>(std::ceil(next));
    if (index >= rooms_at_first_.size()) break;
    rooms.push_back(rooms_at_first_[index]);
    surplus -= rooms.back();
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

// Bytes that the receiver may still be given.
double Group::fair_bytes(int64_t receiver) const {
  if (fairness_ == nullptr) return std::numeric_limits<double>::infinity();
  const size_t index = static_cast<size_t>(receiver - ranks_.begin);
  const int64_t given = assignment_.bytes_in(receiver) - bytes_before_[index];
  return std::max(kFairBytes * least_bytes_[index], fairness_->of_largest * largest_bytes_) -
         static_cast<double>(given);
}

std::optional<Move> Group::cut(Cutter& cutter, double surplus, int64_t receiver) {
  Wish wish{receiver, surplus, -assignment_.surplus(receiver)};
  wish.most_bytes = fair_bytes(receiver);
  if (wish.most_bytes <= 0) return std::nullopt;
  std::optional<Move> move = cutter.best_slice(wish, options_.cost.tile_q);
  if (!move) move = cutter.best_slice(wish, 1);
  const double least =
      fairness_ == nullptr ? 0 : fairness_->least_part * std::min(wish.room, surplus);
  return move && move->relief >= least ? move : std::nullopt;
}

// Everything that is too much, to the server whose room is just enough.
std::optional<Move> Group::just_enough(Cutter& cutter, double surplus) {
  const auto roomiest = std::prev(receivers_.end());
  const std::optional<Move> most = cut(cutter, surplus, roomiest->second);
  if (!most || most->relief < surplus) return std::nullopt;
  int num_tried = 0;
  for (auto at = receivers_.lower_bound({most->seconds, -1});
       at != receivers_.end() && num_tried < kMaxReceivers; ++at, ++num_tried) {
    const std::optional<Move> move = cut(cutter, surplus, at->second);
    if (move && move->relief >= surplus) return move;
  }
  return most;
}

// To the receiver whose room, taken off the surplus, leaves what another's room just holds.
std::optional<Move> Group::first_of_two(Cutter& cutter, double surplus) {
  const double wanted = surplus + kPairSpare * prices_.least_relief;
  int64_t best = -1;
  double least = std::numeric_limits<double>::infinity();
  int num_tried = 0;
  for (auto at = receivers_.rbegin(); at != receivers_.rend() && num_tried < kMaxPairs;
       ++at, ++num_tried) {
    const auto other = receivers_.lower_bound({wanted - at->first, -1});
    if (other == receivers_.end() || other->second == at->second) break;
    const double excess = other->first + at->first - surplus;
    if (excess < least) {
      least = excess;
      best = at->second;
    }
  }
  return best < 0 ? std::nullopt : cut(cutter, surplus, best);
}

// Of the roomiest receivers, and those that just hold a little less than they do, to the one that
// is filled for the fewest bytes over the root of seconds.
std::optional<Move> Group::to_roomiest(Cutter& cutter, double surplus) {
  std::optional<Move> best;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](const std::pair<double, int64_t>& room_and_rank) {
    const auto& [room, receiver] = room_and_rank;
    const std::optional<Move> move = cut(cutter, surplus, receiver);
    if (!move) return;
    const double waste = std::max(0.0, std::min(room, surplus) - move->relief);
    const double bytes =
        static_cast<double>(move->bytes) + kWastePart * prices_.bytes_per_root * std::sqrt(waste);
    const double value = bytes / std::sqrt(std::max(move->relief, prices_.least_relief));
    if (value < least) {
      least = value;
      best = move;
    }
  };
  int num_tried = 0;
  for (auto at = receivers_.rbegin(); at != receivers_.rend() && num_tried < kMaxReceivers;
       ++at, ++num_tried) {
    if (best && num_tried >= style_.num_roomiest) break;
    consider(*at);
  }
  if (!best || surplus <= receivers_.rbegin()->first) return best;
  const Share share = assignment_.own(best->donor)[best->share];
  Range slice = best->slice;
  const bool downward = slice.begin > share.rows.begin;
  for (int i = 0; i < kNumShorter && num_rows(slice) > 0; ++i) {
    const auto at = receivers_.lower_bound({assignment_.seconds(share.document, slice), -1});
    if (at != receivers_.end()) consider(*at);
    (downward ? slice.begin : slice.end) += downward ? options_.cost.tile_q : -options_.cost.tile_q;
  }
  return best;
}

std::optional<Move> Group::next_move(int64_t donor) {
  if (receivers_.empty() || assignment_.own(donor).empty()) return std::nullopt;
  Cutter& cutter = cutter_of(donor);
  const double surplus = assignment_.surplus(donor);
  const double largest = receivers_.rbegin()->first;
  const double dearest = assignment_.own(donor).front().seconds;
  std::optional<Move> move;
  if (surplus <= std::min(largest, dearest)) move = just_enough(cutter, surplus);
  if (!move && surplus > largest && surplus < 2 * largest && dearest > surplus / 2) {
    move = first_of_two(cutter, surplus);
  }
  return move ? move : to_roomiest(cutter, surplus);
}

std::optional<Move> Group::next_fair_move(int64_t donor) {
  std::optional<Move> move;
  for (const Fairness& fairness : kFairness) {
    fairness_ = &fairness;
    if (style_.is_fair && !move) move = next_move(donor);
  }
  fairness_ = nullptr;
  return move ? move : next_move(donor);
}

void Group::save_bytes() {
  fairness_ = style_.is_fair ? &kFairness[0] : nullptr;
  std::vector<double> most_bytes;
  for (int64_t rank = ranks_.begin; rank < ranks_.end; ++rank) {
    most_bytes.push_back(static_cast<double>(assignment_.bytes_in(rank)) + fair_bytes(rank));
  }
  recut(assignment_, options_, prices_, most_bytes);
  fairness_ = nullptr;
}

// Serves a donor with many documents to give. The first of the roomiest receivers that takes any
// gets at most half of its room, so that all receivers fill up evenly.
bool Group::give_wholes(int64_t donor) {
  const double most = most_of_wholes(assignment_, prices_, donor, assignment_.surplus(donor));
  int num_tried = 0;
  for (auto at = receivers_.rbegin(); most > 0 && at != receivers_.rend(); ++at) {
    if (num_tried++ == kMaxReceivers) break;
    const auto [room, receiver] = *at;
    const double half = std::max(room / 2, std::min(room, assignment_.own(donor).front().seconds));
    if (assignment_.give_wholes(donor, receiver, std::min(half, most)) == 0) continue;
    receivers_.erase({room, receiver});
    list(receiver);
    return true;
  }
  return false;
}

// Returns whether the donor gave anything.
bool Group::give(int64_t donor) {
  if (give_wholes(donor)) return true;
  if (assignment_.is_budget_spent()) return false;
  const std::optional<Move> move = next_fair_move(donor);
  if (!move) return false;
  const int64_t document = assignment_.own(donor)[move->share].document;
  receivers_.erase({assignment_.room(move->receiver), move->receiver});
  assignment_.apply(*move);
  cutter_of(donor).remember(document);
  list(move->receiver);
  return true;
}

bool Group::run() {
  bool balanced = true;
  while (!donors_.empty()) {
    const int64_t donor = donors_.begin()->second;
    const bool has_given = give(donor);
    donors_.erase(donors_.begin());
    if (!has_given) {
      balanced = false;
      continue;
    }
    const double surplus = assignment_.surplus(donor);
    const double first = -std::numeric_limits<double>::infinity();
    if (surplus > 0) donors_.emplace(style_.takes_turns ? -surplus : first, donor);
  }
  return balanced;
}

}  // namespace distca::planner
