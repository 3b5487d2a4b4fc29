#include "make_plan.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "balance/assignment.h"
#include "balance/balancer.h"
#include "layout/layout.h"
#include "model/loads.h"

namespace distca::planner {

namespace {

// If the makespan exceeds that of perfect balance by more than kExposed, or the slowest rank's work
// by more than kUneven, we plan again.
constexpr double kExposed = 0.01;
constexpr double kUneven = 0.03;

// Fractions of the row bytes that further plans assume, in the order in which they are tried. 0.8
// comes first because it helps most with many ranks. With many ranks or items, only the first ones
// are tried: a plan also takes time outside of the search, which the budget does not bound.
constexpr double kAssumedFractions[] = {0.8, 0.9, 0.65, 0.5, 0.35, 0.57, 0.72, 0.43};
constexpr int64_t kTriesTimesRanks = 768, kLeastTries = 1, kTriesTimesItems = 1 << 17;
constexpr int64_t kLeftForTries = 4;  // a quarter of what the first search leaves of its budget

int64_t num_tries(const Problem& problem) {
  const auto num_items = std::max<int64_t>(1, static_cast<int64_t>(problem.items.size()));
  return std::min({static_cast<int64_t>(std::size(kAssumedFractions)),
                   std::max(kLeastTries, kTriesTimesRanks / problem.pack.num_ranks),
                   kTriesTimesItems / num_items});
}

Plan plan_of(const Pack& pack, const PlanOptions& options, const Problem& problem,
             std::vector<Task> tasks) {
  Plan plan{pack.num_ranks, options.mask, std::move(tasks), {}, 0};
  plan.loads = loads_of(pack, options, plan.tasks);
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    const double speed = options.speed(rank);
    plan.loads[rank].seconds_home = problem.home_seconds[rank] / (speed > 0 ? speed : 1.0);
  }
  return plan;
}

// Returns a plan that assumes other bytes of rows. If they are fewer, more work may leave its home.
// Returns nullopt if none fits the memory caps.
std::optional<Plan> plan_assuming(const RowBytes& row_bytes, const Pack& pack,
                                  const PlanOptions& options, Budget& budget) {
  PlanOptions others = options;
  others.row_bytes = row_bytes;
  const Problem problem(pack, others);
  try {
    return plan_of(pack, options, problem, balance(problem, budget));
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
}

RowBytes times(double factor, const RowBytes& bytes) {
  const auto scaled = [factor](int64_t count) {
    return static_cast<int64_t>(factor * static_cast<double>(count));
  };
  return {scaled(bytes.query), scaled(bytes.key)};
}

// Returns the bytes of rows whose inputs are kept.
RowBytes kept_row_bytes(const PlanOptions& options) {
  const auto left = [](int64_t bytes, int64_t kept) { return std::max<int64_t>(0, bytes - kept); };
  return {left(options.row_bytes.query, options.kept_bytes.query),
          left(options.row_bytes.key, options.kept_bytes.key)};
}

// Returns the plan in which nothing moves, or nullopt if it breaks a memory cap, or if ranks of
// speed 0 have tokens.
std::optional<Plan> plan_at_home(const Pack& pack, const PlanOptions& options,
                                 const Problem& problem) {
  Budget budget{0};
  const Assignment home(problem, problem.balanced_seconds, budget);
  if (!home.is_valid()) return std::nullopt;
  return plan_of(pack, options, problem, home.tasks());
}

// A plan, the predicted seconds of a layer under it, and its cost: these seconds plus friction().
struct Timed {
  Timed(Plan of, double predicted, const Links& links)
      : plan(std::move(of)), seconds(predicted), cost(predicted + friction(plan.loads, links)) {}

  Plan plan;
  double seconds;
  double cost;
};

// The best of some plans, with and without kept inputs.
class Best {
 public:
  Best(const Pack& pack, const PlanOptions& options, const Problem& problem)
      : pack_(pack), options_(options), problem_(problem) {}

  void consider(Plan plan) {
    if (options_.kept_cap_bytes > 0) {
      Plan kept = plan;
      const double seconds = keep_inputs(pack_, options_, problem_.hidden_seconds, kept);
      take(kept_, {std::move(kept), seconds, options_.links});
    }
    const double seconds = makespan(plan.loads, options_.links, problem_.hidden_seconds);
    take(plain_, {std::move(plan), seconds, options_.links});
  }

  // Returns the best plan without kept inputs.
  const Timed& plain() const { return *plain_; }

  // Returns the best plan with kept inputs, or the best one without them if keeping gains too
  // little.
  Timed& get() {
    const double least = options_.kept_gain * plain_->seconds;
    const bool keeps = kept_ && plain_->cost - kept_->cost >= least;
    return keeps ? *kept_ : *plain_;
  }

 private:
  static void take(std::optional<Timed>& best, Timed timed) {
    if (!best || timed.cost < best->cost) best = std::move(timed);
  }

  const Pack& pack_;
  const PlanOptions& options_;
  const Problem& problem_;
  std::optional<Timed> plain_, kept_;
};

// Returns the lag and attention of the slowest rank, in seconds: under the plan with Load::seconds,
// and if nothing moves with Load::seconds_home.
double slowest_work(const Plan& plan, double Load::*attention) {
  double most = 0;
  for (const Load& load : plan.loads) most = std::max(most, load.seconds_lag + load.*attention);
  return most;
}

// Returns the best of several plans. On slow links, the balancer's plan depends much on the bytes
// of rows that it assumes: with fewer bytes, it moves more work.
Timed best_plan(const Pack& pack, const PlanOptions& options, const Problem& problem) {
  Budget budget = budget_for(problem);
  Best best(pack, options, problem);
  best.consider(plan_of(pack, options, problem, balance(problem, budget)));
  if (best.plain().seconds <= (1 + kExposed) * problem.balanced_seconds) {
    return std::move(best.get());
  }
  const auto assume = [&](const RowBytes& row_bytes, Budget& left) {
    auto plan = plan_assuming(row_bytes, pack, options, left);
    if (plan) best.consider(std::move(*plan));
  };
  if (options.kept_cap_bytes > 0) {
    Budget another = budget_for(problem);
    assume(kept_row_bytes(options), another);
  }
  if (slowest_work(best.get().plan, &Load::seconds) > (1 + kUneven) * problem.balanced_seconds) {
    budget.left /= kLeftForTries;
    for (int64_t i = 0; i < num_tries(problem) && !budget.is_spent(); ++i) {
      assume(times(kAssumedFractions[i], options.row_bytes), budget);
    }
  }
  return std::move(best.get());
}

// Returns `best`, or the plan in which nothing moves if it costs no more.
Timed or_at_home(Timed best, const Pack& pack, const PlanOptions& options, const Problem& problem) {
  // That plan costs at least the work of its slowest rank.
  if (slowest_work(best.plan, &Load::seconds_home) > best.cost) return best;
  std::optional<Plan> plan = plan_at_home(pack, options, problem);
  if (!plan) return best;
  Best at_home(pack, options, problem);
  at_home.consider(std::move(*plan));
  Timed& timed = at_home.get();
  return std::move(timed.cost <= best.cost ? timed : best);
}

}  // namespace

Plan make_plan(const Pack& pack, const PlanOptions& options) {
  validate(options, pack);
  const Problem problem(pack, options);
  Timed best = or_at_home(best_plan(pack, options, problem), pack, options, problem);
  best.plan.digest = digest_of(pack, best.plan.mask, best.plan.tasks);
  return std::move(best.plan);
}

Plan plan_for_rounds(const Pack& pack, const PlanOptions& options, int64_t rounds) {
  if (rounds == 1 || options.servers.empty()) return make_plan(pack, options);
  PlanOptions wide = options;
  double cap_bytes = std::numeric_limits<double>::infinity();
  for (Server& server : wide.servers) {
    cap_bytes = std::min(cap_bytes, server.cap_bytes);
    server.cap_bytes *= static_cast<double>(rounds);
  }
  Plan plan = make_plan(pack, wide);
  try {
    rounds_of(pack, plan, options.held_bytes, cap_bytes);
  } catch (const std::invalid_argument&) {
    return make_plan(pack, options);
  }
  return plan;
}

}  // namespace distca::planner
