#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "cutter.h"
#include "schedule.h"

namespace distca::planner {
namespace {

// Bounds the bytes into a receiver.
struct ByteBound {
  double part_of_largest;  // any receiver may get this many least bytes of the largest capacity
  double min_part;         // a slice is refused if the bound cuts it below this part of its request
};

// Tried in order; the last one bounds nothing.
constexpr ByteBound kByteBounds[] = {{1.3, 0.9}, {1.48, 0.6}, {kInfinity, 0}};

class RankBalancer {
 public:
  RankBalancer(Assignment& assignment, const Pairing& pairing, Range ranks)
      : assignment_(assignment),
        problem_(assignment.problem()),
        heuristics_(problem_.heuristics),
        pairing_(pairing),
        ranks_(ranks) {
    for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
      list(rank);
      const double capacity = std::max(0.0, -assignment_.surplus(rank));
      initial_surplus_ += std::max(0.0, assignment_.surplus(rank));
      least_bytes_.push_back(problem_.bytes_per_root_second * std::sqrt(capacity));
      bytes_before_.push_back(static_cast<double>(assignment_.load(rank).bytes_in));
      largest_bytes_ = std::max(largest_bytes_, least_bytes_.back());
    }
    for (auto at = receivers_.rbegin(); at != receivers_.rend(); ++at) {
      initial_capacities_.push_back(at->first);
    }
  }

  void run() {
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

  // Returns the bytes that the rank may get in all.
  double most_bytes(int64_t rank, const ByteBound& bound) const {
    if (bound.part_of_largest == kInfinity) return kInfinity;
    const size_t index = static_cast<size_t>(rank - ranks_.begin);
    return bytes_before_[index] + std::max(heuristics_.max_bytes_ratio * least_bytes_[index],
                                           bound.part_of_largest * largest_bytes_);
  }

 private:
  using Order = std::set<std::pair<double, int64_t>>;  // (key, rank)

  void list(int64_t rank) {
    const double surplus = assignment_.surplus(rank);
    if (surplus > 0) {
      donors_.emplace(-surplus, rank);
    } else if (assignment_.capacity(rank) > 0) {
      receivers_.emplace(assignment_.capacity(rank), rank);
    }
  }

  // Returns whether the donor gave anything.
  bool give(int64_t donor) {
    if (give_whole_documents(donor)) return true;
    if (assignment_.is_budget_spent()) return false;
    const std::optional<Move> move = next_bounded_move(donor);
    if (!move) return false;
    receivers_.erase({assignment_.capacity(move->receiver), move->receiver});
    cutter_of(donor).apply(*move);
    list(move->receiver);
    return true;
  }

  // Moves whole documents of a donor with many of them to one of the receivers with most capacity.
  bool give_whole_documents(int64_t donor) {
    const double most = seconds_in_whole_documents(assignment_, donor, assignment_.surplus(donor));
    int num_tried = 0;
    for (auto at = receivers_.rbegin(); most > 0 && at != receivers_.rend(); ++at) {
      if (num_tried++ == heuristics_.max_receivers) break;
      const auto [capacity, receiver] = *at;
      if (assignment_.give_whole_documents(donor, receiver, std::min(capacity, most)) == 0)
        continue;
      receivers_.erase({capacity, receiver});
      list(receiver);
      return true;
    }
    return false;
  }

  std::optional<Move> next_bounded_move(int64_t donor) {
    for (const ByteBound& bound : kByteBounds) {
      byte_bound_ = bound;
      if (!pairing_.bounds_bytes && bound.part_of_largest < kInfinity) continue;
      if (const std::optional<Move> move = next_move(donor)) return move;
    }
    return std::nullopt;
  }

  std::optional<Move> next_move(int64_t donor) {
    if (receivers_.empty() || assignment_.own(donor).empty()) return std::nullopt;
    Cutter& cutter = cutter_of(donor);
    const double surplus = assignment_.surplus(donor);
    const double largest_capacity = receivers_.rbegin()->first;
    const double largest_item = assignment_.own(donor).front().seconds;
    std::optional<Move> move;
    if (heuristics_.fits_last_slice && surplus <= std::min(largest_capacity, largest_item)) {
      move = just_enough(cutter, surplus);
    }
    return move ? move : best_candidate(cutter, surplus);
  }

  // The cutter plans for the capacities that the donor is likely to meet if donors take turns.
  Cutter& cutter_of(int64_t donor) {
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

  std::optional<Move> cut(Cutter& cutter, double surplus, int64_t receiver) {
    Request request{receiver, surplus, -assignment_.surplus(receiver)};
    request.max_bytes = most_bytes(receiver, byte_bound_) -
                        static_cast<double>(assignment_.load(receiver).bytes_in);
    if (request.max_bytes <= 0) return std::nullopt;
    const std::optional<Move> move = cutter.best_slice(request);
    return move && move->relief >= byte_bound_.min_part * request.most() ? move : std::nullopt;
  }

  // Moves the whole surplus to the receiver with the smallest sufficient capacity.
  std::optional<Move> just_enough(Cutter& cutter, double surplus) {
    const std::optional<Move> most = cut(cutter, surplus, receivers_.rbegin()->second);
    if (!most || most->relief < surplus) return std::nullopt;
    int num_tried = 0;
    for (auto at = receivers_.lower_bound({most->seconds, -1});
         at != receivers_.end() && num_tried < heuristics_.max_receivers; ++at, ++num_tried) {
      const std::optional<Move> move = cut(cutter, surplus, at->second);
      if (move && move->relief >= surplus) return move;
    }
    return most;
  }

  // Among the receivers with most capacity, picks the one whose slice costs the fewest bytes per
  // sqrt(second).
  std::optional<Move> best_candidate(Cutter& cutter, double surplus) {
    std::optional<Move> best;
    double least = kInfinity;
    int num_tried = 0;
    for (auto at = receivers_.rbegin();
         at != receivers_.rend() && num_tried < heuristics_.max_receivers; ++at, ++num_tried) {
      if (best && num_tried >= pairing_.num_candidates) break;
      const std::optional<Move> move = cut(cutter, surplus, at->second);
      if (!move) continue;
      const double relief = std::max(move->relief, problem_.min_relief);
      const double value = static_cast<double>(move->bytes) / std::sqrt(relief);
      if (value < least) {
        least = value;
        best = move;
      }
    }
    return best;
  }

  Assignment& assignment_;
  const Problem& problem_;
  const Heuristics& heuristics_;
  const Pairing& pairing_;
  const Range ranks_;
  Order donors_;                            // by falling surplus
  Order receivers_;                         // by rising capacity
  std::vector<double> least_bytes_;         // [ranks] for the rank's initial capacity
  std::vector<double> bytes_before_;        // [ranks] into the rank before run()
  double largest_bytes_ = 0;                // for the largest capacity
  double initial_surplus_ = 0;              // of all donors
  std::vector<double> initial_capacities_;  // descending
  ByteBound byte_bound_{};
  std::map<int64_t, Cutter> cutters_;
};

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

std::vector<double> balance_ranks(Assignment& assignment, const Pairing& pairing, Range ranks) {
  RankBalancer balancer(assignment, pairing, ranks);
  balancer.run();
  std::vector<double> most_bytes;
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    const ByteBound& bound = pairing.bounds_bytes ? kByteBounds[0] : *std::rbegin(kByteBounds);
    most_bytes.push_back(balancer.most_bytes(rank, bound));
  }
  return most_bytes;
}

}  // namespace distca::planner
