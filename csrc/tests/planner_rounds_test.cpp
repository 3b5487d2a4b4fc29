#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "planner/layout/layout.h"
#include "planner/make_plan.h"
#include "planner/model/ranges.h"
#include "random_steps.h"

namespace distca::planner {
namespace {

constexpr RowBytes kHeld{5, 3};

int64_t held_bytes(const Pack& pack, const Plan& round, int64_t server) {
  std::set<std::pair<int64_t, int64_t>> keys;
  int64_t num_queries = 0;
  for (const Task& task : round.tasks) {
    if (task.server != server || is_home(pack, round.mask, task)) continue;
    num_queries += task.q_end - task.q_begin;
    const Range seen = keys_of(round.mask, queries(task), pack.documents[task.document].length);
    for (int64_t key = seen.begin; key < seen.end; ++key) keys.insert({task.document, key});
  }
  return num_queries * kHeld.query + static_cast<int64_t>(keys.size()) * kHeld.key;
}

// Queries of every document by server, however the tasks are cut.
std::map<std::pair<int64_t, int64_t>, int64_t> servers_of(const std::vector<Plan>& rounds) {
  std::map<std::pair<int64_t, int64_t>, int64_t> servers;
  for (const Plan& round : rounds) {
    for (const Task& task : round.tasks) {
      for (int64_t q = task.q_begin; q < task.q_end; ++q) {
        EXPECT_TRUE(servers.insert({{task.document, q}, task.server}).second);
      }
    }
  }
  return servers;
}

TEST(Rounds, HoldAtMostTheCapAndComputeWhatThePlanSays) {
  Random random(11);
  int64_t num_rounds = 0, num_refused = 0;
  for (int i = 0; i < 300; ++i) {
    const int64_t num_ranks = draw(random, 2, 5);
    const Pack pack = make_pack(draw_pieces(random, num_ranks, 60), num_ranks);
    const Plan plan = make_plan(pack, draw_options(random));
    int64_t most = 0;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      most = std::max(most, held_bytes(pack, plan, rank));
    }
    const auto cap_bytes = static_cast<double>(draw(random, most / 4, most + 1));
    std::vector<Plan> rounds;
    try {
      rounds = rounds_of(pack, plan, kHeld, cap_bytes);
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("one query of document"), std::string::npos);
      ++num_refused;
      continue;
    }
    num_rounds += static_cast<int64_t>(rounds.size());
    EXPECT_EQ(servers_of(rounds), servers_of({plan}));
    EXPECT_EQ(rounds.size() == 1, static_cast<double>(most) <= cap_bytes);
    for (size_t r = 0; r < rounds.size(); ++r) {
      EXPECT_EQ(rounds[r].digest, plan.digest);
      EXPECT_TRUE(std::is_sorted(rounds[r].tasks.begin(), rounds[r].tasks.end(), in_plan_order));
      for (int64_t rank = 0; rank < num_ranks; ++rank) {
        EXPECT_LE(static_cast<double>(held_bytes(pack, rounds[r], rank)), cap_bytes);
      }
      for (const Task& task : rounds[r].tasks) {
        EXPECT_TRUE(r == 0 || !is_home(pack, plan.mask, task));
      }
    }
  }
  EXPECT_GT(num_rounds, 400);
  EXPECT_GT(num_refused, 0);
  EXPECT_LT(num_refused, 100);
}

TEST(Rounds, MoreBalanceInTheSameMemory) {
  std::vector<Piece> pieces = {{0, 0, 0, 8192}};
  for (int64_t i = 1; i <= 32; ++i) pieces.push_back({1, i, 0, 256});
  const Pack pack = make_pack(pieces, 2);
  PlanOptions options;
  options.row_bytes = options.held_bytes = {100, 100};
  options.servers = {Server{}, Server{1, 900000}};
  const auto slowest = [](const Plan& plan) {
    return std::max(plan.loads[0].seconds, plan.loads[1].seconds);
  };
  const Plan one = plan_for_rounds(pack, options, 1), four = plan_for_rounds(pack, options, 4);
  EXPECT_LE(one.loads[1].held_bytes, 900000);
  EXPECT_GT(four.loads[1].held_bytes, 900000);
  EXPECT_LT(slowest(four), 0.95 * slowest(one));
  EXPECT_GT(rounds_of(pack, four, options.held_bytes, 900000).size(), 1u);
}

TEST(Rounds, APlanThatRoundsCannotHoldIsMadeWithinTheCaps) {
  const std::vector<Piece> pieces = {{0, 0, 0, 8192}, {1, 1, 0, 8192}, {1, 2, 0, 64}};
  const Pack pack = make_pack(pieces, 3);
  PlanOptions options;
  options.row_bytes = options.held_bytes = {100, 100};
  options.servers.assign(3, Server{1, 400000});  // of 4000 rows: half of the keys that tails read
  for (int64_t rounds = 1; rounds < 5; ++rounds) {
    const Plan plan = plan_for_rounds(pack, options, rounds);
    EXPECT_NO_THROW(rounds_of(pack, plan, options.held_bytes, 400000));
  }
}

}  // namespace
}  // namespace distca::planner
