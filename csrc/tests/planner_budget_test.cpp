#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "planner/balance/assignment.h"
#include "planner/balance/budget.h"
#include "planner/balance/items.h"
#include "planner/balance/scheduler.h"
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
    const HomeCut home(pack, options);
    const double total = std::accumulate(home.seconds.begin(), home.seconds.end(), 0.0);
    if (total == 0) continue;
    Budget budget(draw(random, 0, 1 << draw(random, 0, 12)));
    const double limit = draw(random, 0, 3) == 0 ? 1e6 : total / static_cast<double>(num_ranks);
    Assignment assignment(pack, options, home, limit, budget);
    schedule(assignment, pack, options, {100, 1e-4 * total}, {});
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
    const HomeCut home(pack, options);
    Budget budget(0);
    Assignment assignment(pack, options, home, 1e9, budget);
    schedule(assignment, pack, options, {100, 0}, {});
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      ASSERT_TRUE(options.speed(rank) > 0 || assignment.seconds(rank) == 0) << "seed " << seed;
    }
  }
}

TEST(LargestFirst, IsASortedList) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    std::vector<Item> expected;
    const auto drawn = [&](int64_t document) {
      return Item{document, {0, 1}, static_cast<double>(draw(random, 0, 5))};
    };
    for (int64_t i = draw(random, 0, 20); i > 0; --i) expected.push_back(drawn(i));
    std::sort(expected.begin(), expected.end(), is_larger);
    LargestFirst items;
    items.assign(expected);
    for (int64_t i = 100; i < 200; ++i) {
      if (draw(random, 0, 1) == 0) {
        const Item item = drawn(i);
        items.insert(item);
        expected.insert(std::upper_bound(expected.begin(), expected.end(), item, is_larger), item);
      } else {
        const int64_t first = draw(random, 0, static_cast<int64_t>(expected.size()));
        const int64_t last =
            std::min(first + draw(random, 0, 2), static_cast<int64_t>(expected.size()));
        items.erase(first, last);
        expected.erase(expected.begin() + first, expected.begin() + last);
      }
      ASSERT_EQ(items.size(), expected.size());
      for (size_t j = 0; j < expected.size(); ++j) {
        ASSERT_EQ(items[j].document, expected[j].document);
        ASSERT_EQ(items.find(expected[j]), j);
      }
    }
  }
}

}  // namespace
}  // namespace distca::planner
