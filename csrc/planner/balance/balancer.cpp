#include "balancer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "core/check.h"
#include "schedule.h"

namespace distca::planner {
namespace {

// A constant part of the budget, and a part for each item.
constexpr int64_t kSteps = 24'000'000;
constexpr int64_t kStepsPerItem = 160;

// Has no byte bounds: these make more bytes leave a donor, whose link may be too slow for them.
constexpr Pairing kUnbounded{8, true, false, 0.9};

// The search tries them in this order, with many ranks only the first.
constexpr Pairing kPairings[] = {{8, true, true},   {16, true, true}, {8, false, true},
                                 {4, true, true},   {8, true, false}, {1, true, true},
                                 {16, false, true}, {4, false, false}};

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
  Balancer(const Problem& problem, const Budget& budget)
      : problem_(problem),
        heuristics_(problem.heuristics),
        budget_(budget),
        goal_(problem.balanced_seconds * (1 + problem.options.tolerance)) {
    take(Assignment(problem, problem.balanced_seconds, budget_));
  }

  const Budget& budget() const { return budget_; }

  std::vector<Task> run() {
    const std::vector<Load> loads = best_->loads();
    const bool is_balanced = std::all_of(loads.begin(), loads.end(), [&](const Load& load) {
      return load.seconds_lag + load.seconds <= goal_;  // at any link time, since keys must travel
    });
    if (!is_valid_ || !is_balanced) search();
    return best_->tasks();
  }

 private:
  // Searches for the least feasible limit: tries a lower bound, then bisects between the largest
  // infeasible limit and the least feasible one, or the best makespan if that is less.
  void search() {
    double limit = least_limit(), infeasible = limit > goal_ ? goal_ : 0, feasible = kInfinity;
    for (int i = 0; i < heuristics_.max_limits; ++i) {
      (try_limit(limit) ? feasible : infeasible) = limit;
      const double most = is_valid_ ? std::min(feasible, makespan_) : feasible;
      if (infeasible == 0 || most <= infeasible * heuristics_.close_enough) break;
      limit = most < kInfinity ? std::sqrt(std::max(infeasible, goal_) * most) : 2 * limit;
    }
    if (feasible < kInfinity) save_bytes(feasible);
    if (!is_valid_) try_without_limit();
  }

  // Returns the goal, or a larger lower bound on the limit: links must be able to carry the surplus
  // of every rank, and links between nodes the surplus of every node.
  double least_limit() const {
    double impossible = goal_, possible = makespan_;
    if (can_carry(goal_)) return goal_;
    while (possible > impossible * heuristics_.close_enough) {
      const double middle = (impossible + possible) / 2;
      (can_carry(middle) ? possible : impossible) = middle;
    }
    return impossible;
  }

  // A rank's transfers for a slice of V seconds take at least root * sqrt(V) seconds, and its
  // visiting tasks do not overlap with the transfers of one part.
  bool can_carry(double limit) const {
    const Links& links = problem_.options.links;
    const double in_all = limit + problem_.hidden_seconds;
    const auto largest_slice = [&](double bytes_per_second) {
      const double root =
          problem_.bytes_per_root_second / (heuristics_.least_bytes_slack * bytes_per_second);
      const double of_part = root * links.exposed_part;
      const double side = (std::sqrt(of_part * of_part + 4 * in_all) - of_part) / 2;
      return std::min(limit, std::min(side * side, in_all * in_all / (root * root)));
    };
    const auto relief = [&](double bytes_per_second) {
      return in_all * heuristics_.least_bytes_slack * bytes_per_second *
             std::sqrt(largest_slice(bytes_per_second)) / problem_.bytes_per_root_second;
    };
    const double between = relief(links.node_bytes_per_second);
    const double inside = relief(links.bytes_per_second);
    const double most_visiting = largest_slice(links.node_bytes_per_second);
    double surplus_of_node = 0, relief_of_node = 0, all_surplus = 0, all_capacity = 0;
    const int64_t num_ranks = problem_.pack.num_ranks, size = links.ranks_per_node;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const double surplus = problem_.home_seconds[rank] - problem_.most_seconds(rank, limit);
      if (surplus > inside + between) return false;
      surplus_of_node += surplus;
      relief_of_node += std::min(problem_.home_seconds[rank], between);
      if (size >= num_ranks || ((rank + 1) % size != 0 && rank + 1 != num_ranks)) continue;
      if (surplus_of_node > relief_of_node) return false;
      all_surplus += std::max(0.0, surplus_of_node);
      all_capacity +=
          std::min(std::max(0.0, -surplus_of_node), static_cast<double>(size) * most_visiting);
      surplus_of_node = relief_of_node = 0;
    }
    return all_surplus <= all_capacity;
  }

