#include "rank_balancer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

namespace distca::planner {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Tried in order, then no bound.
constexpr ByteBound kByteBounds[] = {{1.3, 0.9}, {1.48, 0.6}};

}  // namespace

double seconds_in_whole_documents(Assignment& assignment, int64_t donor, double surplus) {
  if (assignment.own(donor).empty()) return 0;
  const double largest_item = assignment.own(donor).front().seconds;
  const bool gives_all = assignment.limit(donor) == 0;
  if (assignment.is_budget_spent()) return gives_all ? kInfinity : surplus;
  const Problem& problem = assignment.problem();
  const bool are_short = largest_item < problem.min_relief && !gives_all;
  return are_short || surplus > problem.heuristics.many_documents * largest_item ? surplus : 0;
}

RankBalancer::RankBalancer(Assignment& assignment, const Pairing& pairing, Range ranks)
    : assignment_(assignment), problem_(assignment.problem()), pairing_(pairing), ranks_(ranks) {
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    list(rank);
    const double capacity = std::max(0.0, -assignment_.surplus(rank));
    initial_surplus_ += std::max(0.0, assignment_.surplus(rank));
    least_bytes_.push_back(problem_.bytes_per_root_second * std::sqrt(capacity));
    bytes_before_.push_back(assignment_.load(rank).bytes_in);
    largest_bytes_ = std::max(largest_bytes_, least_bytes_.back());
  }
  for (auto at = receivers_.rbegin(); at != receivers_.rend(); ++at) {
    initial_capacities_.push_back(at->first);
  }
}

void RankBalancer::list(int64_t rank) {
  const double surplus = assignment_.surplus(rank);
  if (surplus > 0) {
    donors_.emplace(-surplus, rank);
  } else if (assignment_.capacity(rank) > 0) {
    receivers_.emplace(assignment_.capacity(rank), rank);
  }
}

// The cutter plans for the capacities that the donor is likely to meet if donors take turns.
Cutter& RankBalancer::cutter_of(int64_t donor) {
  const auto cutter = cutters_.find(donor);
  if (cutter != cutters_.end()) return cutter->second;
  double surplus = assignment_.surplus(donor);
  const double stride = std::max(1.0, initial_surplus_ / surplus);
  std::vector<double> capacities;
  for (double next = 0; surplus > 0; next += stride) {
    const auto index = static_cast<size_t>(std::ceil(next));
    if (index >= initial_capacities_.size()) break;
    capacities.push_back(initial_capacities_[index]);
    surplus -= capacities.back();
  }
  return cutters_.try_emplace(donor, assignment_, donor, std::move(capacities)).first->second;
}

// Returns the bytes that the receiver may still get under the byte bound.
double RankBalancer::bytes_left(int64_t receiver) const {
  if (byte_bound_ == nullptr) return kInfinity;
  const size_t index = static_cast<size_t>(receiver - ranks_.begin);
  const int64_t bytes = assignment_.load(receiver).bytes_in - bytes_before_[index];
  return std::max(problem_.heuristics.max_bytes_ratio * least_bytes_[index],
                  byte_bound_->part_of_largest * largest_bytes_) -
         static_cast<double>(bytes);
}

std::optional<Move> RankBalancer::cut(Cutter& cutter, double surplus, int64_t receiver) {
  Request request{receiver, surplus, -assignment_.surplus(receiver)};
  request.max_bytes = bytes_left(receiver);
  if (request.max_bytes <= 0) return std::nullopt;
  const std::optional<Move> move = cutter.best_slice(request);
  const double least =
      byte_bound_ == nullptr ? 0 : byte_bound_->min_part * std::min(request.capacity, surplus);
  return move && move->relief >= least ? move : std::nullopt;
}

// Moves the whole surplus to the receiver with the smallest sufficient capacity.
std::optional<Move> RankBalancer::just_enough(Cutter& cutter, double surplus) {
  const auto largest = std::prev(receivers_.end());
  const std::optional<Move> most = cut(cutter, surplus, largest->second);
  if (!most || most->relief < surplus) return std::nullopt;
  int num_tried = 0;
  for (auto at = receivers_.lower_bound({most->seconds, -1});
       at != receivers_.end() && num_tried < problem_.heuristics.max_receivers; ++at, ++num_tried) {
    const std::optional<Move> move = cut(cutter, surplus, at->second);
    if (move && move->relief >= surplus) return move;
  }
  return most;
}

