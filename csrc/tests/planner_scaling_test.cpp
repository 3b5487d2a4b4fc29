#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <map>
#include <vector>

#include "planner/layout/layout.h"
#include "planner/make_plan.h"
#include "planner/model/plan.h"
#include "random_steps.h"

// How planning grows with the number of documents: the whole of a step's work on one rank.
namespace distca::planner {
namespace {

constexpr int64_t kNumRanks = 8;
constexpr double kMostGrowth = 2.5;   // of the time for twice as many documents
constexpr double kMostSeconds = 1.0;  // for 100,000 of them; about 0.1 where nothing else runs
constexpr int kMostTries = 20;

using Family = std::vector<Piece> (*)(int64_t num_documents);

std::vector<Piece> on_one_rank(int64_t num_documents) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < num_documents; ++i) pieces.push_back({0, i, 0, 1});
  return pieces;
}

// As many tokens on each rank.
std::vector<Piece> shorter_on_one_rank(int64_t num_documents) {
  const int64_t num_longer = num_documents / (kNumRanks + 1);
  std::vector<Piece> pieces;
  for (int64_t rank = 0; rank < kNumRanks; ++rank) {
    for (int64_t i = 0; i < (rank == 0 ? 2 : 1) * num_longer; ++i) {
      pieces.push_back({rank, static_cast<int64_t>(pieces.size()), 0, rank == 0 ? 64 : 128});
    }
  }
  return pieces;
}

std::vector<Piece> one_long(int64_t num_documents) {
  std::vector<Piece> pieces = {{0, 0, 0, 131072}};
  for (int64_t i = 1; i < num_documents; ++i) pieces.push_back({i % kNumRanks, i, 0, 16});
  return pieces;
}

std::vector<Piece> sorted_over_ranks(int64_t num_documents) {
  Random random(0);
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < num_documents; ++i) {
    lengths.push_back(draw(random, 1, draw(random, 1, draw(random, 1, 2000))));
  }
  std::sort(lengths.begin(), lengths.end());
  return placed_whole(lengths, [&](int64_t i) { return i * kNumRanks / num_documents; });
}

// Every document on two ranks.
std::vector<Piece> cut_in_two(int64_t num_documents) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < num_documents; ++i) {
    const int64_t rank = i % 3 == 0 ? 0 : i % (kNumRanks - 1);
    pieces.push_back({rank, i, 0, 8});
    pieces.push_back({rank + 1, i, 8, 8});
  }
  return pieces;
}

// One document, dealt out in as many pieces.
std::vector<Piece> in_pieces(int64_t num_pieces) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < num_pieces; ++i) {
    pieces.push_back({i % 3 == 0 ? 0 : i % kNumRanks, 0, 16 * i, 16});
  }
  return pieces;
}

PlanOptions causal_options() {
  PlanOptions options;
  options.cost.seconds_per_tile = 1.2e-6;
  options.row_bytes = {41216, 16384};
  options.held_bytes = {16512, 4096};
  return options;
}

// A plan, its checks and the layout of one rank. Of this process's own time, so that others do not
// count.
double seconds_of_step(const Pack& pack, const PlanOptions& options, double round_bytes) {
  const std::clock_t start = std::clock();
  const Plan plan = plan_for_rounds(pack, options, 1);
  validate(plan, pack);
  for (const Plan& round : rounds_of(pack, plan, options.held_bytes, round_bytes)) {
    make_layout(pack, round, 0);
  }
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

// The least of its times so far for each size. Other work on the machine takes caches and memory
// bandwidth for seconds at a time, so bounds are tried anew; what grows too fast fails each time.
class Times {
 public:
  Times(Family family, const PlanOptions& options, double round_bytes)
      : family_(family), options_(options), round_bytes_(round_bytes) {}

  double of(int64_t num_documents) {
    const Pack pack = make_pack(family_(num_documents), kNumRanks);
    double& best = best_.try_emplace(num_documents, 1e9).first->second;
    best = std::min(best, seconds_of_step(pack, options_, round_bytes_));
    return best;
  }

 private:
  Family family_;
  const PlanOptions& options_;
  double round_bytes_;
  std::map<int64_t, double> best_;
};

bool holds_in_time(const std::function<bool()>& bound) {
  for (int i = 0; i < kMostTries; ++i) {
    if (bound()) return true;
  }
  return false;
}

void check_growth(Family family, const PlanOptions& options, double round_bytes = 1e19) {
  Times times(family, options, round_bytes);
  // Few first, so that what grows faster is found before it takes hours.
  ASSERT_TRUE(holds_in_time([&] { return times.of(600) < 0.3; })) << times.of(600);
  ASSERT_TRUE(holds_in_time([&] {
    const double once = std::max(times.of(20000), 0.005);
    return times.of(40000) < kMostGrowth * once;
  })) << times.of(40000)
      << " s for 40,000 documents, " << times.of(20000) << " s for half as many";
  ASSERT_TRUE(holds_in_time([&] { return times.of(100000) < kMostSeconds; })) << times.of(100000);
}

TEST(Scaling, OneTokenDocumentsOnOneRank) {
  check_growth(on_one_rank, causal_options());
}

TEST(Scaling, DocumentsHalfAsLongOnOneRank) {
  check_growth(shorter_on_one_rank, causal_options());
  PlanOptions fast = causal_options();
  fast.links.bytes_per_second = 1e15;
  check_growth(shorter_on_one_rank, fast);
}

TEST(Scaling, OneLongDocument) {
  check_growth(one_long, causal_options());
}

TEST(Scaling, LengthsSortedOverRanks) {
  check_growth(sorted_over_ranks, causal_options());
}

TEST(Scaling, SlidingWindows) {
  PlanOptions options = causal_options();
  options.mask = {64, 0};
  check_growth(sorted_over_ranks, options);
}

TEST(Scaling, SlowLinksBetweenNodes) {
  PlanOptions options = causal_options();
  options.links = {2, 200e9, 50e9};
  check_growth(sorted_over_ranks, options);
}

TEST(Scaling, ServersThatComputeForOthers) {
  PlanOptions options = causal_options();
  options.servers.assign(kNumRanks, {0});
  options.servers[1].speed = options.servers[6].speed = 1;
  check_growth(sorted_over_ranks, options);
}

TEST(Scaling, InputsThatAreKept) {
  PlanOptions options = causal_options();
  options.kept_bytes = {8192, 4096};
  options.kept_cap_bytes = 1e18;
  check_growth(on_one_rank, options);
}

TEST(Scaling, ManyRounds) {
  check_growth(on_one_rank, causal_options(), 2e6);
}

TEST(Scaling, DocumentsCutInTwo) {
  check_growth(cut_in_two, causal_options());
}

// No more than the budget, which grows less than the pieces do.
TEST(Scaling, OneDocumentInPieces) {
  const Pack pack = make_pack(in_pieces(10000), kNumRanks);
  EXPECT_TRUE(holds_in_time(
      [&] { return seconds_of_step(pack, causal_options(), 1e19) < 4 * kMostSeconds; }));
  EXPECT_EQ(make_plan(pack, causal_options()).digest, make_plan(pack, causal_options()).digest);
}

TEST(Scaling, ManyShortDocumentsAreBalanced) {
  PlanOptions fast = causal_options();
  fast.links.bytes_per_second = 1e15;
  for (const int64_t num_documents : {700, 20000, 100000}) {
    const Pack pack = make_pack(on_one_rank(num_documents), kNumRanks);
    EXPECT_LT(imbalance(make_plan(pack, fast)), 1.006) << num_documents;
  }
}

}  // namespace
}  // namespace distca::planner
