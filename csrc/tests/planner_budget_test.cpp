#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "planner/balance/schedule.h"
#include "planner_properties.h"
#include "random_steps.h"

namespace distca::planner {
namespace {

// Wherever the budget ends, all queries are computed once and every rank's traffic is known.
TEST(Budget, EndsAnywhere) {
  int64_t num_spent = 0, num_moved = 0;
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    const int64_t num_ranks = draw(random, 2, 8);
    const Pack pack = make_pack(draw_pieces(random, num_ranks, draw(random, 1, 100)), num_ranks);
    PlanOptions options = draw_options(random);
    draw_cluster(random, num_ranks, options);
    Problem problem(pack, options);
    const double total = problem.total_seconds;
    if (total == 0) continue;
    Budget budget{draw(random, 0, 1 << draw(random, 0, 12))};
    const double limit = draw(random, 0, 3) == 0 ? 1e6 : total / static_cast<double>(num_ranks);
    problem.bytes_per_root_second = 100;
    problem.min_relief = 1e-4 * total;
    Assignment assignment(problem, limit, budget);
    schedule(assignment, {}, std::numeric_limits<double>::infinity());
    Plan plan{num_ranks, options.mask, assignment.tasks(), {}, 0};
    plan.digest = digest_of(pack, plan.mask, plan.tasks);
    ASSERT_EQ(check_cover(pack, plan), "") << "seed " << seed;
    const std::vector<Load> counted = count_loads(pack, options, plan.tasks);
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const Load& load = assignment.load(rank);
      ASSERT_EQ(load.bytes_in, counted[rank].bytes_in) << "seed " << seed;
      ASSERT_EQ(load.bytes_out, counted[rank].bytes_out) << "seed " << seed;
      ASSERT_EQ(load.held_bytes, counted[rank].held_bytes) << "seed " << seed;
    }
    num_spent += budget.is_spent();
    num_moved += std::any_of(counted.begin(), counted.end(),
                             [](const Load& load) { return load.bytes_in > 0; });
  }
  EXPECT_GT(num_spent, 200);
  EXPECT_GT(num_moved, 200);
}

// Servers that serve nothing give all they have even then.
TEST(Budget, IsNotNeededToEmptyARank) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    Random random(seed);
    const int64_t num_ranks = draw(random, 2, 8);
    const Pack pack = make_pack(draw_pieces(random, num_ranks, 100), num_ranks);
    PlanOptions options = draw_options(random);
    options.servers.assign(num_ranks, {0});
    options.servers[draw(random, 0, num_ranks - 1)].speed = 1;
    Budget budget{0};
    Problem problem(pack, options);
    problem.bytes_per_root_second = 100;
    problem.min_relief = 0;
    Assignment assignment(problem, 1e9, budget);
    schedule(assignment, {}, std::numeric_limits<double>::infinity());
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      ASSERT_TRUE(options.speed(rank) > 0 || assignment.seconds(rank) == 0) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace distca::planner
