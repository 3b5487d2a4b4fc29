#include <gtest/gtest.h>

#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "layout_properties.h"
#include "planner/layout/layout.h"
#include "planner/make_plan.h"
#include "random_steps.h"

namespace distca::planner {
namespace {

using Place = std::pair<int64_t, int64_t>;           // document, position
using Pair = std::tuple<int64_t, int64_t, int64_t>;  // document, query, key
using Places = std::vector<Place>;

// Each rank's rows, filled with the tokens that live there.
std::vector<Places> home_rows(const Pack& pack) {
  std::vector<Places> rows(pack.num_ranks);
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) rows[rank].resize(pack.num_rows[rank]);
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    for (const Segment& segment : pack.segments_of(pack.documents[i])) {
      for (int64_t at = 0; at < segment.length; ++at) {
        rows[segment.rank][segment.row + at] = {static_cast<int64_t>(i), segment.start + at};
      }
    }
  }
  return rows;
}

// The same without context.
std::vector<Places> home_queries(const Pack& pack) {
  std::vector<Places> rows = home_rows(pack);
  for (Places& of_rank : rows) {
    std::erase_if(of_rank, [&](const auto& row) {
      return row.second < pack.documents[row.first].first_query;
    });
  }
  return rows;
}

struct Tables {
  std::vector<int64_t> SlotLayout::*send_rows;
  std::vector<int64_t> SlotLayout::*recv_rows;
  std::vector<Run> SlotLayout::*index;
  std::vector<Run> SlotLayout::*visiting_row;
};

const Tables kQueryTables = {&SlotLayout::send_q_rows, &SlotLayout::recv_q_rows,
                             &SlotLayout::send_q_runs, &SlotLayout::recv_q_runs};
const Tables kKeyTables = {&SlotLayout::send_k_rows, &SlotLayout::recv_k_rows,
                           &SlotLayout::send_k_runs, &SlotLayout::recv_k_runs};

// Sends rows as the tables say; returns every rank's visiting rows.
std::vector<Places> exchange(const std::vector<SlotLayout>& layouts,
                             const std::vector<Places>& home, const Tables& tables) {
  std::vector<Places> slots(layouts.size());
  std::vector<std::vector<int64_t>> indices;
  for (const SlotLayout& layout : layouts) indices.push_back(rows_of(layout.*tables.index));
  std::vector<size_t> sent(layouts.size(), 0);
  for (size_t server = 0; server < layouts.size(); ++server) {
    for (size_t peer = 0; peer < layouts.size(); ++peer) {
      const std::vector<int64_t>& index = indices[peer];
      const int64_t count = (layouts[peer].*tables.send_rows)[server];
      EXPECT_EQ(count, (layouts[server].*tables.recv_rows)[peer]);
      for (int64_t i = 0; i < count; ++i) {
        slots[server].push_back(home[peer].at(index.at(sent[peer]++)));
      }
    }
  }
  std::vector<Places> visiting(layouts.size());
  for (size_t rank = 0; rank < layouts.size(); ++rank) {
    EXPECT_EQ(sent[rank], indices[rank].size());
    const std::vector<int64_t> row = rows_of(layouts[rank].*tables.visiting_row);
    visiting[rank] = slots[rank];
    if (row.empty()) continue;
    EXPECT_EQ(row.size(), slots[rank].size());
    bool identity = true;
    for (size_t i = 0; i < row.size(); ++i) {
      visiting[rank].at(row[i]) = slots[rank][i];
      identity = identity && row[i] == static_cast<int64_t>(i);
    }
    EXPECT_FALSE(identity) << "an identity is left empty";
  }
  return visiting;
}

// Adds the pairs that a kernel scores for the task, which knows rows and key indices only.
void compute(const PlacedTask& task, const Mask& mask, const Places& q_rows, const Places& k_rows,
             std::map<Pair, int64_t>& computed) {
  for (int64_t i = 0; i < task.num_q_rows; ++i) {
    const auto [document, query] = q_rows.at(task.q_row + i);
    for (int64_t j = 0; j < task.num_k_rows; ++j) {
      if (!sees(mask, task.q_offset + i, j)) continue;
      const auto [key_document, key] = k_rows.at(task.k_row + j);
      EXPECT_EQ(key_document, document);
      ++computed[{document, query, key}];
    }
  }
}

