#include "planner_properties.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "layout_properties.h"
#include "planner/make_plan.h"
#include "random_steps.h"

namespace distca::planner {
namespace {

double slowest_seconds(const std::vector<Load>& loads) {
  double most = 0;
  for (const Load& load : loads) most = std::max(most, load.seconds_lag + load.seconds);
  return most;
}

// Every segment's queries on its own rank.
std::vector<Task> home_tasks(const Pack& pack) {
  std::vector<Task> tasks;
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    const int64_t first_query = pack.documents[i].first_query;
    for (const Segment& segment : pack.segments_of(pack.documents[i])) {
      const Range rows{std::max(segment.start, first_query), segment.start + segment.length};
      if (rows.begin >= rows.end) continue;
      tasks.push_back({static_cast<int64_t>(i), rows.begin, rows.end, segment.rank});
    }
  }
  std::sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    return std::tie(a.server, a.document, a.q_begin) < std::tie(b.server, b.document, b.q_begin);
  });
  return tasks;
}

Plan plan_at_home(const Pack& pack, const PlanOptions& options) {
  Plan plan{pack.num_ranks, options.mask, home_tasks(pack), {}, 0};
  plan.loads = count_loads(pack, options, plan.tasks);
  plan.digest = digest_of(pack, plan.mask, plan.tasks);
  return plan;
}

bool same_bits(double a, double b) {
  return std::memcmp(&a, &b, sizeof(double)) == 0;
}

std::string check_same(const Plan& a, const Plan& b) {
  const auto task_fields = [](const Task& task) {
    return std::tie(task.document, task.q_begin, task.q_end, task.server);
  };
  const auto same_task = [&](const Task& x, const Task& y) {
    return task_fields(x) == task_fields(y);
  };
  const auto same_load = [](const Load& x, const Load& y) {
    return same_bits(x.seconds_home, y.seconds_home) && same_bits(x.seconds, y.seconds) &&
           x.bytes_out == y.bytes_out && x.bytes_in == y.bytes_in && x.held_bytes == y.held_bytes;
  };
  if (a.digest != b.digest) return "digests of equal inputs";
  if (!std::equal(a.tasks.begin(), a.tasks.end(), b.tasks.begin(), b.tasks.end(), same_task)) {
    return "tasks of equal inputs";
  }
  if (!std::equal(a.loads.begin(), a.loads.end(), b.loads.begin(), b.loads.end(), same_load)) {
    return "loads of equal inputs";
  }
  return "";
}

// Seconds if work were divisible: of all servers together.
double fair_seconds(const Pack& pack, const PlanOptions& options) {
  double work = 0, speed = 0, lag = 0;
  for (const Task& task : home_tasks(pack)) {
    work += options.cost.seconds(options.mask, {task.q_begin, task.q_end},
                                 pack.documents[task.document].length);
  }
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    speed += options.speed(rank);
    lag += options.speed(rank) * options.lag_seconds(rank);
  }
  return (work + lag) / speed;
}

// A step that is balanced as it lies fetches keys alone, and keys only for crossing documents.
std::string check_moves(const Pack& pack, const PlanOptions& options, const Plan& plan) {
  const Plan home = plan_at_home(pack, options);
  if (!check_servers(options, home).empty()) return "";
  // Even hidden transfers cost a fifth of their time, on the mean rank, and a part of the layer.
  const auto seconds = [&](const std::vector<Load>& loads) {
    double sum = 0, compute = options.links.other_seconds * static_cast<double>(loads.size());
    for (const Load& load : loads) {
      sum += 0.2 * link_seconds(load, options.links);
      compute += load.seconds;
    }
    if (sum > 0) sum += options.links.moving_part * compute;
    return layer_seconds(loads, options.links) + sum / static_cast<double>(loads.size());
  };
  if (seconds(plan.loads) > seconds(home.loads) * (1 + 1e-9)) return "slower than home";
  const double limit = fair_seconds(pack, options) * (1 + options.tolerance);
  if (slowest_seconds(home.loads) > limit * (1 - 1e-9)) return "";
  const Homes homes = homes_of(pack);
  for (const Task& task : plan.tasks) {
    for (int64_t q = task.q_begin; q < task.q_end; ++q) {
      if (homes[task.document][q].rank != task.server) return "moved in balance";
    }
  }
  return "";
}

