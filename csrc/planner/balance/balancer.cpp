#include "balancer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "../model/loads.h"
#include "../model/ranges.h"
#include "assignment.h"
#include "budget.h"
#include "scheduler.h"

namespace distca::planner {
namespace {

constexpr int kMaxAttempts = 8;         // limits tried if the first one is infeasible
constexpr int kMaxBisections = 6;       // between the last infeasible and the best makespan
constexpr double kFirstStep = 0.0025;   // growth of the limit; each step is three times the last
constexpr double kCloseEnough = 1.005;  // ratio of makespan to infeasible limit that ends it
constexpr double kRounding = 2e-4;   // part of a limit kept free for surpluses too small for a task
constexpr double kMinRelief = 1e-4;  // of a slice worth a task, over the mean compute
constexpr int64_t kManyRanks = 512;  // pairings tried = this / ranks
constexpr int64_t kManyItems = 1 << 17;  // and at most this / items

// The Budget of one search: a constant part, and a part for each item. It bounds planning time to
// about the time of a step's attention, wherever documents lie. All attempts of a search share it;
// once it is spent, the search returns its best plan.
constexpr int64_t kSteps = 24'000'000;
constexpr int64_t kStepsPerItem = 160;

// Has no byte bounds: these make more bytes leave a donor, whose link may be too slow for them.
constexpr Pairing kUnbounded{8, true, false, 0, 0.8};

// For links between nodes that need more time than servers do.
constexpr Pairing kNodePairings[] = {
    {8, true, false, 4, 1}, {8, true, false, 2, 0.9}, {8, true, false, 1, 0.8}};

// The search tries them in this order, with many ranks only the first.
constexpr Pairing kPairings[] = {
    {8, true, true},   {16, true, true}, {8, false, true},   {4, true, true},
    {8, true, false},  {1, true, true},  {16, false, true},  {4, false, false},
    {16, true, false}, {1, false, true}, {4, false, true},   {4, true, false},
    {1, false, false}, {1, true, false}, {16, false, false}, {8, false, false}};

// Joins adjacent query ranges of a document on one server, unless the result costs more or makes a
// home task visit.
std::vector<Task> merge_adjacent(const Pack& pack, const PlanOptions& options,
                                 std::vector<Task> tasks) {
  const auto seconds = [&](const Task& task) {
    return options.cost.seconds(options.mask, queries(task), pack.documents[task.document].length);
  };
  const auto joins = [&](const Task& a, const Task& b) {
    if (a.server != b.server || a.document != b.document || a.q_end != b.q_begin) return false;
    const Task joined{a.document, a.q_begin, b.q_end, a.server};
    const bool keeps_home = is_home(pack, options.mask, joined) ||
                            (!is_home(pack, options.mask, a) && !is_home(pack, options.mask, b));
    return keeps_home && seconds(joined) <= (seconds(a) + seconds(b)) * (1 + 1e-9);
  };
  size_t num_merged = 0;
  for (const Task& task : tasks) {
    if (num_merged > 0 && joins(tasks[num_merged - 1], task)) {
      tasks[num_merged - 1].q_end = task.q_end;
    } else {
      tasks[num_merged++] = task;
    }
  }
  tasks.resize(num_merged);
  return tasks;
}

Budget budget_for(const HomeCut& home) {
  return Budget(kSteps + kStepsPerItem * static_cast<int64_t>(home.items.size()));
}

class Balancer {
 public:
  Balancer(const Pack& pack, const PlanOptions& options, const HomeCut& home);

  std::vector<Task> run();

 private:
  bool try_limit(double limit);
  void save_bytes(double limit);
  bool attempt(double limit, const Pairing& pairing);
  void try_without_limit();
  [[noreturn]] void reject() const;