std::map<Pair, int64_t> execute(const Pack& pack, const Plan& plan,
                                const std::vector<SlotLayout>& layouts) {
  const std::vector<Places> home = home_rows(pack), own_queries = home_queries(pack);
  const std::vector<Places> queries = exchange(layouts, own_queries, kQueryTables);
  const std::vector<Places> keys = exchange(layouts, home, kKeyTables);
  std::map<Pair, int64_t> computed;
  for (size_t rank = 0; rank < layouts.size(); ++rank) {
    for (const PlacedTask& task : home_tasks(layouts[rank])) {
      compute(task, plan.mask, own_queries[rank], home[rank], computed);
    }
    for (const PlacedTask& task : layouts[rank].visiting_tasks) {
      compute(task, plan.mask, queries[rank], keys[rank], computed);
    }
  }
  return computed;
}

std::map<Pair, int64_t> expected_pairs(const Pack& pack, const Mask& mask) {
  std::map<Pair, int64_t> pairs;
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    for (int64_t query = pack.documents[i].first_query; query < pack.documents[i].length; ++query) {
      for (int64_t key = 0; key < pack.documents[i].length; ++key) {
        if (sees(mask, query, key)) pairs[{static_cast<int64_t>(i), query, key}] = 1;
      }
    }
  }
  return pairs;
}

// Every row once, by (document, position): each document's keys reach a server once.
void expect_ordered(const Places& rows) {
  for (size_t i = 1; i < rows.size(); ++i) ASSERT_LT(rows[i - 1], rows[i]);
}

TEST(Layout, ComputesEveryPairOnce) {
  int64_t num_visiting = 0, num_home = 0, num_permuted = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const int64_t num_ranks = draw(random, 1, 6);
    const Pack pack = make_pack(draw_pieces(random, num_ranks, 60), num_ranks);
    const Plan plan = make_plan(pack, draw_options(random));
    validate(plan, pack);
    const std::vector<SlotLayout> layouts = make_layouts(pack, plan);
    ASSERT_EQ(execute(pack, plan, layouts), expected_pairs(pack, plan.mask));
    for (const SlotLayout& layout : layouts) {
      num_home += static_cast<int64_t>(home_tasks(layout).size());
      num_visiting += static_cast<int64_t>(layout.visiting_tasks.size());
      num_permuted += !layout.recv_q_runs.empty() + !layout.recv_k_runs.empty();
    }
  }
  EXPECT_GT(num_home, 500);  // the steps drawn reach all branches
  EXPECT_GT(num_visiting, 500);
  EXPECT_GT(num_permuted, 100);
}

TEST(Layout, AWrongRowIsNoticed) {
  const std::vector<Piece> pieces = {{0, 0, 0, 40}, {1, 0, 40, 40}};
  const Pack pack = make_pack(pieces, 2);
  const Plan plan = make_plan(pack, PlanOptions{});
  std::vector<SlotLayout> layouts = make_layouts(pack, plan);
  ASSERT_EQ(execute(pack, plan, layouts), expected_pairs(pack, plan.mask));
  const std::vector<SlotLayout> good = layouts;
  layouts[0].send_k_runs = {{0, 3}, {4, 1}, {4, 36}};
  EXPECT_NE(execute(pack, plan, layouts), expected_pairs(pack, plan.mask));
  layouts = good;
  layouts[1].send_q_runs = {{1, 1}, {0, 1}, {2, 38}};
  EXPECT_NE(execute(pack, plan, layouts), expected_pairs(pack, plan.mask));
  layouts = good;
  layouts[1].visiting_tasks[0].q_offset -= 1;
  EXPECT_NE(execute(pack, plan, layouts), expected_pairs(pack, plan.mask));
}

TEST(Layout, VisitingRowsAreOrderedAndUnique) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const Pack pack = make_pack(draw_pieces(random, 4, 60), 4);
    const Plan plan = make_plan(pack, draw_options(random));
    const std::vector<SlotLayout> layouts = make_layouts(pack, plan);
    const std::vector<Places> home = home_rows(pack), own_queries = home_queries(pack);
    for (const Places& rows : exchange(layouts, own_queries, kQueryTables)) expect_ordered(rows);
    for (const Places& rows : exchange(layouts, home, kKeyTables)) expect_ordered(rows);
  }
}