std::string check_step(const Pack& pack, const PlanOptions& options, const Plan& plan) {
  validate(plan, pack);
  for (const std::string& wrong :
       {check_cover(pack, plan), check_loads(pack, options, plan), check_moves(pack, options, plan),
        check_servers(options, plan), check_kept(pack, options, plan),
        check_same(plan, make_plan(pack, options))}) {
    if (!wrong.empty()) return wrong;
  }
  return check_layouts(pack, plan, make_layouts(pack, plan));
}

// A table where time is neither rows nor pairs.
CostModel table_cost() {
  CostModel cost;
  cost.table_rows = {16, 256};
  cost.table_keys = {32, 512};
  cost.table_seconds = {1e-6, 9e-6, 8e-6, 1e-4};
  return cost;
}

// Fast links, links that cannot carry what compute asks for, and a table behind links between.
std::vector<PlanOptions> adversarial_options(const Mask& mask, int64_t side) {
  PlanOptions fast;
  fast.mask = mask;
  fast.cost.tile_q = fast.cost.tile_k = side;
  fast.row_bytes = {5120, 4096};
  fast.links.bytes_per_second = 1e15;
  PlanOptions slow = fast;
  slow.cost.seconds_per_task = 5e-7;
  slow.links.bytes_per_second = 1e9;
  PlanOptions table = fast;
  table.cost = table_cost();
  table.cost.tile_q = side;
  table.row_bytes = {1, 0};
  table.links.bytes_per_second = 1e9;
  table.tolerance = 0;
  return {fast, slow, table};
}

TEST(PlannerProperties, OfRandomSteps) {
  int64_t num_sped_up = 0, num_at_home = 0, num_refused = 0;
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    Random random(seed);
    const int64_t num_ranks = draw(random, 1, draw(random, 1, 64));
    const Pack pack = make_pack(draw_pieces(random, num_ranks, draw(random, 1, 300)), num_ranks);
    PlanOptions options = draw_options(random);
    if (draw(random, 0, 1) == 0) draw_cluster(random, num_ranks, options);
    const Plan home = plan_at_home(pack, options);
    Plan plan;
    try {
      plan = make_plan(pack, options);
    } catch (const std::invalid_argument& error) {
      ASSERT_NE(std::string(error.what()).find("memory caps: rows"), std::string::npos);
      ASSERT_NE(check_servers(options, home), "") << "seed " << seed << ": refused for nothing";
      ++num_refused;
      continue;
    }
    ASSERT_EQ(check_step(pack, options, plan), "") << "seed " << seed;
    num_sped_up +=
        layer_seconds(plan.loads, options.links) < layer_seconds(home.loads, options.links);
    num_at_home += num_ranks > 1 && plan.tasks.size() > 0 && plan.digest == home.digest;
  }
  EXPECT_GT(num_sped_up, 1000);  // the steps drawn reach every outcome
  EXPECT_GT(num_at_home, 100);
  EXPECT_GT(num_refused, 50);
}

// So many on some ranks that they go whole, beside a few that are cut.
TEST(PlannerProperties, OfManyShortDocuments) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const int64_t num_ranks = draw(random, 2, 6), most = draw(random, 0, 1);
    std::vector<int64_t> lengths;
    for (int64_t i = draw(random, 100, 600); i > 0; --i) lengths.push_back(draw(random, 1, 4));
    if (draw(random, 0, 1) == 0) lengths.push_back(draw(random, 1, 400));
    std::vector<Piece> pieces = placed_whole(lengths, [&](int64_t) {
      return std::max<int64_t>(0, draw(random, -5, num_ranks - 1) * most);
    });
    if (draw(random, 0, 2) == 0) pieces = crossing_documents(lengths, num_ranks);
    const Pack pack = make_pack(pieces, num_ranks);
    PlanOptions options = draw_options(random);
    options.kept_cap_bytes = 0;
    if (draw(random, 0, 1) == 0) draw_cluster(random, num_ranks, options);
    for (Server& server : options.servers) server.cap_bytes *= 10;
    try {
      ASSERT_EQ(check_step(pack, options, make_plan(pack, options)), "") << "seed " << seed;
    } catch (const std::invalid_argument& error) {
      ASSERT_NE(std::string(error.what()).find("memory caps: rows"), std::string::npos);
    }
  }
}

