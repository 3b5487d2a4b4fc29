#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "layout_properties.h"
#include "planner/deliveries.h"
#include "random_steps.h"

// Rows that homes write straight into a server's memory have to be those that its tasks read, each
// in its place, under flags that its tasks wait for.
namespace distca::planner {
namespace {

using Place = std::pair<int64_t, int64_t>;  // document, position

// What lies in a server's visiting rows once all ranks have sent.
struct Received {
  std::map<int64_t, Place> queries, keys;  // by visiting row
  std::map<int64_t, int64_t> query_flag, key_flag;
  std::set<int64_t> flags;
};

void deliver(const std::vector<RowPlace>& places, int64_t flag,
             const std::map<int64_t, Place>& home_rows, std::map<int64_t, Place>& received,
             std::map<int64_t, int64_t>& flags) {
  for (const auto& [home_row, visiting_row, count] : places) {
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_TRUE(received.emplace(visiting_row + i, home_rows.at(home_row + i)).second)
          << "visiting row " << visiting_row + i << " is written twice";
      flags[visiting_row + i] = flag;
    }
  }
}

std::vector<Received> deliver_all(const Pack& pack, const Plan& plan, const Homes& homes) {
  std::vector<Received> servers(plan.num_ranks);
  for (int64_t rank = 0; rank < plan.num_ranks; ++rank) {
    std::map<int64_t, Place> home_queries, home_keys;  // by home row
    for (size_t document = 0; document < homes.size(); ++document) {
      for (size_t position = 0; position < homes[document].size(); ++position) {
        const Home& home = homes[document][position];
        if (home.rank != rank) continue;
        home_keys[home.row] = {document, position};
        if (home.q_row >= 0) home_queries[home.q_row] = {document, position};
      }
    }
    for (const Delivery& delivery : make_deliveries(pack, plan, rank).sent) {
      Received& server = servers[delivery.server];
      EXPECT_TRUE(server.flags.insert(delivery.flag).second) << "flag raised twice";
      deliver(delivery.queries, delivery.flag, home_queries, server.queries, server.query_flag);
      deliver(delivery.keys, delivery.flag, home_keys, server.keys, server.key_flag);
    }
  }
  return servers;
}

void expect_rows(const std::map<int64_t, Place>& received, const std::vector<Token>& expected) {
  ASSERT_EQ(received.size(), expected.size());
  for (size_t row = 0; row < expected.size(); ++row) {
    EXPECT_EQ(received.at(row), Place(expected[row].document, expected[row].position));
  }
}

void expect_flags(const PlacedTask& task, const Received& server) {
  const auto waits_for = [&task](int64_t flag) {
    return task.first_flag <= flag && flag < task.last_flag;
  };
  for (int64_t i = 0; i < task.num_q_rows; ++i) {
    EXPECT_TRUE(waits_for(server.query_flag.at(task.q_row + i)));
  }
  for (int64_t i = 0; i < task.num_k_rows; ++i) {
    EXPECT_TRUE(waits_for(server.key_flag.at(task.k_row + i)));
  }
  for (int64_t flag = task.first_flag; flag < task.last_flag; ++flag) {
    EXPECT_TRUE(server.flags.contains(flag)) << "flag " << flag << " is never raised";
  }
}

void check(const Pack& pack, const Plan& plan) {
  const Homes homes = homes_of(pack);
  const std::vector<Received> received = deliver_all(pack, plan, homes);
  const std::vector<ServerRows> expected = server_rows(pack, plan, homes);
  int64_t most_queries = 0, most_keys = 0;
  for (int64_t rank = 0; rank < plan.num_ranks; ++rank) {
    expect_rows(received[rank].queries, expected[rank].queries);
    expect_rows(received[rank].keys, expected[rank].keys);
    for (const PlacedTask& task : make_layout(pack, plan, rank).visiting_tasks) {
      expect_flags(task, received[rank]);
    }
    most_queries = std::max<int64_t>(most_queries, expected[rank].queries.size());
    most_keys = std::max<int64_t>(most_keys, expected[rank].keys.size());
  }
  const Deliveries deliveries = make_deliveries(pack, plan, 0);
  EXPECT_EQ(deliveries.max_visiting_q, most_queries);
  EXPECT_EQ(deliveries.max_visiting_k, most_keys);
  for (const Received& server : received) {
    for (const int64_t flag : server.flags) EXPECT_LT(flag, deliveries.max_flags);
  }
}

TEST(Deliveries, BringEveryRowToItsPlaceUnderItsFlag) {
  Random random(11);
  for (int i = 0; i < 150 && !::testing::Test::HasFailure(); ++i) {
    const int64_t num_ranks = draw(random, 1, 6);
    const Pack pack = make_pack(draw_pieces(random, num_ranks, 400), num_ranks);
    PlanOptions options = draw_options(random);
    options.tolerance = 0;
    check(pack, make_plan(pack, options));
  }
}

}  // namespace
}  // namespace distca::planner