// Rows written straight to their place come from where rows in slots come from.
TEST(Layout, DeliveriesBringTheVisitingRows) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const Pack pack = make_pack(draw_pieces(random, 4, 60), 4);
    const Plan plan = make_plan(pack, draw_options(random));
    const std::vector<SlotLayout> layouts = make_layouts(pack, plan);
    const std::vector<Places> home = home_rows(pack), own_queries = home_queries(pack);
    const std::vector<Places> queries = exchange(layouts, own_queries, kQueryTables);
    const std::vector<Places> keys = exchange(layouts, home, kKeyTables);
    std::vector<size_t> num_brought(4, 0);
    for (int64_t rank = 0; rank < 4; ++rank) {
      for (const Delivery& delivery : movement_of(pack, plan, rank).sent) {
        const auto bring = [&](const std::vector<RowPlace>& places, const Places& from,
                               const Places& to) {
          for (const auto& [home_row, visiting_row, result_row, num_rows] : places) {
            num_brought[delivery.peer] += static_cast<size_t>(num_rows);
            for (int64_t i = 0; i < num_rows; ++i) {
              ASSERT_EQ(from.at(home_row + i), to.at(visiting_row + i));
            }
          }
        };
        bring(delivery.queries, own_queries[rank], queries[delivery.peer]);
        bring(delivery.keys, home[rank], keys[delivery.peer]);
      }
    }
    for (size_t server = 0; server < 4; ++server) {
      EXPECT_EQ(num_brought[server], queries[server].size() + keys[server].size());
    }
  }
}

TEST(Layout, LoadsAreTheRowsThatTravel) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const Pack pack = make_pack(draw_pieces(random, 5, 60), 5);
    const PlanOptions options = draw_options(random);
    const Plan plan = make_plan(pack, options);
    for (const SlotLayout& layout : make_layouts(pack, plan)) {
      const RowBytes &all = options.row_bytes, &inputs = options.kept_bytes;
      const RowBytes once{all.query - inputs.query, all.key - inputs.key};
      const transport::Slots& again = layout.keeping ? layout.keeping->again : layout;
      int64_t bytes_in = 0, bytes_out = 0;
      for (int64_t peer = 0; peer < 5; ++peer) {
        if (peer == layout.rank) continue;
        bytes_in += layout.recv_q_rows[peer] * once.query + layout.recv_k_rows[peer] * once.key +
                    again.recv_q_rows[peer] * inputs.query + again.recv_k_rows[peer] * inputs.key;
        bytes_out += layout.send_q_rows[peer] * once.query + layout.send_k_rows[peer] * once.key +
                     again.send_q_rows[peer] * inputs.query + again.send_k_rows[peer] * inputs.key;
      }
      EXPECT_EQ(plan.loads[layout.rank].bytes_in, bytes_in);
      EXPECT_EQ(plan.loads[layout.rank].bytes_out, bytes_out);
    }
  }
}

TEST(Layout, WholeDocumentsInBalanceAreReadInPlace) {
  const std::vector<Piece> pieces = {{0, 0, 0, 300}, {0, 1, 0, 70}, {1, 2, 0, 70}, {1, 3, 0, 300}};
  const Pack pack = make_pack(pieces, 2);
  const Plan plan = make_plan(pack, PlanOptions{});
  const SlotLayout layout = slot_layout(pack, plan, 1);
  EXPECT_EQ(layout.num_home_rows, 370);
  ASSERT_EQ(layout.early_tasks.size(), 2u);
  EXPECT_EQ(layout.early_tasks[1].q_row, 70);
  EXPECT_EQ(layout.early_tasks[1].num_q_rows, 300);
  EXPECT_EQ(layout.early_tasks[1].k_row, 70);
  EXPECT_EQ(layout.early_tasks[1].num_k_rows, 300);
  EXPECT_EQ(layout.early_tasks[1].q_offset, 0);
  EXPECT_TRUE(layout.late_tasks.empty());
  EXPECT_TRUE(layout.visiting_tasks.empty());
  EXPECT_TRUE(layout.send_q_runs.empty());
  EXPECT_TRUE(layout.send_k_runs.empty());
}

TEST(Layout, LateTasksAreHalfOfTheWorkAtHome) {
  const std::vector<Piece> pieces = {{0, 0, 0, 4096}, {1, 1, 0, 300}, {1, 2, 0, 500},
                                     {1, 3, 0, 400},  {1, 4, 0, 400}, {1, 5, 0, 400}};
  const Pack pack = make_pack(pieces, 2);
  Plan plan{2, {}, {{0, 0, 3000, 0}, {0, 3000, 4096, 1}}, {}, 0};
  for (int64_t document = 1; document < 6; ++document) {
    plan.tasks.push_back({document, 0, pack.documents[document].length, 1});
  }
  const SlotLayout layout = slot_layout(pack, plan, 1);
  // Pairs of a document grow with the square of its length: 9 + 25 of 34 + 48, then 50 of 82.
  EXPECT_EQ(layout.early_tasks.size(), 2u);
  ASSERT_EQ(layout.late_tasks.size(), 3u);
  EXPECT_EQ(layout.late_tasks[0].q_row, 800);
  EXPECT_EQ(layout.late_tasks[0].k_row, 800);
}