TEST(PlannerProperties, OfAdversarialSteps) {
  constexpr std::pair<int64_t, int64_t> kRanksAndTiles[] = {{1, 128}, {2, 128}, {3, 16},
                                                            {7, 128}, {16, 16}, {64, 16}};
  Random random(1);
  for (const auto& [num_ranks, side] : kRanksAndTiles) {
    for (const Mask& mask : adversarial_masks(side)) {
      for (const PlanOptions& options : adversarial_options(mask, side)) {
        for (const NamedStep& step : adversarial_steps(random, num_ranks, side)) {
          const Pack pack = make_pack(step.pieces, num_ranks);
          const Plan plan = make_plan(pack, options);
          ASSERT_EQ(check_step(pack, options, plan), "")
              << step.name << ", " << num_ranks << " ranks, tiles of " << side << ", window "
              << mask.window_left << " " << mask.window_right << ", link "
              << options.links.bytes_per_second;
        }
      }
    }
  }
}

TEST(PlannerProperties, OfEveryNumberOfRanks) {
  PlanOptions options = adversarial_options({-1, 0}, 128)[0];
  options.links.bytes_per_second = 1e11;
  for (int64_t num_ranks = 1; num_ranks <= 64; ++num_ranks) {
    Random random(static_cast<uint32_t>(num_ranks));
    std::vector<int64_t> lengths = {num_ranks * 300};
    for (const Piece& piece : heavy_tailed_step(random, num_ranks, 700)) {
      lengths.push_back(piece.length);
    }
    const Pack pack = make_pack(crossing_documents(lengths, num_ranks), num_ranks);
    ASSERT_EQ(check_step(pack, options, make_plan(pack, options)), "") << num_ranks << " ranks";
  }
}

std::vector<int64_t> draw_permutation(Random& random, int64_t count) {
  std::vector<int64_t> permutation(count);
  std::iota(permutation.begin(), permutation.end(), int64_t{0});
  for (size_t i = permutation.size(); i > 1; --i) {
    std::swap(permutation[i - 1], permutation[random() % i]);
  }
  return permutation;
}

std::vector<Piece> with_ranks(std::vector<Piece> pieces, const std::vector<int64_t>& rank_of) {
  for (Piece& piece : pieces) piece.rank = rank_of[piece.rank];
  return pieces;
}

TEST(PlannerProperties, HoldForAnyOrderOfRanks) {
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    Random random(seed);
    const int64_t num_ranks = draw(random, 2, 24);
    const std::vector<Piece> pieces = draw_pieces(random, num_ranks, 200);
    PlanOptions options = draw_options(random);
    if (draw(random, 0, 1) == 0) options.links.ranks_per_node = draw(random, 1, num_ranks);
    const std::vector<int64_t> rank_of = draw_permutation(random, num_ranks);
    const Plan plan = make_plan(make_pack(pieces, num_ranks), options);
    const Pack permuted_pack = make_pack(with_ranks(pieces, rank_of), num_ranks);
    const Plan permuted = make_plan(permuted_pack, options);
    ASSERT_EQ(check_step(permuted_pack, options, permuted), "") << "seed " << seed;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      ASSERT_NEAR(plan.loads[rank].seconds_home, permuted.loads[rank_of[rank]].seconds_home, 1e-12)
          << "seed " << seed;
    }
  }
}

