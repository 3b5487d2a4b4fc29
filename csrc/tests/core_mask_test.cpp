#include <gtest/gtest.h>

#include <limits>

#include "core/mask.h"

namespace distca {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
const Mask kMasks[] = {{-1, 0}, {-1, -1}, {0, 0}, {3, 0},      {0, 2},
                       {-1, 4}, {5, -1},  {2, 7}, {kMax, kMax}};

bool sees(const Mask& mask, int64_t query, int64_t key) {
  return (mask.window_left < 0 || query - key <= mask.window_left) &&
         (mask.window_right < 0 || key - query <= mask.window_right);
}

// Calls check(queries, keys) for ranges that overlap, touch and lie apart.
template <typename Check>
void for_each_tile(const Check& check) {
  for (int64_t q = 0; q < 12; ++q) {
    for (int64_t num_q = 1; num_q < 5; ++num_q) {
      for (int64_t k = 0; k < 12; ++k) {
        for (int64_t num_k = 1; num_k < 5; ++num_k) check({q, q + num_q}, {k, k + num_k});
      }
    }
  }
}

TEST(Mask, KeysSeenAreThoseThatAnyQuerySees) {
  for (const Mask& mask : kMasks) {
    for_each_tile([&](Range queries, Range keys) {
      const Range seen = keys_seen(mask, queries, keys);
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        bool expected = false;
        for (int64_t q = queries.begin; q < queries.end; ++q) expected |= sees(mask, q, key);
        ASSERT_EQ(seen.begin <= key && key < seen.end, expected)
            << mask.window_left << " " << mask.window_right << " " << queries.begin << " " << key;
      }
    });
  }
}

TEST(Mask, SightSaysWhetherTilesHideScores) {
  for (const Mask& mask : kMasks) {
    for_each_tile([&](Range queries, Range keys) {
      int64_t num_seen = 0;
      for (int64_t q = queries.begin; q < queries.end; ++q) {
        for (int64_t key = keys.begin; key < keys.end; ++key) num_seen += sees(mask, q, key);
      }
      const int64_t num_all = num_rows(queries) * num_rows(keys);
      const Sight expected = num_seen == 0         ? Sight::kNone
                             : num_seen == num_all ? Sight::kAll
                                                   : Sight::kSome;
      ASSERT_EQ(sight_of(mask, queries, keys), expected)
          << mask.window_left << " " << mask.window_right << " " << queries.begin << " "
          << keys.begin;
    });
  }
}

TEST(Mask, QueriesSeeingAKey) {
  for (const Mask& mask : kMasks) {
    for (int64_t key = 0; key < 12; ++key) {
      const Range seeing = queries_seeing(mask, key, {0, 12});
      for (int64_t q = 0; q < 12; ++q) {
        ASSERT_EQ(seeing.begin <= q && q < seeing.end, sees(mask, q, key));
      }
    }
  }
}

TEST(Mask, NoQueriesSeeNothing) {
  const Range seen = keys_of({}, {7, 7}, 20);
  EXPECT_EQ(num_rows(seen), 0);
  EXPECT_EQ(num_pairs({}, {7, 7}, 20), 0);
}

}  // namespace
}  // namespace distca
