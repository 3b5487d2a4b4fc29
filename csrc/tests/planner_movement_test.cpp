#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "layout_properties.h"
#include "planner/layout/layout.h"
#include "planner/make_plan.h"
#include "random_steps.h"

// Rows that homes write straight into a server's memory have to be those that its tasks read, each
// in its place; and what servers return has to be what homes look for, each in its place.
namespace distca::planner {
namespace {

using Place = std::pair<int64_t, int64_t>;  // document, position
using Rows = std::map<int64_t, Place>;

struct BothRows {
  Rows queries, keys;
};

void put(int64_t row, const Place& place, Rows& rows) {
  EXPECT_TRUE(rows.emplace(row, place).second) << "row " << row << " is written twice";
}

// What lies in rows `from_row` of the places comes to their rows `to_row`.
void carry(const std::vector<RowPlace>& places, int64_t RowPlace::*from_row, const Rows& from,
           int64_t RowPlace::*to_row, Rows& to) {
  for (const RowPlace& place : places) {
    for (int64_t i = 0; i < place.num_rows; ++i) {
      put(place.*to_row + i, from.at(place.*from_row + i), to);
    }
  }
}

// What every rank is home to, by home row.
std::vector<BothRows> home_rows(const Homes& homes, int64_t num_ranks) {
  std::vector<BothRows> ranks(num_ranks);
  for (size_t document = 0; document < homes.size(); ++document) {
    for (size_t position = 0; position < homes[document].size(); ++position) {
      const HomeRow& home = homes[document][position];
      ranks[home.rank].keys[home.row] = {document, position};
      if (home.q_row >= 0) ranks[home.rank].queries[home.q_row] = {document, position};
    }
  }
  return ranks;
}

// What lies in each server's visiting rows once all ranks have sent.
std::vector<BothRows> deliver_all(const std::vector<Movement>& all,
                                  const std::vector<BothRows>& homes) {
  std::vector<BothRows> servers(all.size());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const Delivery& delivery : all[rank].sent) {
      BothRows& server = servers[delivery.peer];
      carry(delivery.queries, &RowPlace::home_row, homes[rank].queries, &RowPlace::visiting_row,
            server.queries);
      carry(delivery.keys, &RowPlace::home_row, homes[rank].keys, &RowPlace::visiting_row,
            server.keys);
    }
  }
  return servers;
}

// What lies in each home's returned rows once all servers have returned results.
std::vector<BothRows> return_all(const std::vector<Movement>& all,
                                 const std::vector<BothRows>& servers) {
  std::vector<BothRows> homes(all.size());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    int64_t last_home = 0;
    for (const Delivery& returned : all[rank].received) {
      EXPECT_NE(returned.peer, static_cast<int64_t>(rank)) << "own results stay where they are";
      EXPECT_GE(returned.peer, std::exchange(last_home, returned.peer));
      BothRows& home = homes[returned.peer];
      carry(returned.queries, &RowPlace::visiting_row, servers[rank].queries, &RowPlace::result_row,
            home.queries);
      carry(returned.keys, &RowPlace::visiting_row, servers[rank].keys, &RowPlace::result_row,
            home.keys);
    }
  }
  return homes;
}

// Every home finds results of what it sent; returns how many rows others returned to it.
std::pair<int64_t, int64_t> expect_results(const Movement& movement, int64_t rank,
                                           const BothRows& home, const BothRows& visiting,
                                           const BothRows& returned) {
  int64_t num_queries = 0, num_keys = 0;
  for (const Delivery& delivery : movement.sent) {
    const bool is_own = delivery.peer == rank;
    const auto look = [is_own](const std::vector<RowPlace>& places, const Rows& sent,
                               const Rows& own, const Rows& others, int64_t& count) {
      for (const RowPlace& place : places) {
        for (int64_t i = 0; i < place.num_rows; ++i) {
          EXPECT_EQ((is_own ? own : others).at(place.result_row + i), sent.at(place.home_row + i));
        }
        if (!is_own) count += place.num_rows;
      }
    };
    look(delivery.queries, home.queries, visiting.queries, returned.queries, num_queries);
    look(delivery.keys, home.keys, visiting.keys, returned.keys, num_keys);
  }
  return {num_queries, num_keys};
}

void expect_rows(const Rows& received, const std::vector<Token>& expected) {
  ASSERT_EQ(received.size(), expected.size());
  for (size_t row = 0; row < expected.size(); ++row) {
    EXPECT_EQ(received.at(row), Place(expected[row].document, expected[row].position));
  }
}

