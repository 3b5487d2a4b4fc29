#include "planner/model/plan.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>

#include "planner/make_plan.h"
#include "planner/model/loads.h"
#include "planner_properties.h"
#include "random_steps.h"

namespace distca::planner {
namespace {

// Llama-8B: 32 query heads and 8 key heads of 128, bf16, forward and backward.
PlanOptions llama_options() {
  PlanOptions options;
  options.cost.seconds_per_tile = 1.2e-6;
  options.row_bytes = {41216, 16384};
  return options;
}

bool same_task(const Task& a, const Task& b) {
  return std::tie(a.document, a.q_begin, a.q_end, a.server) ==
         std::tie(b.document, b.q_begin, b.q_end, b.server);
}

// Links that need no time.
PlanOptions without_links(PlanOptions options) {
  options.links.bytes_per_second = 1e15;
  return options;
}

// A plan that never moves anything.
Plan home_plan(const Pack& pack, PlanOptions options) {
  options.tolerance = 1e9;
  return make_plan(pack, options);
}

TEST(Plan, BalancesHeavyTailedLengths) {
  for (int64_t num_ranks : {4, 8, 16, 64}) {
    double worst_home = 0;
    for (uint32_t seed = 0; seed < 10; ++seed) {
      Random random(seed);
      const Pack pack = make_pack(heavy_tailed_step(random, num_ranks, 65536), num_ranks);
      const Plan plan = make_plan(pack, without_links(llama_options()));
      validate(plan, pack);
      worst_home = std::max(worst_home, imbalance(home_plan(pack, llama_options())));
      EXPECT_LE(imbalance(plan), 1.0205) << num_ranks << " ranks, seed " << seed;
    }
    EXPECT_GT(worst_home, 1.5);  // there was something to balance
  }
}

TEST(Plan, BalancesDocumentsThatCrossRanks) {
  for (uint32_t seed = 0; seed < 10; ++seed) {
    Random random(seed);
    std::vector<int64_t> lengths = {150000};
    for (const Piece& piece : heavy_tailed_step(random, 6, 65536)) lengths.push_back(piece.length);
    const Pack pack = make_pack(crossing_documents(lengths, 8), 8);
    const Plan plan = make_plan(pack, without_links(llama_options()));
    validate(plan, pack);
    EXPECT_LE(imbalance(plan), 1.05) << "seed " << seed;
  }
}

TEST(Plan, BalancesSmallSteps) {
  PlanOptions options;
  options.cost.tile_q = options.cost.tile_k = 32;
  options.row_bytes = {5120, 4096};
  options.links.bytes_per_second = 1e15;
  for (uint32_t seed = 0; seed < 50; ++seed) {
    Random random(seed);
    std::vector<int64_t> lengths;
    for (int64_t left = 4 * 2048; left > 0; left -= lengths.back()) {
      lengths.push_back(std::min(left, draw(random, 1, draw(random, 1, 3000))));
    }
    const Pack pack = make_pack(crossing_documents(lengths, 4), 4);
    const Plan plan = make_plan(pack, options);
    validate(plan, pack);
    EXPECT_LE(imbalance(plan), 1.05) << "seed " << seed;
  }
}

TEST(Plan, SpreadsOneDocumentOverAllRanks) {
  for (int64_t num_ranks : {2, 3, 4, 7}) {
    const std::vector<Piece> pieces = {{1, 0, 0, 65536}};
    const Pack pack = make_pack(pieces, num_ranks);
    const Plan plan = make_plan(pack, without_links(llama_options()));
    validate(plan, pack);
    EXPECT_LE(imbalance(plan), 1.0205);
    EXPECT_EQ(plan.loads[0].seconds_home, 0);
    EXPECT_EQ(plan.loads[0].bytes_out, 0);
    EXPECT_GT(plan.loads[0].bytes_in, 0);
  }
}

TEST(Plan, MovesNothingWhenBalanced) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < 40; ++i) pieces.push_back({i % 4, i, 0, 500 + i / 4});
  const Pack pack = make_pack(pieces, 4);
  const Plan plan = make_plan(pack, llama_options());
  EXPECT_EQ(plan.tasks.size(), 40u);
  for (const Task& task : plan.tasks) {
    EXPECT_EQ(task.server, pack.segments_of(pack.documents[task.document])[0].rank);
    EXPECT_EQ(task.q_end, pack.documents[task.document].length);
  }
  for (const Load& load : plan.loads) {
    EXPECT_EQ(load.bytes_in, 0);
    EXPECT_EQ(load.bytes_out, 0);
    EXPECT_DOUBLE_EQ(load.seconds, load.seconds_home);
  }
}