// Where work divides, ties between ranks may change who computes what but not how well. It divides
// less the tighter the tolerance: then tiles have to be smaller.
TEST(PlannerProperties, AreAsGoodForAnyOrderOfRanks) {
  PlanOptions coarse;
  coarse.cost.seconds_per_tile = 1.2e-6;
  coarse.row_bytes = {41216, 16384};
  coarse.links.bytes_per_second = 1e12;
  coarse.tolerance = 0.01;
  PlanOptions fine = coarse;
  fine.cost.tile_q = fine.cost.tile_k = 32;
  fine.tolerance = PlanOptions{}.tolerance;
  const auto bytes = [](const Plan& plan) {
    double total = 0;
    for (const Load& load : plan.loads) total += static_cast<double>(load.bytes_in);
    return total;
  };
  for (const PlanOptions& options : {coarse, fine}) {
    for (uint32_t seed = 0; seed < 40; ++seed) {
      Random random(seed);
      const int64_t num_ranks = draw(random, 2, 64);
      const std::vector<Piece> pieces = heavy_tailed_step(random, num_ranks, 16384);
      const Plan plan = make_plan(make_pack(pieces, num_ranks), options);
      const std::vector<int64_t> rank_of = draw_permutation(random, num_ranks);
      const Plan permuted = make_plan(make_pack(with_ranks(pieces, rank_of), num_ranks), options);
      for (const Plan& either : {plan, permuted}) {
        EXPECT_LE(imbalance(either), 1 + options.tolerance + 1e-9) << "seed " << seed;
      }
      EXPECT_NEAR(bytes(permuted), bytes(plan), 0.01 * bytes(plan)) << "seed " << seed;
    }
  }
}

TEST(PlannerProperties, EveryTamperedPlanIsFound) {
  const std::vector<Piece> pieces = {
      {0, 0, 0, 900, 30}, {1, 1, 0, 100}, {2, 2, 0, 60, 7}, {1, 2, 60, 60}};
  const Pack pack = make_pack(pieces, 3);
  const PlanOptions options = adversarial_options({-1, 0}, 16)[0];
  const Plan plan = make_plan(pack, options);
  ASSERT_EQ(check_step(pack, options, plan), "");
  const auto is_found = [&](auto tamper) {
    Plan wrong = plan;
    tamper(wrong);
    wrong.digest = digest_of(pack, wrong.mask, wrong.tasks);
    return !check_cover(pack, wrong).empty() || !check_loads(pack, options, wrong).empty();
  };
  for (size_t i = 0; i < plan.tasks.size(); ++i) {
    for (const auto field : {&Task::document, &Task::q_begin, &Task::q_end, &Task::server}) {
      for (const int change : {-1, 1}) {
        EXPECT_TRUE(is_found([&](Plan& wrong) { wrong.tasks[i].*field += change; })) << i;
      }
    }
    EXPECT_TRUE(is_found([&](Plan& wrong) { wrong.tasks.erase(wrong.tasks.begin() + i); })) << i;
    EXPECT_TRUE(is_found([&](Plan& wrong) { wrong.tasks.push_back(wrong.tasks[i]); })) << i;
    EXPECT_TRUE(is_found([&](Plan& wrong) {
      const Task& task = wrong.tasks[i];
      wrong.tasks.insert(wrong.tasks.begin() + i,
                         Task{task.document, task.q_begin, task.q_begin, task.server});
    })) << i;
  }
  for (size_t rank = 0; rank < plan.loads.size(); ++rank) {
    for (const auto field : {&Load::seconds, &Load::seconds_home}) {
      EXPECT_TRUE(is_found([&](Plan& wrong) { wrong.loads[rank].*field += 1e-9; })) << rank;
    }
    for (const auto field : {&Load::bytes_in, &Load::bytes_out}) {
      EXPECT_TRUE(is_found([&](Plan& wrong) { wrong.loads[rank].*field += 1; })) << rank;
    }
  }
  Plan stale = plan;
  stale.digest += 1;
  EXPECT_EQ(check_cover(pack, stale), "digest");
  EXPECT_EQ(check_same(plan, stale), "digests of equal inputs");
}