void check(const Pack& pack, const Plan& plan) {
  const Homes homes = homes_of(pack);
  const std::vector<BothRows> held = home_rows(homes, plan.num_ranks);
  std::vector<Movement> all;
  for (int64_t rank = 0; rank < plan.num_ranks; ++rank) {
    all.push_back(movement_of(pack, plan, rank));
  }
  const std::vector<BothRows> visiting = deliver_all(all, held);
  const std::vector<BothRows> returned = return_all(all, visiting);
  const std::vector<ServerRows> expected = server_rows(pack, plan, homes);
  Movement most;
  for (int64_t rank = 0; rank < plan.num_ranks; ++rank) {
    expect_rows(visiting[rank].queries, expected[rank].queries);
    expect_rows(visiting[rank].keys, expected[rank].keys);
    most.max_visiting_q = std::max<int64_t>(most.max_visiting_q, visiting[rank].queries.size());
    most.max_visiting_k = std::max<int64_t>(most.max_visiting_k, visiting[rank].keys.size());
    const auto [num_queries, num_keys] =
        expect_results(all[rank], rank, held[rank], visiting[rank], returned[rank]);
    EXPECT_EQ(num_queries, static_cast<int64_t>(returned[rank].queries.size()));
    EXPECT_EQ(num_keys, static_cast<int64_t>(returned[rank].keys.size()));
    most.max_returned_q = std::max(most.max_returned_q, num_queries);
    most.max_returned_k = std::max(most.max_returned_k, num_keys);
  }
  for (const Movement& movement : all) {
    EXPECT_EQ(movement.max_visiting_q, most.max_visiting_q);
    EXPECT_EQ(movement.max_visiting_k, most.max_visiting_k);
    EXPECT_EQ(movement.max_returned_q, most.max_returned_q);
    EXPECT_EQ(movement.max_returned_k, most.max_returned_k);
  }
}

TEST(Movement, BringEveryRowAndItsResultsToTheirPlaces) {
  Random random(11);
  for (int i = 0; i < 150 && !::testing::Test::HasFailure(); ++i) {
    const int64_t num_ranks = draw(random, 1, 6);
    const Pack pack = make_pack(draw_pieces(random, num_ranks, 400), num_ranks);
    PlanOptions options = draw_options(random);
    options.tolerance = 0;
    check(pack, make_plan(pack, options));
  }
}

// (server, result row) of each result of a key that a rank sends, in order.
std::vector<std::pair<int64_t, int64_t>> key_results(const Movement& movement) {
  std::vector<std::pair<int64_t, int64_t>> results;
  for (const Delivery& delivery : movement.sent) {
    for (const RowPlace& place : delivery.keys) {
      for (int64_t i = 0; i < place.num_rows; ++i) {
        results.push_back({delivery.peer, place.result_row + i});
      }
    }
  }
  return results;
}

// Puts a part's results in their places among all results. Returns its number of deliveries.
size_t take(const Part& part, int64_t first_rank,
            std::vector<std::pair<int64_t, int64_t>>& results) {
  for (const KeyGradients& rows : part.key_results) {
    EXPECT_EQ(rows.sources.size(), 1u);
    const auto [server, result_row] = rows.sources[0];
    for (int64_t i = 0; i < rows.num_rows; ++i) {
      EXPECT_EQ(results.at(rows.home_row + i).first, -1) << "a result is of both parts";
      results[rows.home_row + i] = {first_rank + server, result_row + i};
    }
  }
  return part.movement.sent.size() + part.movement.received.size();
}

TEST(Movement, PartsByNodeMakeTheWhole) {
  Random random(12);
  size_t num_inside = 0, num_between = 0;
  for (int i = 0; i < 60; ++i) {
    const int64_t num_ranks = draw(random, 2, 7), ranks_per_node = draw(random, 1, num_ranks);
    const Pack pack = make_pack(draw_pieces(random, num_ranks, 400), num_ranks);
    const Plan plan = make_plan(pack, draw_options(random));
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const Movement whole = movement_of(pack, plan, rank);
      const Range node = node_of(rank, num_ranks, ranks_per_node);
      ASSERT_TRUE(node.begin <= rank && rank < node.end && node.end <= num_ranks);
      const Part inside = part_of(whole, node, Reach::kInside),
                 between = part_of(whole, node, Reach::kBetween);
      std::vector<std::pair<int64_t, int64_t>> results(key_results(whole).size(), {-1, -1});
      num_inside += take(inside, node.begin, results);
      num_between += take(between, 0, results);
      EXPECT_EQ(results, key_results(whole));
      for (const Delivery& delivery : inside.movement.received) {
        EXPECT_TRUE(0 <= delivery.peer && delivery.peer < num_rows(node));
      }
      for (const Delivery& delivery : between.movement.received) {
        EXPECT_TRUE(delivery.peer < node.begin || node.end <= delivery.peer);
      }
    }
  }
  EXPECT_GT(num_inside, 50u);
  EXPECT_GT(num_between, 50u);
}

}  // namespace
}  // namespace distca::planner