TEST(Plan, CrossingDocumentsInBalanceFetchOnlyKeys) {
  PlanOptions options = llama_options();
  options.mask = {-1, -1};
  const std::vector<Piece> pieces = {{0, 0, 0, 4096}, {1, 0, 4096, 4096}};
  const Plan plan = make_plan(make_pack(pieces, 2), options);
  EXPECT_EQ(plan.tasks.size(), 2u);
  for (const Load& load : plan.loads) {
    EXPECT_EQ(load.bytes_in, 4096 * options.row_bytes.key);
    EXPECT_EQ(load.bytes_out, 4096 * options.row_bytes.key);
  }
}

TEST(Plan, CutsAtTiles) {
  Random random(3);
  const Pack pack = make_pack(heavy_tailed_step(random, 16, 65536), 16);
  const Plan plan = make_plan(pack, llama_options());
  int64_t num_cuts = 0;
  for (const Task& task : plan.tasks) {
    EXPECT_EQ(task.q_begin % 128, 0);
    num_cuts += task.q_begin > 0;
  }
  EXPECT_GT(num_cuts, 0);
}

TEST(Plan, LeavesShortDocumentsWhole) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < 40; ++i) pieces.push_back({0, i, 0, 100});
  PlanOptions options = llama_options();
  options.links.bytes_per_second = 1e15;
  const Plan plan = make_plan(make_pack(pieces, 4), options);
  EXPECT_EQ(plan.tasks.size(), 40u);
  EXPECT_DOUBLE_EQ(imbalance(plan), 1.0);
}

// A long document's rows bring more for their bytes than short documents, which fill what is left.
TEST(Plan, KeepsShortDocumentsBesideALongOneAtHome) {
  constexpr int64_t kLong = 40960, kShort = 2048, kTokens = 65536, kNumRanks = 16;
  std::vector<Piece> pieces{{0, 0, 0, kLong}};
  for (int64_t rank = 0; rank < kNumRanks; ++rank) {
    const int64_t tokens = rank == 0 ? kTokens - kLong : kTokens;
    for (int64_t i = 0; i < tokens / kShort; ++i) {
      pieces.push_back({rank, static_cast<int64_t>(pieces.size()), 0, kShort});
    }
  }
  const Pack pack = make_pack(pieces, kNumRanks);
  PlanOptions options = llama_options();
  options.links.bytes_per_second = 4e12;
  const Plan plan = make_plan(pack, options);
  int64_t num_away = 0;
  for (const Task& task : plan.tasks) {
    const bool is_away = pack.segments_of(pack.documents[task.document])[0].rank != task.server;
    EXPECT_FALSE(is_away && task.document != 0) << "document " << task.document;
    num_away += is_away ? 1 : 0;
  }
  EXPECT_GE(num_away, kNumRanks - 2);
  EXPECT_LE(imbalance(plan), 1.0105);
}

TEST(Plan, LeavesWorkThatIsFasterDoneThanSent) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < 40; ++i) pieces.push_back({0, i, 0, 100});
  const Pack pack = make_pack(pieces, 4);
  const Plan plan = make_plan(pack, llama_options());  // 29 us to send what takes 1.2 us
  EXPECT_LE(layer_seconds(plan.loads, PlanOptions{}.links), 40 * 1.2e-6 * (1 + 1e-9));
}

TEST(Plan, JoinsAdjacentQueriesOfAServer) {
  for (uint32_t seed = 0; seed < 10; ++seed) {
    Random random(seed);
    const Pack pack = make_pack(heavy_tailed_step(random, 8, 65536), 8);
    const Plan plan = make_plan(pack, llama_options());
    for (size_t i = 1; i < plan.tasks.size(); ++i) {
      const Task& before = plan.tasks[i - 1];
      const Task& task = plan.tasks[i];
      EXPECT_FALSE(before.server == task.server && before.document == task.document &&
                   before.q_end == task.q_begin);
    }
  }
}

