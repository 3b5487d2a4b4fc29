#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <string>

#include "planner/model/cost.h"
#include "random_steps.h"

namespace distca::planner {
namespace {

int64_t count_pairs(const Mask& mask, Range q, int64_t length) {
  int64_t count = 0;
  for (int64_t query = q.begin; query < q.end; ++query) {
    for (int64_t key = 0; key < length; ++key) count += sees(mask, query, key);
  }
  return count;
}

// Tiles from the task's first query row and its first key that hold any visible pair.
int64_t count_tiles(const Mask& mask, Range q, int64_t length, const CostModel& cost) {
  const Range keys = keys_of(mask, q, length);
  int64_t count = 0;
  for (int64_t row = q.begin; row < q.end; row += cost.tile_q) {
    for (int64_t column = keys.begin; column < keys.end; column += cost.tile_k) {
      bool visible = false;
      for (int64_t query = row; query < std::min(q.end, row + cost.tile_q); ++query) {
        for (int64_t key = column; key < std::min(keys.end, column + cost.tile_k); ++key) {
          visible = visible || sees(mask, query, key);
        }
      }
      count += visible;
    }
  }
  return count;
}

const std::vector<Mask> kMasks = {{-1, 0}, {-1, -1}, {0, 0},  {3, 0},
                                  {3, 5},  {0, 4},   {7, -1}, {-1, 2}};

TEST(Cost, KeysAreThoseAnyQuerySees) {
  for (const Mask& mask : kMasks) {
    for (int64_t length = 1; length < 10; ++length) {
      for (int64_t begin = 0; begin < length; ++begin) {
        for (int64_t end = begin + 1; end <= length; ++end) {
          const Range keys = keys_of(mask, {begin, end}, length);
          for (int64_t key = 0; key < length; ++key) {
            bool seen = false;
            for (int64_t query = begin; query < end; ++query) seen = seen || sees(mask, query, key);
            EXPECT_EQ(seen, keys.begin <= key && key < keys.end);
          }
        }
      }
    }
  }
}

TEST(Cost, NoQueriesSeeNothing) {
  const Range keys = keys_of({}, {4, 4}, 9);
  EXPECT_EQ(keys.begin, keys.end);
  EXPECT_EQ(num_pairs({}, {4, 4}, 9), 0);
  EXPECT_EQ(CostModel{}.seconds({}, {4, 4}, 9), 0.0);
}

TEST(Cost, PairsMatchCounting) {
  for (const Mask& mask : kMasks) {
    for (int64_t length = 1; length < 16; ++length) {
      for (int64_t begin = 0; begin < length; ++begin) {
        for (int64_t end = begin + 1; end <= length; ++end) {
          ASSERT_EQ(num_pairs(mask, {begin, end}, length), count_pairs(mask, {begin, end}, length))
              << mask.window_left << " " << mask.window_right << " " << begin << " " << end;
        }
      }
    }
  }
}

TEST(Cost, HugeWindowsAreNoLimit) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(num_pairs({most, most}, {3, 9}, 20), num_pairs({-1, -1}, {3, 9}, 20));
  EXPECT_EQ(CostModel{}.seconds({most, most}, {3, 900}, 2000),
            CostModel{}.seconds({-1, -1}, {3, 900}, 2000));
}

TEST(Cost, PairsOfLongDocumentsDoNotOverflow) {
  const int64_t length = 1 << 24;
  EXPECT_EQ(num_pairs({-1, 0}, {0, length}, length), length * (length + 1) / 2);
}

TEST(Cost, TilesMatchCounting) {
  Random random(1);
  for (int step = 0; step < 3000; ++step) {
    CostModel cost;
    cost.tile_q = draw(random, 1, 9);
    cost.tile_k = draw(random, 1, 9);
    cost.seconds_per_tile = 1.0;
    cost.seconds_per_task = 0.25;
    const Mask mask = draw_mask(random);
    const int64_t length = draw(random, 1, 60);
    const int64_t begin = draw(random, 0, length - 1);
    const Range q{begin, draw(random, begin + 1, length)};
    ASSERT_EQ(cost.seconds(mask, q, length),
              static_cast<double>(count_tiles(mask, q, length, cost)) + 0.25)
        << "mask " << mask.window_left << " " << mask.window_right << " queries " << q.begin << " "
        << q.end << " length " << length << " tiles " << cost.tile_q << "x" << cost.tile_k;
  }
}

TEST(Cost, CutAtATileAddsNoTiles) {
  const CostModel cost;
  const double whole = cost.seconds({}, {0, 4000}, 4000);
  EXPECT_DOUBLE_EQ(cost.seconds({}, {0, 1280}, 4000) + cost.seconds({}, {1280, 4000}, 4000), whole);
  EXPECT_GT(cost.seconds({}, {0, 1281}, 4000) + cost.seconds({}, {1281, 4000}, 4000), whole);
}

CostModel table() {
  CostModel cost;
  cost.table_rows = {100, 200};
  cost.table_keys = {100, 300};
  cost.table_seconds = {1, 3, 2, 8};
  return cost;
}

TEST(Cost, TableIsInterpolatedInBothDirections) {
  const Mask full{-1, -1};
  EXPECT_DOUBLE_EQ(table().seconds(full, {0, 100}, 100), 1);
  EXPECT_DOUBLE_EQ(table().seconds(full, {0, 200}, 300), 8);
  EXPECT_DOUBLE_EQ(table().seconds(full, {50, 150}, 200), 2);
  EXPECT_DOUBLE_EQ(table().seconds(full, {0, 150}, 200), (1 + 3 + 2 + 8) / 4.0);
}

TEST(Cost, TableIsProportionalBeyondItsEdges) {
  const Mask full{-1, -1};
  EXPECT_DOUBLE_EQ(table().seconds(full, {0, 50}, 100), 0.5);
  EXPECT_DOUBLE_EQ(table().seconds(full, {0, 100}, 600), 6);
  EXPECT_DOUBLE_EQ(table().seconds(full, {0, 400}, 600), 32);
}

TEST(Cost, TableIsScaledByTheShareOfTiles) {
  CostModel cost = table();
  cost.seconds_per_task = 0.5;
  // 2 x 2 tiles, of which a causal mask leaves 3.
  const double full = cost.seconds({-1, -1}, {0, 200}, 200);
  EXPECT_DOUBLE_EQ(cost.seconds({-1, 0}, {0, 200}, 200), 0.5 + (full - 0.5) * 3 / 4);
}

TEST(Cost, RejectsBadModels) {
  const auto with = [](auto change) {
    CostModel cost = table();
    change(cost);
    validate(cost);
  };
  EXPECT_NO_THROW(with([](CostModel&) {}));
  EXPECT_REJECTED(with([](CostModel& cost) { cost.tile_q = 0; }), "cost.tile_q is 0");
  EXPECT_REJECTED(with([](CostModel& cost) { cost.tile_k = -1; }), "cost.tile_k is -1");
  EXPECT_REJECTED(with([](CostModel& cost) { cost.seconds_per_tile = 0; }), "seconds_per_tile");
  EXPECT_REJECTED(with([](CostModel& cost) { cost.seconds_per_task = -1; }), "seconds_per_task");
  EXPECT_REJECTED(with([](CostModel& cost) { cost.table_rows = {100, 100}; }), "table_rows[1]");
  EXPECT_REJECTED(with([](CostModel& cost) { cost.table_keys = {0, 100}; }), "table_keys[0]");
  EXPECT_REJECTED(with([](CostModel& cost) { cost.table_seconds = {1}; }), "table_seconds");
  EXPECT_REJECTED(with([](CostModel& cost) { cost.table_seconds.clear(); }), "table_seconds");
  EXPECT_REJECTED(with([](CostModel& cost) { cost.table_seconds[3] = 0; }), "table_seconds[3]");
  EXPECT_REJECTED(validate(Mask{-2, 0}), "mask.window_left is -2");
  EXPECT_REJECTED(validate(Mask{0, -2}), "mask.window_right is -2");
}

}  // namespace
}  // namespace distca::planner
