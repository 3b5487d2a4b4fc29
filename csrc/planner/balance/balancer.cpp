#include "balancer.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "../model/loads.h"
#include "assignment.h"
#include "scheduler.h"

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

Budget budget_for(const HomeCut& home) {
  return Budget(kSteps + kStepsPerItem * static_cast<int64_t>(home.items.size()));
}

class Balancer {
 public:
  explicit Balancer(const Problem& problem);

  std::vector<Task> run();

 private:
  void search(double limit);
  bool try_limit(double limit);
  void save_bytes(double limit);
  bool attempt(double limit, const Pairing& pairing);
  void try_without_limit();
  void take(Assignment&& candidate);
  [[noreturn]] void reject() const;

  const Problem& problem_;
  const Heuristics& heuristics_;
  Budget budget_;
  std::optional<Assignment> best_;
  double makespan_;        // of the best
  double bytes_;           // of the best
  bool is_valid_;          // whether the best respects memory caps and speeds of 0
  bool is_tight_ = false;  // whether links between nodes made the first limit infeasible
};

Balancer::Balancer(const Problem& problem)
    : problem_(problem), heuristics_(problem.heuristics), budget_(budget_for(problem.home)) {
  take(Assignment(problem, problem.total_seconds / problem.total_speed, budget_));
}

void Balancer::take(Assignment&& candidate) {
  const std::vector<Load> loads = candidate.loads();
  makespan_ = makespan(loads, problem_.options.links);
  bytes_ = total_bytes(loads);
  is_valid_ = candidate.is_valid();
  best_.emplace(std::move(candidate));
}

// Returns whether the pairing gives a plan within the limit, and keeps the plan if it is the best
// so far. Once the budget is spent, it tries only if there is no valid plan yet.
bool Balancer::attempt(double limit, const Pairing& pairing) {
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

bool Balancer::try_limit(double limit) {
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
void Balancer::save_bytes(double limit) {
  const auto num_items = static_cast<int64_t>(problem_.home.items.size());
  const int64_t num_pairings = std::min({heuristics_.many_ranks / problem_.pack.num_ranks,
                                         heuristics_.many_items / std::max<int64_t>(1, num_items),
                                         static_cast<int64_t>(std::size(kPairings))});
  for (int64_t i = 1; i < num_pairings; ++i) attempt(limit, kPairings[i]);
}

// Tries without limits for servers and links, so that only memory restricts the plan.
void Balancer::try_without_limit() {
  budget_ = budget_for(problem_.home);
  double slowest = std::numeric_limits<double>::infinity();
  for (int64_t rank = 0; rank < problem_.pack.num_ranks; ++rank) {
    const double speed = problem_.options.speed(rank);
    if (speed > 0) slowest = std::min(slowest, speed);
  }
  const Links& links = problem_.options.links;
  const double bytes_per_second = std::min(links.bytes_per_second, links.node_bytes_per_second);
  attempt(problem_.total_seconds / slowest * 2 + (bytes_ + 1e18) / bytes_per_second, kPairings[0]);
  if (!is_valid_) reject();
}

// Throws an error that names a rank whose rows fit nowhere, and the server with the largest cap.
void Balancer::reject() const {
  int64_t roomiest = -1;
  double most = -std::numeric_limits<double>::infinity();
  for (int64_t rank = 0; rank < problem_.pack.num_ranks; ++rank) {
    if (problem_.options.speed(rank) == 0 || !(problem_.options.cap_bytes(rank) > most)) continue;
    roomiest = rank;
    most = problem_.options.cap_bytes(rank);
  }
  int64_t rank = 0;
  const auto needs = [&] {
    return problem_.options.speed(rank) == 0
               ? problem_.home.seconds[rank] > 0
               : static_cast<double>(problem_.home.traffic[rank].held_bytes) >
                     problem_.options.cap_bytes(rank);
  };
  while (rank + 1 < problem_.pack.num_ranks && !needs()) ++rank;
  const std::string rows = problem_.options.speed(rank) == 0
                               ? "rows of rank " + std::to_string(rank) + ", which serves nothing,"
                               : "rows that visit server " + std::to_string(rank);
  int64_t bytes = problem_.home.traffic[rank].held_bytes;
  if (problem_.options.speed(rank) == 0) {
    for (const Item& item : problem_.home.items_of(rank)) {
      const Range keys =
          keys_of(problem_.options.mask, item.rows, problem_.pack.documents[item.document].length);
      bytes += num_rows(item.rows) * problem_.options.held_bytes.query +
               num_rows(keys) * problem_.options.held_bytes.key;
    }
  }
  throw std::invalid_argument("options: servers: no plan keeps to the memory caps: " + rows +
                              " take " + std::to_string(bytes) + " bytes in all, and server " +
                              std::to_string(roomiest) + ", which has the largest cap, may hold " +
                              std::to_string(static_cast<int64_t>(most)) +
                              "; raise the caps or let more ranks serve");
}

// Searches for the least feasible limit: tries the first one, then bisects up to the best makespan.
void Balancer::search(double limit) {
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

std::vector<Task> Balancer::run() {
  const double limit =
      problem_.total_seconds / problem_.total_speed * (1 + problem_.options.tolerance);
  const std::vector<Load> loads = best_->loads();
  const bool is_balanced = std::all_of(loads.begin(), loads.end(), [&](const Load& load) {
    return load.seconds <= limit;  // at any link time, since keys must travel
  });
  if (!is_valid_ || !is_balanced) search(limit);
  return best_->tasks();
}

}  // namespace

std::vector<Task> balance(const Pack& pack, const PlanOptions& options, const HomeCut& home,
                          const Heuristics& heuristics) {
  const Problem problem(pack, options, home, heuristics);
  return Balancer(problem).run();
}

}  // namespace distca::planner