TEST(Plan, IsTheSameEachTimeAndOnEachRank) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    std::vector<Piece> pieces = draw_pieces(random, 5, 80);
    const PlanOptions options = draw_options(random);
    const Plan plan = make_plan(make_pack(pieces, 5), options);
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.rank < b.rank; });
    const Plan other = make_plan(make_pack(pieces, 5), options);
    EXPECT_EQ(plan.digest, other.digest);
    ASSERT_EQ(plan.tasks.size(), other.tasks.size());
    EXPECT_TRUE(std::equal(plan.tasks.begin(), plan.tasks.end(), other.tasks.begin(), same_task));
  }
}

TEST(Plan, DigestCoversPackMaskAndTasks) {
  const std::vector<Piece> pieces = {{0, 0, 0, 50}, {0, 1, 0, 30}, {1, 2, 0, 50}, {1, 3, 0, 30}};
  const Pack pack = make_pack(pieces, 2);
  const Plan plan = make_plan(pack, PlanOptions{});
  std::set<uint64_t> digests = {plan.digest};
  for (size_t i = 0; i < pieces.size(); ++i) {
    std::vector<Piece> changed = pieces;
    changed[i].length += 1;
    digests.insert(digest_of(make_pack(changed, 2), plan.mask, plan.tasks));
    changed = pieces;
    changed[i].document += 10;
    digests.insert(digest_of(make_pack(changed, 2), plan.mask, plan.tasks));
    changed = pieces;
    changed[i].rank = 1 - changed[i].rank;
    digests.insert(digest_of(make_pack(changed, 2), plan.mask, plan.tasks));
    std::vector<Task> tasks = plan.tasks;
    tasks[i].server = 1 - tasks[i].server;
    digests.insert(digest_of(pack, plan.mask, tasks));
  }
  digests.insert(digest_of(make_pack(pieces, 3), plan.mask, plan.tasks));
  digests.insert(digest_of(pack, {-1, -1}, plan.tasks));
  digests.insert(digest_of(pack, {5, 0}, plan.tasks));
  EXPECT_EQ(digests.size(), 1u + 4 * 4 + 3);
}

TEST(Plan, LoadsAddUpTheTasks) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    Random random(seed);
    const Pack pack = make_pack(draw_pieces(random, 4, 80), 4);
    const PlanOptions options = draw_options(random);
    const Plan plan = make_plan(pack, options);
    std::vector<double> seconds(4, 0.0);
    for (const Task& task : plan.tasks) {
      seconds[task.server] += options.cost.seconds(options.mask, {task.q_begin, task.q_end},
                                                   pack.documents[task.document].length);
    }
    for (size_t rank = 0; rank < 4; ++rank) {
      EXPECT_NEAR(plan.loads[rank].seconds, seconds[rank], 1e-12);
    }
  }
}

TEST(Plan, IsNeverSlowerThanMovingNothing) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const Pack pack = make_pack(draw_pieces(random, 4, 200), 4);
    PlanOptions options = draw_options(random);
    for (double speed : {1e6, 1e8, 1e10}) {
      options.links.bytes_per_second = speed;
      const Plan plan = make_plan(pack, options);
      EXPECT_LE(layer_seconds(plan.loads, options.links),
                layer_seconds(home_plan(pack, options).loads, options.links) * (1 + 1e-9))
          << "seed " << seed << ", " << speed << " bytes per second";
    }
  }
}

// Transfers that other work hides need not fit behind attention.
TEST(Plan, MovesMoreWhereTransfersAreHidden) {
  Random random(2);
  const Pack pack = make_pack(heavy_tailed_step(random, 8, 65536), 8);
  PlanOptions options = llama_options();
  options.links.bytes_per_second = 20e9;
  const double exposed = imbalance(make_plan(pack, options));
  options.links.hidden_part = 10;
  EXPECT_LE(imbalance(make_plan(pack, options)), 1.0205);
  EXPECT_GT(exposed, 1.1);
}

TEST(Plan, WeighsSlowLinksAgainstCompute) {
  Random random(2);
  const Pack pack = make_pack(heavy_tailed_step(random, 8, 65536), 8);
  PlanOptions options = llama_options();
  const Plan home = home_plan(pack, options), balanced = make_plan(pack, without_links(options));
  options.links.bytes_per_second = 20e9;
  const double weighed = layer_seconds(make_plan(pack, options).loads, options.links);
  EXPECT_LT(weighed, 0.9 * layer_seconds(home.loads, options.links));
  EXPECT_LT(weighed, layer_seconds(balanced.loads, options.links));
}

