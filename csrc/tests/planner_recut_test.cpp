#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "planner/balance/recut.h"
#include "planner/model/pack.h"

namespace distca::planner {
namespace {

constexpr int64_t kTile = 128;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();

// A document of 40 tiles on rank 0, and three receivers without work.
struct Step {
  Step() : pack(make_pack(std::vector<Piece>{{0, 0, 0, 40 * kTile}}, 4)) {
    options.row_bytes = options.held_bytes = {41344, 12288};
    options.links.bytes_per_second = 1e15;
  }

  double tiles(double count) const { return count * options.cost.seconds_per_tile; }
  // By the cost of a slice of any pairs, see balancer.cpp.
  Weights weights() const {
    const double pairs_per_second = kTile * kTile / options.cost.seconds_per_tile;
    return {2 * std::sqrt(41344.0 * 12288.0 * pairs_per_second), 0};
  }

  Pack pack;
  PlanOptions options;
};

void give(Assignment& assignment, int64_t receiver, int64_t begin, int64_t end) {
  assignment.own(0);
  assignment.apply(assignment.move_of({0, 0, receiver, {begin * kTile, end * kTile}}));
}

// Of 40 tiles: the second lies apart from the others.
void give_three_slices(Assignment& assignment) {
  give(assignment, 1, 35, 40);
  give(assignment, 2, 10, 17);
  give(assignment, 3, 29, 35);
}

TEST(Recut, JoinsSlicesFurtherDown) {
  const Step step;
  const HomeCut home(step.pack, step.options);
  Budget budget(1000000);
  Assignment assignment(step.pack, step.options, home, step.tiles(400), budget);
  give_three_slices(assignment);
  ASSERT_LE(assignment.surplus(0), 0);
  const double before = assignment.total_bytes();
  recut(assignment, step.options, step.weights(), std::vector<double>(4, kUnlimited));
  EXPECT_LT(assignment.total_bytes(), 0.95 * before);
  EXPECT_LE(assignment.slowest_seconds(), step.tiles(400));
  int64_t num_rows = 0;
  double seconds = 0;
  for (const Task& task : assignment.tasks()) {
    num_rows += task.q_end - task.q_begin;
    seconds += assignment.seconds(0, {task.q_begin, task.q_end});
  }
  EXPECT_EQ(num_rows, 40 * kTile);
  EXPECT_NEAR(seconds, step.tiles(820), step.tiles(1e-6));
}

TEST(Recut, LeavesReceiversBelowTheirBytes) {
  const Step step;
  const HomeCut home(step.pack, step.options);
  Budget budget(1000000);
  Assignment assignment(step.pack, step.options, home, step.tiles(400), budget);
  give_three_slices(assignment);
  std::vector<int64_t> before;
  for (int64_t rank = 0; rank < 4; ++rank) before.push_back(assignment.bytes_in(rank));
  recut(assignment, step.options, step.weights(), std::vector<double>(4, 0));
  for (int64_t rank = 1; rank < 4; ++rank) {
    EXPECT_LE(assignment.bytes_in(rank), before[rank]) << "rank " << rank;
  }
}

TEST(Recut, TakesSlicesBackWhereMemoryHasNoPlace) {
  Step step;
  step.options.servers.assign(4, Server{});
  const HomeCut home(step.pack, step.options);
  const auto held = [&](int64_t rows, int64_t keys) {
    return static_cast<double>((rows * 41344 + keys * 12288) * kTile);
  };
  step.options.servers[1].cap_bytes = held(5, 40);
  step.options.servers[2].cap_bytes = held(7, 17);
  step.options.servers[3].cap_bytes = held(6, 35);
  Budget budget(1000000);
  Assignment assignment(step.pack, step.options, home, step.tiles(400), budget);
  give_three_slices(assignment);
  const std::vector<Task> before = assignment.tasks();
  recut(assignment, step.options, step.weights(), std::vector<double>(4, kUnlimited));
  const std::vector<Task> after = assignment.tasks();
  EXPECT_TRUE(assignment.is_valid());
  ASSERT_EQ(after.size(), before.size());
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_EQ(after[i].server, before[i].server);
    EXPECT_EQ(after[i].q_begin, before[i].q_begin);
    EXPECT_EQ(after[i].q_end, before[i].q_end);
  }
}

}  // namespace
}  // namespace distca::planner