TEST(PlannerProperties, NeedlessMovesAreFound) {
  const std::vector<Piece> pieces = {{0, 0, 0, 64}, {0, 1, 0, 64}, {1, 2, 0, 64}, {1, 3, 0, 64}};
  const Pack pack = make_pack(pieces, 2);
  const PlanOptions options = adversarial_options({-1, 0}, 16)[0];
  Plan plan = make_plan(pack, options);
  ASSERT_EQ(check_moves(pack, options, plan), "");
  plan.tasks = {{1, 0, 64, 0}, {2, 0, 64, 0}, {0, 0, 64, 1}, {3, 0, 64, 1}};
  EXPECT_EQ(check_moves(pack, options, plan), "moved in balance");
  plan.loads[0].seconds *= 2;
  EXPECT_EQ(check_moves(pack, options, plan), "slower than home");
}

TEST(PlannerProperties, EveryTamperedLayoutIsFound) {
  const std::vector<Piece> pieces = {
      {0, 0, 0, 900, 30}, {2, 1, 0, 60, 7}, {1, 1, 60, 60}, {1, 2, 0, 50}};
  const Pack pack = make_pack(pieces, 3);
  const Plan plan = make_plan(pack, adversarial_options({-1, 0}, 16)[0]);
  const std::vector<SlotLayout> layouts = make_layouts(pack, plan);
  ASSERT_EQ(check_layouts(pack, plan, layouts), "");
  int64_t num_tampered = 0;
  const auto is_found = [&](size_t rank, auto tamper) {
    std::vector<SlotLayout> wrong = layouts;
    tamper(wrong[rank]);
    ++num_tampered;
    return !check_layouts(pack, plan, wrong).empty();
  };
  const auto counts = {&SlotLayout::send_q_rows, &SlotLayout::recv_q_rows, &SlotLayout::send_k_rows,
                       &SlotLayout::recv_k_rows};
  const auto tables = {&SlotLayout::send_q_runs, &SlotLayout::send_k_runs, &SlotLayout::recv_q_runs,
                       &SlotLayout::recv_k_runs};
  const auto task_fields = {&PlacedTask::q_row, &PlacedTask::num_q_rows, &PlacedTask::k_row,
                            &PlacedTask::num_k_rows, &PlacedTask::q_offset};
  for (size_t rank = 0; rank < layouts.size(); ++rank) {
    for (const auto table : counts) {
      EXPECT_TRUE(is_found(rank, [&](SlotLayout& wrong) { (wrong.*table).push_back(0); }));
      for (size_t i = 0; i < (layouts[rank].*table).size(); ++i) {
        for (const int64_t change : {int64_t{-1}, int64_t{1}, int64_t{1} << 40}) {
          EXPECT_TRUE(is_found(rank, [&](SlotLayout& wrong) { (wrong.*table)[i] += change; }));
        }
      }
    }
    for (const auto table : tables) {
      EXPECT_TRUE(is_found(rank, [&](SlotLayout& wrong) { (wrong.*table).push_back({0, 1}); }));
      for (size_t i = 0; i < (layouts[rank].*table).size(); ++i) {
        for (const auto field : {&Run::first, &Run::length}) {
          for (const int64_t change : {int64_t{-1}, int64_t{1}, int64_t{1} << 40}) {
            EXPECT_TRUE(
                is_found(rank, [&](SlotLayout& wrong) { (wrong.*table)[i].*field += change; }));
          }
        }
      }
    }
    for (const auto tasks : {&Layout::early_tasks, &Layout::late_tasks, &Layout::visiting_tasks}) {
      for (size_t i = 0; i < (layouts[rank].*tasks).size(); ++i) {
        for (const auto field : task_fields) {
          EXPECT_TRUE(is_found(rank, [&](SlotLayout& wrong) { (wrong.*tasks)[i].*field += 1; }));
        }
      }
    }
    EXPECT_TRUE(is_found(rank, [](SlotLayout& wrong) { wrong.num_home_rows += 1; }));
    EXPECT_TRUE(is_found(rank, [](SlotLayout& wrong) { wrong.num_context_rows += 1; }));
  }
  EXPECT_GT(num_tampered, 100);
}

}  // namespace
}  // namespace distca::planner
