#include "group.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "recut.h"

namespace distca::planner {
namespace {

constexpr int kMaxReceivers = 8;  // candidates per move before the donor gives up
constexpr int kNumShorter = 4;  // slices, each a tile row shorter, that a smaller capacity may fit
constexpr int kMaxPairs = 64;   // pairs of receivers compared for a donor's last two slices
constexpr double kPairSlack = 100;  // least reliefs of extra capacity, since rows are not divided
constexpr double kWastePart = 0.5;  // of the least bytes of capacity left over: a candidate's cost
constexpr int kManyDocuments = 64;  // surplus, in largest items, above which documents move whole
constexpr int kLastDocuments = 32;  // surplus, in largest items, that moves one slice at a time
constexpr double kMaxBytesRatio = 1.49;  // into a receiver, over the least for its capacity

// The group tries these in order, then no bound.
constexpr ByteBound kByteBounds[] = {{1.3, 0.9}, {1.48, 0.6}};

}  // namespace

double seconds_in_whole_documents(Assignment& assignment, const Weights& weights, int64_t donor,
                                  double surplus) {
  const std::span<const Item> own = assignment.own(donor);
  if (own.empty()) return 0;
  const double largest_item = own.front().seconds;
  const bool gives_all = assignment.limit(donor) == 0;
  if (assignment.is_budget_spent() && gives_all) return std::numeric_limits<double>::infinity();
  if (assignment.is_budget_spent() || (largest_item < weights.min_relief && !gives_all))
    return surplus;
  return surplus > kManyDocuments * largest_item ? surplus - kLastDocuments * largest_item : 0;
}

Group::Group(Assignment& assignment, const PlanOptions& options, const Weights& weights,
             const Pairing& pairing, Range ranks)
    : assignment_(assignment),
      options_(options),
      weights_(weights),
      pairing_(pairing),
      ranks_(ranks) {
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    list(rank);
    const double capacity = std::max(0.0, -assignment_.surplus(rank));
    least_bytes_.push_back(weights.bytes_per_root_second * std::sqrt(capacity));
    bytes_before_.push_back(assignment_.bytes_in(rank));
    largest_bytes_ = std::max(largest_bytes_, least_bytes_.back());
  }
  for (const auto& [minus_surplus, _] : donors_) initial_surplus_ -= minus_surplus;
  for (auto at = receivers_.rbegin(); at != receivers_.rend(); ++at) {
    initial_capacities_.push_back(at->first);
  }
}

void Group::list(int64_t rank) {
  const double surplus = assignment_.surplus(rank);
  if (surplus > 0) {
    donors_.emplace(-surplus, rank);
  } else if (assignment_.capacity(rank) > 0) {
    receivers_.emplace(assignment_.capacity(rank), rank);
  }
}

// Returns the capacities that the donor is likely to meet if donors take turns, the largest first.
std::vector<double> Group::capacities_for(double surplus) const {
  const double stride = std::max(1.0, initial_surplus_ / surplus);
  std::vector<double> capacities;
  for (double next = 0; surplus > 0; next += stride) {
    const auto index = static_cast<size_t>(std::ceil(next));
    if (index >= initial_capacities_.size()) break;
    capacities.push_back(initial_capacities_[index]);
    surplus -= capacities.back();
  }
  return capacities;
}

Cutter& Group::cutter_of(int64_t donor) {
  const auto cutter = cutters_.find(donor);
  if (cutter != cutters_.end()) return cutter->second;
  const std::vector<double> capacities = capacities_for(assignment_.surplus(donor));
  return cutters_.emplace(donor, Cutter(assignment_, options_, weights_, donor, capacities))
      .first->second;
}

// Returns the bytes that the receiver may still get under the byte bound.
double Group::bytes_left(int64_t receiver) const {
  if (byte_bound_ == nullptr) return std::numeric_limits<double>::infinity();
  const size_t index = static_cast<size_t>(receiver - ranks_.begin);
  const int64_t bytes = assignment_.bytes_in(receiver) - bytes_before_[index];
  return std::max(kMaxBytesRatio * least_bytes_[index],
                  byte_bound_->part_of_largest * largest_bytes_) -
         static_cast<double>(bytes);
}

std::optional<Move> Group::cut(Cutter& cutter, double surplus, int64_t receiver) {
  Request request{receiver, surplus, -assignment_.surplus(receiver)};
  request.max_bytes = bytes_left(receiver);
  if (request.max_bytes <= 0) return std::nullopt;
  std::optional<Move> move = cutter.best_slice(request, options_.cost.tile_q);
  if (!move) move = cutter.best_slice(request, 1);
  const double least =
      byte_bound_ == nullptr ? 0 : byte_bound_->min_part * std::min(request.capacity, surplus);
  return move && move->relief >= least ? move : std::nullopt;
}

// Moves the whole surplus to the receiver with the smallest sufficient capacity.
std::optional<Move> Group::just_enough(Cutter& cutter, double surplus) {
  const auto largest = std::prev(receivers_.end());
  const std::optional<Move> most = cut(cutter, surplus, largest->second);
  if (!most || most->relief < surplus) return std::nullopt;
  int num_tried = 0;
  for (auto at = receivers_.lower_bound({most->seconds, -1});
       at != receivers_.end() && num_tried < kMaxReceivers; ++at, ++num_tried) {
    const std::optional<Move> move = cut(cutter, surplus, at->second);
    if (move && move->relief >= surplus) return move;
  }
  return most;
}

