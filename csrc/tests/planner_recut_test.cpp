#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "planner/balance/schedule.h"
#include "planner/model/pack.h"

namespace distca::planner {
namespace {

constexpr int64_t kTile = 128;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();

PlanOptions options_of_step() {
  PlanOptions options;
  options.row_bytes = options.held_bytes = {41344, 12288};
  options.links.bytes_per_second = 1e15;
  return options;
}

// A document of 40 tiles on rank 0, and three receivers without work.
struct Step {
  explicit Step(const PlanOptions& step_options = options_of_step())
      : options(step_options),
        pack(make_pack(std::vector<Piece>{{0, 0, 0, 40 * kTile}}, 4)),
        problem(pack, options),
        assignment(problem, tiles(400), budget) {
    // Follows from the cost of a slice: see problem.cpp.
    const double pairs_per_second = kTile * kTile / options.cost.seconds_per_tile;
    problem.bytes_per_root_second = 2 * std::sqrt(41344.0 * 12288.0 * pairs_per_second);
    problem.min_relief = 0;
  }

  double tiles(double count) const { return count * options.cost.seconds_per_tile; }

  PlanOptions options;
  Pack pack;
  Problem problem;
  Budget budget{1000000};
  Assignment assignment;
};

void give(Assignment& assignment, int64_t receiver, int64_t begin, int64_t end) {
  assignment.own(0);
  assignment.apply(assignment.move_of({0, begin * kTile, end * kTile, receiver}));
}

// Of 40 tiles: the second lies apart from the others.
void give_three_slices(Assignment& assignment) {
  give(assignment, 1, 35, 40);
  give(assignment, 2, 10, 17);
  give(assignment, 3, 29, 35);
}

TEST(Recut, JoinsSlicesFurtherDown) {
  Step step;
  Assignment& assignment = step.assignment;
  give_three_slices(assignment);
  ASSERT_LE(assignment.surplus(0), 0);
  const double before = total_bytes(assignment.loads());
  recut(assignment, std::vector<double>(4, kUnlimited));
  EXPECT_LT(total_bytes(assignment.loads()), 0.95 * before);
  for (int64_t rank = 0; rank < 4; ++rank) EXPECT_LE(assignment.seconds(rank), step.tiles(400));
  int64_t num_rows = 0;
  double seconds = 0;
  for (const Task& task : assignment.tasks()) {
    num_rows += task.q_end - task.q_begin;
    seconds += step.problem.seconds(0, {task.q_begin, task.q_end});
  }
  EXPECT_EQ(num_rows, 40 * kTile);
  EXPECT_NEAR(seconds, step.tiles(820), step.tiles(1e-6));
}

TEST(Recut, LeavesReceiversBelowTheirBytes) {
  Step step;
  Assignment& assignment = step.assignment;
  give_three_slices(assignment);
  std::vector<int64_t> before;
  for (int64_t rank = 0; rank < 4; ++rank) before.push_back(assignment.load(rank).bytes_in);
  recut(assignment, std::vector<double>(4, 0));
  for (int64_t rank = 1; rank < 4; ++rank) {
    EXPECT_LE(assignment.load(rank).bytes_in, before[rank]) << "rank " << rank;
  }
}

TEST(Recut, TakesSlicesBackWhereMemoryHasNoPlace) {
  PlanOptions options = options_of_step();
  options.servers.assign(4, Server{});
  const auto held = [&](int64_t rows, int64_t keys) {
    return static_cast<double>((rows * 41344 + keys * 12288) * kTile);
  };
  options.servers[1].cap_bytes = held(5, 40);
  options.servers[2].cap_bytes = held(7, 17);
  options.servers[3].cap_bytes = held(6, 35);
  Step step(options);
  Assignment& assignment = step.assignment;
  give_three_slices(assignment);
  const std::vector<Task> before = assignment.tasks();
  recut(assignment, std::vector<double>(4, kUnlimited));
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
