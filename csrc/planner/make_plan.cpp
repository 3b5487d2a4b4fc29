#include "make_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "balance/balancer.h"
#include "layout/layout.h"
#include "model/loads.h"

namespace distca::planner {

Plan make_plan(const Pack& pack, const PlanOptions& options) {
  validate(options, pack);
  const Problem problem(pack, options);
  Plan plan{pack.num_ranks, options.mask, balance(problem), {}, 0};
  plan.loads = loads_of(pack, options, plan.tasks);
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    const double speed = options.speed(rank);
    plan.loads[rank].seconds_home = problem.home_seconds[rank] / (speed > 0 ? speed : 1.0);
  }
  if (options.kept_cap_bytes > 0) keep_inputs(pack, options, plan);
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