  // Returns whether a limit is feasible. Tries the second pairing only if the first comes near it.
  bool try_limit(double limit) {
    const double slowest = attempt(limit, kPairings[0]);
    if (slowest <= limit) return true;
    return heuristics_.tries_unbounded && slowest <= limit * heuristics_.near_limit &&
           attempt(limit, kUnbounded) <= limit;
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
    double least_speed = kInfinity;
    for (int64_t rank = 0; rank < problem_.pack.num_ranks; ++rank) {
      const double speed = problem_.options.speed(rank);
      if (speed > 0) least_speed = std::min(least_speed, speed);
    }
    const Links& links = problem_.options.links;
    const double bytes_per_second = std::min(links.bytes_per_second, links.node_bytes_per_second);
    attempt(problem_.total_seconds / least_speed * 2 + (bytes_ + 1e18) / bytes_per_second,
            kPairings[0]);
    if (!is_valid_) reject_caps(problem_);
  }

  // Returns the seconds of the slowest rank in the pairing's plan, and keeps the plan if it is the
  // best so far. Once the budget is spent, it tries only if there is no valid plan yet.
  double attempt(double limit, const Pairing& pairing) {
    if (budget_.is_spent() && is_valid_) return kInfinity;
    Assignment candidate(problem_, limit * (1 - heuristics_.limit_slack), budget_);
    const double most = std::min(limit * heuristics_.hopeless, is_valid_ ? makespan_ : kInfinity);
    if (!schedule(candidate, pairing, most) || !candidate.is_valid()) return kInfinity;
    const std::vector<Load> loads = candidate.loads();
    const double makespan =
        planner::makespan(loads, problem_.options.links, problem_.hidden_seconds);
    least_ = std::min(least_, makespan);
    const double equal = std::max(goal_, least_ * heuristics_.equal_makespans);
    const bool is_better =
        makespan_ <= equal ? makespan <= equal && total_bytes(loads) < bytes_ : makespan <= equal;
    if (is_better || !is_valid_) take(std::move(candidate));
    return slowest(loads, problem_.options.links, problem_.hidden_seconds);
  }

  void take(Assignment&& candidate) {
    const std::vector<Load> loads = candidate.loads();
    makespan_ = makespan(loads, problem_.options.links, problem_.hidden_seconds);
    bytes_ = total_bytes(loads);
    is_valid_ = candidate.is_valid();
    if (is_valid_) least_ = std::min(least_, makespan_);
    best_.emplace(std::move(candidate));
  }

  const Problem& problem_;
  const Heuristics& heuristics_;
  Budget budget_;
  const double goal_;         // makespans below it are not better
  double least_ = kInfinity;  // least makespan of the valid plans so far
  std::optional<Assignment> best_;
  double makespan_;  // of the best
  double bytes_;     // of the best
  bool is_valid_;    // whether the best respects memory caps and speeds of 0
};

}  // namespace

Budget budget_for(const Problem& problem) {
  return {kSteps + kStepsPerItem * static_cast<int64_t>(problem.items.size())};
}

std::vector<Task> balance(const Problem& problem, Budget& budget) {
  Balancer balancer(problem, budget);
  std::vector<Task> tasks = balancer.run();
  budget.left = std::min(budget.left, balancer.budget().left);
  return tasks;
}

}  // namespace distca::planner