  const Pack& pack_;
  const PlanOptions& options_;
  const HomeCut& home_;
  double total_ = 0;  // seconds at speed 1
  double speed_ = 0;  // of all servers
  Weights weights_;
  Budget budget_;
  std::optional<Assignment> best_;
  double makespan_;        // of the best
  double bytes_;           // of the best
  bool is_tight_ = false;  // whether links between nodes made the first limit infeasible
  bool is_valid_ = false;  // whether the best respects memory caps and speeds of 0
};

Balancer::Balancer(const Pack& pack, const PlanOptions& options, const HomeCut& home)
    : pack_(pack), options_(options), home_(home), budget_(budget_for(home)) {
  double pairs = 0;
  for (const Document& document : pack.documents) {
    const Range all{document.first_query, document.length};
    pairs += static_cast<double>(num_pairs(options.mask, all, document.length));
  }
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    total_ += home.seconds[rank];
    speed_ += options.speed(rank);
  }
  // A slice of n query rows and m keys has at most n * m pairs. It needs the fewest bytes for them
  // if queries and keys take equal bytes.
  const double bytes =
      static_cast<double>(options.row_bytes.query) * static_cast<double>(options.row_bytes.key);
  weights_ = {total_ > 0 ? 2 * std::sqrt(bytes * pairs / total_) : 0, kMinRelief * total_ / speed_};
  best_.emplace(pack, options, home, total_ / speed_, budget_);
  makespan_ = best_->makespan();
  bytes_ = best_->total_bytes();
  is_valid_ = best_->is_valid();
}

// Returns whether the pairing gives a plan within the limit, and keeps the plan if it is the best
// so far. Once the budget is spent, it tries only if there is no valid plan yet.
bool Balancer::attempt(double limit, const Pairing& pairing) {
  if (budget_.is_spent() && is_valid_) return false;
  Assignment candidate(pack_, options_, home_, limit * (1 - kRounding), budget_);
  schedule(candidate, pack_, options_, weights_, pairing);
  if (!candidate.is_valid()) return false;
  const double makespan = candidate.makespan();
  const double bytes = candidate.total_bytes();
  const bool is_feasible = makespan <= limit;
  const bool is_better = is_feasible && makespan_ <= limit ? bytes < bytes_ : makespan < makespan_;
  if (is_better || !is_valid_) {
    makespan_ = makespan;
    bytes_ = bytes;
    is_valid_ = true;
    best_.emplace(std::move(candidate));
  }
  return is_feasible;
}

bool Balancer::try_limit(double limit) {
  if (!is_tight_ && (attempt(limit, kPairings[0]) || attempt(limit, kUnbounded))) return true;
  if (!options_.links.are_slow_between_nodes(pack_.num_ranks)) return false;
  is_tight_ = true;
  return std::any_of(std::begin(kNodePairings), std::end(kNodePairings),
                     [&](const Pairing& pairing) { return attempt(limit, pairing); });
}

// Tries the other pairings to save bytes, if ranks and documents are few.
void Balancer::save_bytes(double limit) {
  const int64_t most = static_cast<int64_t>(std::size(kPairings));
  const int64_t num_items = static_cast<int64_t>(home_.items.size());
  const int64_t num_pairings =
      std::min({kManyRanks / pack_.num_ranks, kManyItems / std::max<int64_t>(1, num_items), most});
  for (int64_t i = 1; i < num_pairings; ++i) attempt(limit, kPairings[i]);
}

// Tries without limits for servers and links, so that only memory restricts the plan.
void Balancer::try_without_limit() {
  budget_ = budget_for(home_);
  double slowest = std::numeric_limits<double>::infinity();
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    if (options_.speed(rank) > 0) slowest = std::min(slowest, options_.speed(rank));
  }
  const double bytes = best_->total_bytes() + 1e18;
  const Links& links = options_.links;
  attempt(
      total_ / slowest * 2 + bytes / std::min(links.bytes_per_second, links.node_bytes_per_second),
      kPairings[0]);
  if (!is_valid_) reject();
}

// Throws an error that names a rank whose rows fit nowhere, and the server with the largest cap.
void Balancer::reject() const {
  int64_t roomiest = -1;
  double most = -std::numeric_limits<double>::infinity();
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    if (options_.speed(rank) == 0 || !(options_.cap_bytes(rank) > most)) continue;
    roomiest = rank;
    most = options_.cap_bytes(rank);
  }
  int64_t rank = 0;
  const auto needs = [&] {
    return options_.speed(rank) == 0
               ? home_.seconds[rank] > 0
               : static_cast<double>(home_.traffic[rank].held_bytes) > options_.cap_bytes(rank);
  };
  while (rank + 1 < pack_.num_ranks && !needs()) ++rank;
  const std::string rows = options_.speed(rank) == 0
                               ? "rows of rank " + std::to_string(rank) + ", which serves nothing,"
                               : "rows that visit server " + std::to_string(rank);
  int64_t bytes = home_.traffic[rank].held_bytes;
  if (options_.speed(rank) == 0) {
    for (const Item& item : home_.items_of(rank)) {
      const Range keys = keys_of(options_.mask, item.rows, pack_.documents[item.document].length);
      bytes += num_rows(item.rows) * options_.held_bytes.query +
               num_rows(keys) * options_.held_bytes.key;
    }
  }
  throw std::invalid_argument("options: servers: no plan keeps to the memory caps: " + rows +
                              " take " + std::to_string(bytes) + " bytes in all, and server " +
                              std::to_string(roomiest) + ", which has the largest cap, may hold " +
                              std::to_string(static_cast<int64_t>(most)) +
                              "; raise the caps or let more ranks serve");
}

// Searches the least feasible limit by growing steps, then by bisection between the last two.
std::vector<Task> Balancer::run() {
  double limit = total_ / speed_ * (1 + options_.tolerance);
  if (is_valid_ && best_->slowest_seconds() <= limit) {  // whatever the links: keys have to travel
    return merge_adjacent(pack_, options_, best_->tasks());
  }
  double infeasible = 0, feasible = 0;
  double step = kFirstStep;
  for (int i = 0; i < kMaxAttempts && (!is_valid_ || makespan_ > limit); ++i) {
    if (try_limit(limit)) {
      feasible = limit;
      break;
    }
    infeasible = limit;
    limit = std::min(limit * (1 + step), is_valid_ ? makespan_ : limit * 2);
    step *= 3;
  }
  for (int i = 0; i < kMaxBisections && infeasible > 0; ++i) {
    if (!is_valid_ || makespan_ <= infeasible * kCloseEnough) break;
    limit = (infeasible + makespan_) / 2;
    (try_limit(limit) ? feasible : infeasible) = limit;
  }
  if (feasible > 0) save_bytes(feasible);
  if (!is_valid_) try_without_limit();
  return merge_adjacent(pack_, options_, best_->tasks());
}

}  // namespace

std::vector<Task> balance(const Pack& pack, const PlanOptions& options, const HomeCut& home) {
  return Balancer(pack, options, home).run();
}

}  // namespace distca::planner