TEST(Layout, EarlyTasksAreAsLargeAsAPartOfTheRows) {
  std::vector<Piece> pieces = {{0, 0, 0, 4096}};
  Plan plan{2, {}, {{0, 0, 3000, 0}, {0, 3000, 4096, 1}}, {}, 0};
  for (int64_t document = 1; document <= 8; ++document) {
    pieces.push_back({1, document, 0, 400});
    plan.tasks.push_back({document, 0, 400, 1});
  }
  const Pack pack = make_pack(pieces, 2);
  for (const auto& [part, num_early] :
       {std::pair{0.5, 4u}, {0.25, 2u}, {0.9, 7u}, {0.0, 0u}, {1.0, 8u}}) {
    const Layout layout = make_layout(pack, plan, 1, Results::kTaken, part);
    EXPECT_EQ(layout.early_tasks.size(), num_early) << part;
    EXPECT_EQ(layout.late_tasks.size(), 8 - num_early) << part;
  }
}

TEST(Layout, TasksOfADocumentAreNotCut) {
  const std::vector<Piece> pieces = {{0, 0, 0, 4096}, {1, 1, 0, 3000}};
  const Pack pack = make_pack(pieces, 2);
  const Plan plan{2, {}, {{0, 0, 3000, 0}, {0, 3000, 4096, 1}, {1, 0, 3000, 1}}, {}, 0};
  for (const double part : {0.5, 0.25}) {
    const Layout layout = make_layout(pack, plan, 1, Results::kTaken, part);
    EXPECT_EQ(layout.early_tasks.size(), part == 0.5 ? 1u : 0u);
    EXPECT_EQ(layout.late_tasks.size(), part == 0.5 ? 0u : 1u);
  }
}

TEST(Layout, HomeTasksOfARankThatOnlySendsAreLateIfItTakesResults) {
  const std::vector<Piece> pieces = {
      {0, 0, 0, 4096}, {0, 1, 0, 2000}, {0, 2, 0, 2000}, {1, 3, 0, 400}, {1, 4, 0, 400}};
  const Pack pack = make_pack(pieces, 2);
  const Plan plan{2,
                  {},
                  {{0, 0, 3000, 0},
                   {1, 0, 2000, 0},
                   {2, 0, 2000, 0},
                   {0, 3000, 4096, 1},
                   {3, 0, 400, 1},
                   {4, 0, 400, 1}},
                  {},
                  0};
  EXPECT_TRUE(make_layout(pack, plan, 0, Results::kTaken).early_tasks.empty());
  EXPECT_TRUE(make_layout(pack, plan, 0, Results::kWritten).late_tasks.empty());
  for (const Results results : {Results::kTaken, Results::kWritten}) {
    EXPECT_FALSE(make_layout(pack, plan, 1, results).late_tasks.empty());
  }
}

TEST(Layout, WindowedTaskStartsAtItsFirstKey) {
  PlanOptions options;
  options.mask = {10, 0};
  const std::vector<Piece> pieces = {{0, 0, 0, 100}, {1, 0, 100, 100}};
  const Pack pack = make_pack(pieces, 2);
  const Plan plan = make_plan(pack, options);
  const SlotLayout layout = slot_layout(pack, plan, 1);
  ASSERT_EQ(layout.visiting_tasks.size(), 1u);
  EXPECT_EQ(layout.visiting_tasks[0].num_q_rows, 100);
  EXPECT_EQ(layout.visiting_tasks[0].num_k_rows, 110);
  EXPECT_EQ(layout.visiting_tasks[0].q_offset, 10);
  EXPECT_EQ(layout.recv_k_rows, (std::vector<int64_t>{10, 100}));
  EXPECT_EQ(layout.recv_q_rows, (std::vector<int64_t>{0, 100}));
  EXPECT_TRUE(layout.recv_k_runs.empty());
}

TEST(Layout, RejectsABadRank) {
  const Pack pack = make_pack({}, 2);
  const Plan plan = make_plan(pack, PlanOptions{});
  EXPECT_REJECTED(make_layout(pack, plan, 2), "rank is 2");
  EXPECT_REJECTED(make_layout(pack, plan, -1), "rank is -1");
}

}  // namespace
}  // namespace distca::planner