// Rows that wait for other traffic longer than balance saves stay at home.
TEST(Plan, WeighsWaitsOfTransfers) {
  Random random(2);
  const Pack pack = make_pack(heavy_tailed_step(random, 8, 65536), 8);
  PlanOptions options = llama_options();
  const auto bytes_with = [&](double forward, double backward) {
    options.links.forward_wait = forward;
    options.links.backward_wait = backward;
    return total_bytes(make_plan(pack, options).loads);
  };
  const double seconds = layer_seconds(home_plan(pack, options).loads, options.links);
  const double free = bytes_with(0, 0);
  EXPECT_GT(free, 0);
  EXPECT_GT(bytes_with(0.02 * seconds, 0), 0);
  EXPECT_EQ(bytes_with(seconds, 0), 0);
  EXPECT_EQ(bytes_with(0, seconds), 0);
  EXPECT_EQ(bytes_with(0.6 * seconds, 0.6 * seconds), 0);
}

// A layer takes longer if any rows move, so nothing moves for less than that.
TEST(Plan, WeighsWhatMovingCosts) {
  Random random(2);
  const Pack pack = make_pack(heavy_tailed_step(random, 8, 65536), 8);
  PlanOptions options = without_links(llama_options());
  const double home = layer_seconds(home_plan(pack, options).loads, options.links);
  const Plan free = make_plan(pack, options);
  const double seconds = layer_seconds(free.loads, options.links), mean = free.loads[0].seconds;
  options.links.moving_part = 0.1;
  for (const bool pays : {true, false}) {
    options.links.other_seconds = (pays ? 0.9 : 1.1) * (home - seconds) / 0.1 - mean;
    const Plan plan = make_plan(pack, options);
    EXPECT_EQ(plan.digest == free.digest, pays);
    EXPECT_EQ(total_bytes(plan.loads) > 0, pays);
  }
}

// All ranks finish a layer together, even if some of them begin attention late.
TEST(Plan, GivesLessToRanksThatLag) {
  Random random(2);
  const Pack pack = make_pack(heavy_tailed_step(random, 8, 65536), 8);
  PlanOptions options = without_links(llama_options());
  const double even = make_plan(pack, options).loads[0].seconds;
  options.servers.assign(8, Server{});
  for (int64_t per_node : {8, 4}) {
    options.links.ranks_per_node = per_node;
    options.links.node_bytes_per_second = per_node == 4 ? 1e14 : 1e15;
    options.servers[3].lag_seconds = 0.4 * even;
    for (const Load& load : make_plan(pack, options).loads) {
      EXPECT_NEAR(load.seconds_lag + load.seconds, 1.05 * even, 0.04 * even);
    }
    options.servers[3].lag_seconds = 2 * even;  // no plan makes this rank as fast as the others
    for (const Load& load : make_plan(pack, options).loads) {
      EXPECT_LE(load.seconds_lag + load.seconds, 2.02 * even);
    }
  }
}

// Transfers must fit into attention and the time that other traffic leaves on the links.
TEST(Plan, LeavesLinksToOtherTraffic) {
  Random random(2);
  const Pack pack = make_pack(heavy_tailed_step(random, 8, 65536), 8);
  PlanOptions options = llama_options();
  options.links.bytes_per_second = 20e9;
  const std::vector<Load> home = home_plan(pack, options).loads;
  const double seconds = layer_seconds(home, options.links);
  const auto loads_with = [&](double forward, double backward) {
    options.links.forward_room = forward;
    options.links.backward_room = backward;
    return make_plan(pack, options).loads;
  };
  const double free = total_bytes(loads_with(seconds, seconds));
  const std::vector<Load> tight = loads_with(-0.1 * seconds, -0.3 * seconds);
  EXPECT_GT(total_bytes(tight), 0);
  EXPECT_LT(total_bytes(tight), 0.9 * free);
  for (const Load& load : tight) {
    const double transfers = link_seconds(load, options.links);
    EXPECT_LE(transfers + 0.4 * seconds, seconds * (1 + 1e-9));
  }
  EXPECT_EQ(total_bytes(loads_with(0, -seconds)), 0);  // other traffic takes longer than attention
}

