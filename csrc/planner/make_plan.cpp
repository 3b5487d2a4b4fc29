#include "make_plan.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "balance/assignment.h"
#include "balance/balancer.h"
#include "layout/layout.h"
#include "model/loads.h"

namespace distca::planner {

namespace {

// If the makespan exceeds that of perfect balance by more than this fraction, we plan again.
constexpr double kExposed = 0.01;

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

// Returns a plan that assumes kept inputs: each row moves fewer bytes, so more work may leave its
// home. Returns nullopt if none fits the memory caps.
std::optional<Plan> plan_of_kept_rows(const Pack& pack, const PlanOptions& options) {
  const auto left = [](int64_t bytes, int64_t kept) { return std::max<int64_t>(0, bytes - kept); };
  PlanOptions fewer = options;
  fewer.row_bytes = {left(options.row_bytes.query, options.kept_bytes.query),
                     left(options.row_bytes.key, options.kept_bytes.key)};
  const Problem problem(pack, fewer);
  try {
    return plan_of(pack, options, problem, balance(problem));
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
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

// Returns the seconds by which transfers of a mean rank slow a layer down even if other work hides
// them: they delay FSDP's traffic, and attention runs in more and shorter kernels. Measured on two
// H100.
double friction(const Plan& plan, const Links& links) {
  constexpr double kPart = 0.3;  // of the seconds of transfers
  double sum = 0;
  for (const Load& load : plan.loads) sum += link_seconds(load, links);
  return kPart * sum / static_cast<double>(plan.num_ranks);
}

// A plan, and the seconds that a layer is predicted to take under it.
struct Timed {
  Plan plan;
  double seconds;
};

// Returns the plan with kept inputs, or without if keeping gains too little.
Timed keeping(const Pack& pack, const PlanOptions& options, const Problem& problem, Plan plan) {
  const double seconds = makespan(plan.loads, options.links, problem.hidden_seconds);
  if (options.kept_cap_bytes == 0) return {std::move(plan), seconds};
  Plan kept = plan;
  const double kept_seconds = keep_inputs(pack, options, problem.hidden_seconds, kept);
  if (seconds - kept_seconds < options.kept_gain * seconds) return {std::move(plan), seconds};
  return {std::move(kept), kept_seconds};
}

// Returns the fastest plan: of those with kept inputs, one may assume them from the beginning.
Timed fastest_plan(const Pack& pack, const PlanOptions& options, const Problem& problem) {
  Plan plan = plan_of(pack, options, problem, balance(problem));
  const double seconds = makespan(plan.loads, options.links, problem.hidden_seconds);
  Timed best = keeping(pack, options, problem, std::move(plan));
  if (options.kept_cap_bytes == 0 || seconds <= (1 + kExposed) * problem.balanced_seconds) {
    return best;
  }
  std::optional<Plan> other = plan_of_kept_rows(pack, options);
  if (!other) return best;
  const double other_seconds = keep_inputs(pack, options, problem.hidden_seconds, *other);
  const bool gains = seconds - other_seconds >= options.kept_gain * seconds;
  return gains && other_seconds < best.seconds ? Timed{std::move(*other), other_seconds} : best;
}

}  // namespace

Plan make_plan(const Pack& pack, const PlanOptions& options) {
  validate(options, pack);
  const Problem problem(pack, options);
  Timed best = fastest_plan(pack, options, problem);
  if (std::optional<Plan> plan = plan_at_home(pack, options, problem)) {
    Timed home = keeping(pack, options, problem, std::move(*plan));
    const double gain = home.seconds - best.seconds;
    if (gain <= friction(best.plan, options.links) - friction(home.plan, options.links)) {
      best = std::move(home);
    }
  }
  best.plan.digest = digest_of(pack, best.plan.mask, best.plan.tasks);
  return best.plan;
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