// Picks the receiver that, together with a second one, holds the surplus with least excess.
std::optional<Move> RankBalancer::first_of_two(Cutter& cutter, double surplus) {
  const double target = surplus + problem_.heuristics.pair_slack * problem_.min_relief;
  int64_t best = -1;
  double least = kInfinity;
  int num_tried = 0;
  for (auto at = receivers_.rbegin();
       at != receivers_.rend() && num_tried < problem_.heuristics.max_pairs; ++at, ++num_tried) {
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
std::optional<Move> RankBalancer::best_candidate(Cutter& cutter, double surplus) {
  std::optional<Move> best;
  double least = kInfinity;
  const auto consider = [&](const std::pair<double, int64_t>& capacity_and_rank) {
    const auto& [capacity, receiver] = capacity_and_rank;
    const std::optional<Move> move = cut(cutter, surplus, receiver);
    if (!move) return;
    const double waste = std::max(0.0, std::min(capacity, surplus) - move->relief);
    const double bytes = static_cast<double>(move->bytes) + problem_.heuristics.waste_part *
                                                                problem_.bytes_per_root_second *
                                                                std::sqrt(waste);
    const double value = bytes / std::sqrt(std::max(move->relief, problem_.min_relief));
    if (value < least) {
      least = value;
      best = move;
    }
  };
  int num_tried = 0;
  for (auto at = receivers_.rbegin();
       at != receivers_.rend() && num_tried < problem_.heuristics.max_receivers;
       ++at, ++num_tried) {
    if (best && num_tried >= pairing_.num_candidates) break;
    consider(*at);
  }
  if (!best || surplus <= receivers_.rbegin()->first) return best;
  const Item item = assignment_.own(best->donor)[best->item];
  Range slice = best->slice;
  const bool downward = slice.begin > item.rows.begin;
  for (int i = 0; i < problem_.heuristics.num_shorter && num_rows(slice) > 0; ++i) {
    const auto at = receivers_.lower_bound({problem_.seconds(item.document, slice), -1});
    if (at != receivers_.end()) consider(*at);
    (downward ? slice.begin : slice.end) +=
        downward ? problem_.options.cost.tile_q : -problem_.options.cost.tile_q;
  }
  return best;
}

std::optional<Move> RankBalancer::next_move(int64_t donor) {
  if (receivers_.empty() || assignment_.own(donor).empty()) return std::nullopt;
  Cutter& cutter = cutter_of(donor);
  const double surplus = assignment_.surplus(donor);
  const double largest_capacity = receivers_.rbegin()->first;
  const double largest_item = assignment_.own(donor).front().seconds;
  std::optional<Move> move;
  if (problem_.heuristics.fits_last_slice && surplus <= std::min(largest_capacity, largest_item))
    move = just_enough(cutter, surplus);
  if (!move && surplus > largest_capacity && surplus < 2 * largest_capacity &&
      largest_item > surplus / 2) {
    move = first_of_two(cutter, surplus);
  }
  return move ? move : best_candidate(cutter, surplus);
}

std::optional<Move> RankBalancer::next_bounded_move(int64_t donor) {
  std::optional<Move> move;
  for (const ByteBound& bound : kByteBounds) {
    byte_bound_ = &bound;
    if (pairing_.bounds_bytes && !move) move = next_move(donor);
  }
  byte_bound_ = nullptr;
  return move ? move : next_move(donor);
}

std::vector<double> RankBalancer::most_bytes() {
  byte_bound_ = pairing_.bounds_bytes ? &kByteBounds[0] : nullptr;
  std::vector<double> most;
  for (int64_t rank = ranks_.begin; rank < ranks_.end; ++rank) {
    most.push_back(static_cast<double>(assignment_.load(rank).bytes_in) + bytes_left(rank));
  }
  byte_bound_ = nullptr;
  return most;
}

// Moves whole documents of a donor with many of them to one of the receivers with most capacity.
bool RankBalancer::give_whole_documents(int64_t donor) {
  const double most = seconds_in_whole_documents(assignment_, donor, assignment_.surplus(donor));
  int num_tried = 0;
  for (auto at = receivers_.rbegin(); most > 0 && at != receivers_.rend(); ++at) {
    if (num_tried++ == problem_.heuristics.max_receivers) break;
    const auto [capacity, receiver] = *at;
    if (assignment_.give_whole_documents(donor, receiver, std::min(capacity, most)) == 0) continue;
    receivers_.erase({capacity, receiver});
    list(receiver);
    return true;
  }
  return false;
}

// Returns whether the donor gave anything.
bool RankBalancer::give(int64_t donor) {
  if (give_whole_documents(donor)) return true;
  if (assignment_.is_budget_spent()) return false;
  const std::optional<Move> move = next_bounded_move(donor);
  if (!move) return false;
  receivers_.erase({assignment_.capacity(move->receiver), move->receiver});
  cutter_of(donor).apply(*move);
  list(move->receiver);
  return true;
}

void RankBalancer::run() {
  while (!donors_.empty()) {
    const int64_t donor = donors_.begin()->second;
    const bool has_moved = give(donor);
    donors_.erase(donors_.begin());
    const double surplus = assignment_.surplus(donor);
    if (has_moved && surplus > 0) {
      donors_.emplace(pairing_.takes_turns ? -surplus : -kInfinity, donor);
    }
  }
}

}  // namespace distca::planner
