#include <gtest/gtest.h>

#include <vector>

#include "layout_properties.h"
#include "planner/make_plan.h"
#include "random_steps.h"

namespace distca::planner {
namespace {

constexpr RowBytes kTravels{10, 6}, kInputs{3, 2};

PlanOptions keeping(double cap_bytes) {
  PlanOptions options;
  options.row_bytes = kTravels;
  options.kept_bytes = kInputs;
  options.kept_cap_bytes = cap_bytes;
  return options;
}

// Two long documents on one rank, short ones on three.
Pack skewed_pack() {
  std::vector<Piece> pieces = {{0, 0, 0, 6000}, {0, 1, 0, 4000}};
  for (int64_t i = 0; i < 150; ++i) pieces.push_back({1 + i % 3, 2 + i, 0, 200});
  return make_pack(pieces, 4);
}

int64_t num_kept(const Plan& plan) {
  return std::count_if(plan.tasks.begin(), plan.tasks.end(),
                       [](const Task& task) { return task.is_kept; });
}

TEST(Keeping, LeavesTheAssignmentAloneAndTakesBytesOff) {
  const Pack pack = skewed_pack();
  const Plan without = make_plan(pack, keeping(0)), all = make_plan(pack, keeping(1e9));
  ASSERT_EQ(num_kept(without), 0);
  ASSERT_GT(num_kept(all), 0);
  ASSERT_EQ(without.tasks.size(), all.tasks.size());
  int64_t spared = 0;
  for (size_t i = 0; i < all.tasks.size(); ++i) {
    EXPECT_EQ(all.tasks[i].q_begin, without.tasks[i].q_begin);
    EXPECT_EQ(all.tasks[i].server, without.tasks[i].server);
    EXPECT_EQ(all.tasks[i].is_kept, all.tasks[i].document < 2 && all.tasks[i].server != 0);
  }
  for (int64_t rank = 0; rank < 4; ++rank) {
    const SlotLayout layout = slot_layout(pack, all, rank);
    const int64_t num_queries = static_cast<int64_t>(rows_of(layout.send_q_runs).size());
    const int64_t num_keys = static_cast<int64_t>(rows_of(layout.send_k_runs).size());
    const int64_t bytes = num_queries * kInputs.query + num_keys * kInputs.key;
    EXPECT_EQ(without.loads[rank].bytes_out - all.loads[rank].bytes_out, bytes);
    EXPECT_EQ(without.loads[rank].bytes_in - all.loads[rank].bytes_in, all.loads[rank].kept_bytes);
    spared += bytes;
    EXPECT_EQ(layout.keeping.has_value(), bytes > 0 || !layout.visiting_tasks.empty());
  }
  EXPECT_GT(spared, 0);
  EXPECT_NE(without.digest, all.digest);
}

TEST(Keeping, SlowLinksLetMoreWorkMoveAndFastLinksKeepNothing) {
  const Pack pack = skewed_pack();
  for (const double bytes_per_second : {1e8, 1e12}) {
    PlanOptions options = keeping(0);
    options.links.bytes_per_second = bytes_per_second;
    const Plan without = make_plan(pack, options);
    options.kept_cap_bytes = 1e9;
    const Plan all = make_plan(pack, options);
    options.kept_gain = 0.02;
    const Plan plan = make_plan(pack, options);
    const bool is_slow = bytes_per_second == 1e8;
    EXPECT_EQ(plan.digest, is_slow ? all.digest : without.digest);
    EXPECT_EQ(plan.loads[0].seconds < without.loads[0].seconds, is_slow);
    EXPECT_EQ(num_kept(plan) > 0, is_slow);
    options.kept_gain = 1;  // all seconds of the layer
    EXPECT_EQ(make_plan(pack, options).digest, without.digest);
  }
}

TEST(Keeping, FillsTheBudgetWithTheLargestThatFit) {
  const Pack pack = skewed_pack();
  int64_t before = 0;
  for (const double cap_bytes : {1.0, 5e3, 1e4, 2e4, 4e4, 1e5}) {
    const PlanOptions options = keeping(cap_bytes);
    const Plan plan = make_plan(pack, options);
    EXPECT_EQ(check_kept(pack, options, plan), "") << cap_bytes;
    EXPECT_EQ(check_kept_alike(pack, plan), "") << cap_bytes;
    EXPECT_GE(num_kept(plan), before);
    before = num_kept(plan);
  }
  EXPECT_GT(before, 0);
}

TEST(Keeping, EveryTamperedTableIsFound) {
  const std::vector<Piece> pieces = {
      {0, 0, 0, 900, 30}, {2, 1, 0, 60, 7}, {1, 1, 60, 60}, {1, 2, 0, 50}, {0, 3, 0, 700}};
  const Pack pack = make_pack(pieces, 3);
  PlanOptions options = keeping(0);
  Plan plan = make_plan(pack, options);
  int64_t num_tampered = 0;
  for (options.kept_cap_bytes = 1; num_kept(plan) == 0; options.kept_cap_bytes *= 2) {
    plan = make_plan(pack, options);  // until it keeps something
  }
  const std::vector<SlotLayout> layouts = make_layouts(pack, plan);
  ASSERT_EQ(check_layouts(pack, plan, layouts), "");
  const auto is_found = [&](size_t rank, auto tamper) {
    std::vector<SlotLayout> wrong = layouts;
    tamper(*wrong[rank].keeping);
    ++num_tampered;
    return !check_layouts(pack, plan, wrong).empty();
  };
  for (size_t rank = 0; rank < layouts.size(); ++rank) {
    if (!layouts[rank].keeping) continue;
    for (const auto counts : {&transport::Slots::send_q_rows, &transport::Slots::recv_k_rows}) {
      EXPECT_TRUE(is_found(rank, [&](Keeping& wrong) { (wrong.again.*counts)[0] += 1; }));
    }
    for (const auto runs : {&transport::Slots::send_q_runs, &transport::Slots::send_k_runs,
                            &transport::Slots::recv_q_runs, &transport::Slots::recv_k_runs}) {
      EXPECT_TRUE(is_found(rank, [&](Keeping& wrong) { (wrong.again.*runs).push_back({0, 1}); }));
    }
    for (const auto runs : {&VisitingRuns::queries, &VisitingRuns::keys}) {
      EXPECT_TRUE(is_found(rank, [&](Keeping& wrong) { (wrong.kept.*runs).push_back({0, 1}); }));
    }
    std::vector<SlotLayout> wrong = layouts;
    wrong[rank].keeping.reset();
    EXPECT_NE(check_layouts(pack, plan, wrong), "");
  }
  EXPECT_GT(num_tampered, 8);
}

TEST(Keeping, TasksOfADocumentAreKeptAlike) {
  const Pack pack = skewed_pack();
  const Plan plan = make_plan(pack, keeping(1e9));
  for (size_t i = 0; i < plan.tasks.size(); ++i) {
    Plan wrong = plan;
    wrong.tasks[i].is_kept = !wrong.tasks[i].is_kept;
    wrong.digest = digest_of(pack, wrong.mask, wrong.tasks);
    if (check_kept_alike(pack, wrong).empty()) continue;  // the only task of its document there
    EXPECT_THROW(validate(wrong, pack), std::invalid_argument) << i;
  }
}

TEST(Keeping, PartsOfAKeptTaskThatComeHomeKeepNothing) {
  const std::vector<Piece> pieces = {{0, 0, 0, 10}, {1, 0, 10, 30}, {0, 0, 40, 20}};
  const Pack pack = make_pack(pieces, 2);
  const Mask mask{5, 0};
  const Plan plan = plan_of_tasks(
      pack, mask,
      {{0, 10, 40, 0, true}, {0, 40, 45, 0, true}, {0, 45, 60, 0, true}, {0, 0, 10, 1}});
  EXPECT_TRUE(plan.tasks[0].is_kept && plan.tasks[1].is_kept);
  EXPECT_FALSE(plan.tasks[2].is_kept);
  EXPECT_EQ(check_kept_alike(pack, plan), "");
  EXPECT_REJECTED(plan_of_tasks(pack, mask, {{0, 0, 61, 0}}), "queries must be a part of [0, 60)");
}

}  // namespace
}  // namespace distca::planner
