#include "balancer.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "core/check.h"
#include "schedule.h"

namespace distca::planner {
namespace {

// The Budget of one search: a constant part, and a part for each item. It bounds planning time to
// about the time of a step's attention, wherever documents lie. All attempts of a search share it;
// once it is spent, the search returns its best plan.
constexpr int64_t kSteps = 24'000'000;
constexpr int64_t kStepsPerItem = 160;

// Has no byte bounds: these make more bytes leave a donor, whose link may be too slow for them.
constexpr Pairing kUnbounded{8, true, false, 0, 0.8};

// For cases in which links between nodes need more time than servers. Fewest bytes first.
constexpr Pairing kNodePairings[] = {
    {8, true, false, 1, 0.8}, {8, true, false, 2, 0.9}, {8, true, false, 4, 1}};

// The search tries them in this order, with many ranks only the first.
constexpr Pairing kPairings[] = {{8, true, true},   {16, true, true}, {8, false, true},
                                 {4, true, true},   {8, true, false}, {1, true, true},
                                 {16, false, true}, {4, false, false}};

Budget budget_for(const Problem& problem) {
  return {kSteps + kStepsPerItem * static_cast<int64_t>(problem.items.size())};
}

// Throws an error that names a rank whose rows fit nowhere, and the server with the largest cap.
[[noreturn]] void reject_caps(const Problem& problem) {
  const PlanOptions& options = problem.options;
  const auto serves = [&](int64_t rank) { return options.speed(rank) > 0; };
  int64_t roomiest = -1;
  for (int64_t rank = 0; rank < problem.pack.num_ranks; ++rank) {
    if (!serves(rank)) continue;
    if (roomiest < 0 || options.cap_bytes(rank) > options.cap_bytes(roomiest)) roomiest = rank;
  }
  const auto held = [&](int64_t rank) { return problem.home_traffic[rank].held_bytes; };
  const auto fits = [&](int64_t rank) {
    return serves(rank) ? static_cast<double>(held(rank)) <= options.cap_bytes(rank)
                        : problem.home_seconds[rank] == 0;
  };
  int64_t rank = 0;
  while (rank + 1 < problem.pack.num_ranks && fits(rank)) ++rank;
  int64_t bytes = held(rank);
  std::string rows = "rows that visit server " + std::to_string(rank);
  if (!serves(rank)) {
    rows = "rows of rank " + std::to_string(rank) + ", which serves nothing,";
    for (const Item& item : problem.home_items(rank)) {
      bytes += num_rows(item.rows) * options.held_bytes.query +
               num_rows(problem.keys_of(item.document, item.rows)) * options.held_bytes.key;
    }
  }
  reject("options: servers: no plan keeps to the memory caps: ", rows, " take ", bytes,
         " bytes in all, and server ", roomiest, ", which has the largest cap, may hold ",
         static_cast<int64_t>(options.cap_bytes(roomiest)),
         "; raise the caps or let more ranks serve");
}

class Balancer {
 public:
  explicit Balancer(const Problem& problem)
      : problem_(problem), heuristics_(problem.heuristics), budget_(budget_for(problem)) {
    take(Assignment(problem, problem.total_seconds / problem.total_speed, budget_));
  }

  std::vector<Task> run() {
    const double limit =
        problem_.total_seconds / problem_.total_speed * (1 + problem_.options.tolerance);
    const std::vector<Load> loads = best_->loads();
    const bool is_balanced = std::all_of(loads.begin(), loads.end(), [&](const Load& load) {
      return load.seconds <= limit;  // at any link time, since keys must travel
    });
    if (!is_valid_ || !is_balanced) search(limit);
    return best_->tasks();
  }

 private:
  // Searches for the least feasible limit: tries the first one, then bisects up to the best
  // makespan.
  void search(double limit) {
    double infeasible = 0, feasible = 0;
    for (int i = 0; i < heuristics_.max_limits; ++i) {
      (try_limit(limit) ? feasible : infeasible) = limit;
      if (infeasible == 0) break;
      if (is_valid_ && makespan_ <= infeasible * heuristics_.close_enough) break;
      limit = is_valid_ ? (infeasible + makespan_) / 2 : 2 * limit;
    }
    if (feasible > 0) save_bytes(feasible);
    if (!is_valid_) try_without_limit();
  }

  bool try_limit(double limit) {
    if (!is_tight_) {
      if (attempt(limit, kPairings[0])) return true;
      if (heuristics_.tries_unbounded && attempt(limit, kUnbounded)) return true;
    }
    if (!problem_.options.links.are_slow_between_nodes(problem_.pack.num_ranks)) return false;
    is_tight_ = true;
    return std::any_of(std::begin(kNodePairings), std::end(kNodePairings),
                       [&](const Pairing& pairing) { return attempt(limit, pairing); });
  }

  // Tries the other pairings to save bytes, if ranks and documents are few.
  void save_bytes(double limit) {
    const auto num_items = std::max<int64_t>(1, static_cast<int64_t>(problem_.items.size()));
    const int64_t num_pairings =
        std::min({heuristics_.many_ranks / problem_.pack.num_ranks,
                  heuristics_.many_items / num_items, static_cast<int64_t>(std::size(kPairings))});
    for (int64_t i = 1; i < num_pairings; ++i) attempt(limit, kPairings[i]);
  }

  // Tries without limits for servers and links, so that only memory restricts the plan.
  void try_without_limit() {
    budget_ = budget_for(problem_);
    double slowest = std::numeric_limits<double>::infinity();
    for (int64_t rank = 0; rank < problem_.pack.num_ranks; ++rank) {
      const double speed = problem_.options.speed(rank);
      if (speed > 0) slowest = std::min(slowest, speed);
    }
    const Links& links = problem_.options.links;
    const double bytes_per_second = std::min(links.bytes_per_second, links.node_bytes_per_second);
    attempt(problem_.total_seconds / slowest * 2 + (bytes_ + 1e18) / bytes_per_second,
            kPairings[0]);
    if (!is_valid_) reject_caps(problem_);
  }

  // Returns whether the pairing gives a plan within the limit, and keeps the plan if it is the best
  // so far. Once the budget is spent, it tries only if there is no valid plan yet.
  bool attempt(double limit, const Pairing& pairing) {
    if (budget_.is_spent() && is_valid_) return false;
    Assignment candidate(problem_, limit * (1 - heuristics_.limit_slack), budget_);
    schedule(candidate, pairing);
    if (!candidate.is_valid()) return false;
    const std::vector<Load> loads = candidate.loads();
    const double makespan = planner::makespan(loads, problem_.options.links);
    const bool is_feasible = makespan <= limit;
    const bool is_better =
        is_feasible && makespan_ <= limit ? total_bytes(loads) < bytes_ : makespan < makespan_;
    if (is_better || !is_valid_) take(std::move(candidate));
    return is_feasible;
  }

  void take(Assignment&& candidate) {
    const std::vector<Load> loads = candidate.loads();
    makespan_ = makespan(loads, problem_.options.links);
    bytes_ = total_bytes(loads);
    is_valid_ = candidate.is_valid();
    best_.emplace(std::move(candidate));
  }

  const Problem& problem_;
  const Heuristics& heuristics_;
  Budget budget_;
  std::optional<Assignment> best_;
  double makespan_;        // of the best
  double bytes_;           // of the best
  bool is_valid_;          // whether the best respects memory caps and speeds of 0
  bool is_tight_ = false;  // whether links between nodes made the first limit infeasible
};

}  // namespace

std::vector<Task> balance(const Problem& problem) {
  return Balancer(problem).run();
}

}  // namespace distca::planner
