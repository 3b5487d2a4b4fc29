#include "make_plan.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "balance/balancer.h"
#include "layout/layout.h"
#include "model/loads.h"

namespace distca::planner {

namespace {

// If the makespan exceeds that of perfect balance by more than this fraction, we plan again.
constexpr double kExposed = 0.01;

Plan plan_of(const Pack& pack, const PlanOptions& options, const Problem& problem) {
  Plan plan{pack.num_ranks, options.mask, balance(problem), {}, 0};
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
    return plan_of(pack, options, problem);
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
}

// Returns `plan` with kept inputs, or a faster one that assumes them. Returns `plan` unchanged if
// keeping gains too little.
Plan keeping_plan(const Pack& pack, const PlanOptions& options, const Problem& problem,
                  const Plan& plan) {
  const double hidden = problem.hidden_seconds;
  const double seconds = makespan(plan.loads, options.links, hidden);
  Plan kept = plan;
  double kept_seconds = keep_inputs(pack, options, hidden, kept);
  if (seconds > (1 + kExposed) * problem.balanced_seconds) {
    if (std::optional<Plan> other = plan_of_kept_rows(pack, options)) {
      const double other_seconds = keep_inputs(pack, options, hidden, *other);
      if (other_seconds < kept_seconds) kept = std::move(*other);
      kept_seconds = std::min(kept_seconds, other_seconds);
    }
  }
  return seconds - kept_seconds < options.kept_gain * seconds ? plan : kept;
}

}  // namespace

Plan make_plan(const Pack& pack, const PlanOptions& options) {
  validate(options, pack);
  const Problem problem(pack, options);
  Plan plan = plan_of(pack, options, problem);
  if (options.kept_cap_bytes > 0) plan = keeping_plan(pack, options, problem, plan);
  plan.digest = digest_of(pack, plan.mask, plan.tasks);
  return plan;
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