TEST(Plan, HandlesNoTokens) {
  const Pack pack = make_pack({}, 3);
  const Plan plan = make_plan(pack, PlanOptions{});
  validate(plan, pack);
  EXPECT_TRUE(plan.tasks.empty());
  EXPECT_EQ(plan.loads.size(), 3u);
}

TEST(Plan, ValidateRejectsBadPlans) {
  const std::vector<Piece> pieces = {{0, 0, 0, 4096}, {1, 1, 0, 64}, {1, 2, 0, 64}};
  const Pack pack = make_pack(pieces, 2);
  const Plan good = make_plan(pack, PlanOptions{});
  ASSERT_NO_THROW(validate(good, pack));
  const auto with = [&](auto change) {
    Plan plan = good;
    change(plan);
    plan.digest = digest_of(pack, plan.mask, plan.tasks);
    validate(plan, pack);
  };
  EXPECT_REJECTED(with([](Plan& plan) { plan.tasks[0].q_begin += 1; }), "computed");
  EXPECT_REJECTED(with([](Plan& plan) { plan.tasks.back().q_end -= 1; }), "computed");
  EXPECT_REJECTED(with([](Plan& plan) { plan.tasks.pop_back(); }), "computed up to");
  EXPECT_REJECTED(with([](Plan& plan) { plan.tasks.push_back(plan.tasks.back()); }), "computed");
  EXPECT_REJECTED(with([](Plan& plan) { plan.tasks.back().q_end += 9000; }), "must be a part of");
  EXPECT_REJECTED(with([](Plan& plan) { plan.tasks[0].q_begin = -1; }), "must be a part of");
  EXPECT_REJECTED(with([](Plan& plan) { plan.tasks[0].q_end = 0; }), "must be a part of");
  EXPECT_REJECTED(with([](Plan& plan) { plan.tasks.back().server = 2; }), "2 ranks");
  EXPECT_REJECTED(with([](Plan& plan) { plan.tasks.back().document = 3; }), "3 documents");
  EXPECT_REJECTED(with([](Plan& plan) { std::swap(plan.tasks[0], plan.tasks.back()); }), "order");
  EXPECT_REJECTED(with([](Plan& plan) { plan.loads.pop_back(); }), "loads");
  EXPECT_REJECTED(with([](Plan& plan) { plan.num_ranks = 3; }), "num_ranks is 3");
  EXPECT_REJECTED(with([](Plan& plan) { plan.mask.window_left = -7; }), "mask.window_left");
  Plan stale = good;
  stale.mask = {-1, -1};
  EXPECT_REJECTED(validate(stale, pack), "digest");
}

TEST(Plan, RejectsBadOptions) {
  const Pack pack = make_pack({}, 2);
  const auto with = [&](auto change) {
    PlanOptions options;
    change(options);
    make_plan(pack, options);
  };
  EXPECT_REJECTED(with([](PlanOptions& o) { o.tolerance = -0.1; }), "tolerance");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.links.bytes_per_second = 0; }),
                  "links.bytes_per_second");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.links.node_bytes_per_second = -1; }), "links.node");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.links.ranks_per_node = 0; }), "ranks_per_node is 0");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.links.hidden_part = -1; }), "hidden_part is -1");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.links.moving_part = -1; }), "moving_part is -1");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.links.other_seconds = -1; }), "other_seconds is -1");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.links.forward_wait = -1; }), "wait of -1 seconds");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.links.exposed_part = 0; }), "exposed_part is 0");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.links.forward_room = std::nan(""); }), "NaN seconds");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.links.backward_wait = -2; }), "wait of -2 seconds");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.servers.resize(3); }), "servers is 3 entries");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.servers = {{1, 1}, {-1, 1}}; }), "servers[1].speed");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.servers = {{1, -1}, {1, 1}}; }), "servers[0].cap");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.servers = {{0, 1}, {0, 1}}; }), "any speed");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.servers = {{1, 1}, {1, 1, -1}}; }), "servers[1].lag");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.held_bytes.key = -1; }), "held_bytes.key");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.row_bytes.query = -1; }), "row_bytes.query");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.row_bytes.key = -1; }), "row_bytes.key");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.cost.tile_q = 0; }), "cost.tile_q");
  EXPECT_REJECTED(with([](PlanOptions& o) { o.mask.window_right = -2; }), "mask.window_right");
}

}  // namespace
}  // namespace distca::planner