// Picks the receiver that, together with a second one, holds the surplus with least excess.
std::optional<Move> Group::first_of_two(Cutter& cutter, double surplus) {
  const double target = surplus + kPairSlack * weights_.min_relief;
  int64_t best = -1;
  double least = std::numeric_limits<double>::infinity();
  int num_tried = 0;
  for (auto at = receivers_.rbegin(); at != receivers_.rend() && num_tried < kMaxPairs;
       ++at, ++num_tried) {
    const auto other = receivers_.lower_bound({target - at->first, -1});
    if (other == receivers_.end() || other->second == at->second) break;
    const double excess = other->first + at->first - surplus;
    if (excess < least) {
      least = excess;
      best = at->second;
    }
  }
  return best < 0 ? std::nullopt : cut(cutter, surplus, best);
}

// Among the receivers with most capacity, and those that fit a slightly shorter slice, picks the
// one whose slice costs the fewest bytes per sqrt(second).
std::optional<Move> Group::best_candidate(Cutter& cutter, double surplus) {
  std::optional<Move> best;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](const std::pair<double, int64_t>& capacity_and_rank) {
    const auto& [capacity, receiver] = capacity_and_rank;
    const std::optional<Move> move = cut(cutter, surplus, receiver);
    if (!move) return;
    const double waste = std::max(0.0, std::min(capacity, surplus) - move->relief);
    const double bytes = static_cast<double>(move->bytes) +
                         kWastePart * weights_.bytes_per_root_second * std::sqrt(waste);
    const double value = bytes / std::sqrt(std::max(move->relief, weights_.min_relief));
    if (value < least) {
      least = value;
      best = move;
    }
  };
  int num_tried = 0;
  for (auto at = receivers_.rbegin(); at != receivers_.rend() && num_tried < kMaxReceivers;
       ++at, ++num_tried) {
    if (best && num_tried >= pairing_.num_candidates) break;
    consider(*at);
  }
  if (!best || surplus <= receivers_.rbegin()->first) return best;
  const Item item = assignment_.own(best->donor)[best->item];
  Range slice = best->slice;
  const bool downward = slice.begin > item.rows.begin;
  for (int i = 0; i < kNumShorter && num_rows(slice) > 0; ++i) {
    const auto at = receivers_.lower_bound({assignment_.seconds(item.document, slice), -1});
    if (at != receivers_.end()) consider(*at);
    (downward ? slice.begin : slice.end) += downward ? options_.cost.tile_q : -options_.cost.tile_q;
  }
  return best;
}

std::optional<Move> Group::next_move(int64_t donor) {
  if (receivers_.empty() || assignment_.own(donor).empty()) return std::nullopt;
  Cutter& cutter = cutter_of(donor);
  const double surplus = assignment_.surplus(donor);
  const double largest_capacity = receivers_.rbegin()->first;
  const double largest_item = assignment_.own(donor).front().seconds;
  std::optional<Move> move;
  if (surplus <= std::min(largest_capacity, largest_item)) move = just_enough(cutter, surplus);
  if (!move && surplus > largest_capacity && surplus < 2 * largest_capacity &&
      largest_item > surplus / 2) {
    move = first_of_two(cutter, surplus);
  }
  return move ? move : best_candidate(cutter, surplus);
}

std::optional<Move> Group::next_bounded_move(int64_t donor) {
  std::optional<Move> move;
  for (const ByteBound& bound : kByteBounds) {
    byte_bound_ = &bound;
    if (pairing_.bounds_bytes && !move) move = next_move(donor);
  }
  byte_bound_ = nullptr;
  return move ? move : next_move(donor);
}

void Group::save_bytes() {
  byte_bound_ = pairing_.bounds_bytes ? &kByteBounds[0] : nullptr;
  std::vector<double> max_bytes;
  for (int64_t rank = ranks_.begin; rank < ranks_.end; ++rank) {
    max_bytes.push_back(static_cast<double>(assignment_.bytes_in(rank)) + bytes_left(rank));
  }
  recut(assignment_, options_, weights_, max_bytes);
  byte_bound_ = nullptr;
}

// Moves whole documents of a donor with many of them. The receiver gets at most half of its
// capacity at a time, so that all receivers fill evenly.
bool Group::give_whole_documents(int64_t donor) {
  const double most =
      seconds_in_whole_documents(assignment_, weights_, donor, assignment_.surplus(donor));
  int num_tried = 0;
  for (auto at = receivers_.rbegin(); most > 0 && at != receivers_.rend(); ++at) {
    if (num_tried++ == kMaxReceivers) break;
    const auto [capacity, receiver] = *at;
    const double half =
        std::max(capacity / 2, std::min(capacity, assignment_.own(donor).front().seconds));
    if (assignment_.give_whole_documents(donor, receiver, std::min(half, most)) == 0) continue;
    receivers_.erase({capacity, receiver});
    list(receiver);
    return true;
  }
  return false;
}

// Returns whether the donor gave anything.
bool Group::give(int64_t donor) {
  if (give_whole_documents(donor)) return true;
  if (assignment_.is_budget_spent()) return false;
  const std::optional<Move> move = next_bounded_move(donor);
  if (!move) return false;
  const int64_t document = assignment_.own(donor)[move->item].document;
  receivers_.erase({assignment_.capacity(move->receiver), move->receiver});
  assignment_.apply(*move);
  cutter_of(donor).remember(document);
  list(move->receiver);
  return true;
}

bool Group::run() {
  bool balanced = true;
  while (!donors_.empty()) {
    const int64_t donor = donors_.begin()->second;
    const bool has_moved = give(donor);
    donors_.erase(donors_.begin());
    if (!has_moved) {
      balanced = false;
      continue;
    }
    const double surplus = assignment_.surplus(donor);
    const double first = -std::numeric_limits<double>::infinity();
    if (surplus > 0) donors_.emplace(pairing_.takes_turns ? -surplus : first, donor);
  }
  return balanced;
}

}  // namespace distca::planner
