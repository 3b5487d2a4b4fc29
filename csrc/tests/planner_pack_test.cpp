#include <gtest/gtest.h>

#include <span>
#include <stdexcept>
#include <string>

#include "planner/model/pack.h"
#include "planner/model/ranges.h"
#include "random_steps.h"

namespace distca::planner {
namespace {

TEST(Pack, PlacesPiecesOnRows) {
  const std::vector<Piece> pieces = {{1, 7, 0, 5}, {0, 3, 0, 4}, {0, 9, 2, 6}, {1, 9, 0, 2}};
  const Pack pack = make_pack(pieces, 3);
  EXPECT_EQ(pack.num_rows, (std::vector<int64_t>{10, 7, 0}));
  ASSERT_EQ(pack.documents.size(), 3u);
  EXPECT_EQ(pack.documents[0].id, 3);
  EXPECT_EQ(pack.documents[1].id, 7);
  EXPECT_EQ(pack.documents[2].id, 9);
  EXPECT_EQ(pack.documents[2].length, 8);
  const std::span<const Segment> segments = pack.segments_of(pack.documents[2]);
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[0].rank, 1);
  EXPECT_EQ(segments[0].row, 5);
  EXPECT_EQ(segments[1].start, 2);
  EXPECT_EQ(segments[1].rank, 0);
  EXPECT_EQ(segments[1].row, 4);
}

TEST(Pack, JoinsNeighboursAndIgnoresEmptyPieces) {
  const std::vector<Piece> pieces = {{0, 1, 0, 3}, {0, 5, 0, 0}, {0, 1, 3, 4}, {1, 1, 7, 1}};
  const Pack pack = make_pack(pieces, 2);
  ASSERT_EQ(pack.documents.size(), 1u);
  ASSERT_EQ(pack.documents[0].num_segments, 2);
  EXPECT_EQ(pack.segments[0].length, 7);
}

TEST(Pack, KeepsNeighboursApartWhenTheirRowsAre) {
  const std::vector<Piece> pieces = {{0, 1, 3, 4}, {0, 1, 0, 3}};
  const Pack pack = make_pack(pieces, 1);
  ASSERT_EQ(pack.documents[0].num_segments, 2);
  EXPECT_EQ(pack.segments[0].row, 4);
  EXPECT_EQ(pack.segments[1].row, 0);
}

TEST(Pack, LeavesContextOutOfTheRowsOfQueries) {
  const std::vector<Piece> pieces = {{0, 3, 0, 4}, {0, 7, 0, 6, 5}, {1, 7, 6, 2}, {0, 9, 0, 3, 1}};
  const Pack pack = make_pack(pieces, 2);
  EXPECT_EQ(pack.num_rows, (std::vector<int64_t>{13, 2}));
  EXPECT_EQ(pack.num_context_rows, (std::vector<int64_t>{6, 0}));
  ASSERT_EQ(pack.documents.size(), 3u);
  EXPECT_EQ(pack.documents[0].first_query, 0);
  EXPECT_EQ(pack.documents[1].first_query, 5);
  EXPECT_EQ(pack.documents[2].first_query, 1);
  const std::span<const Segment> segments = pack.segments_of(pack.documents[1]);
  EXPECT_EQ(segments[0].q_row + 5, 4);  // its only query there follows document 3's four
  EXPECT_EQ(segments[1].q_row, 0);
  const Segment& last = pack.segments_of(pack.documents[2])[0];
  EXPECT_EQ(last.row, 10);
  EXPECT_EQ(last.q_row + 1, 5);
}

TEST(Pack, HoldsContextInSeveralPieces) {
  const std::vector<Piece> pieces = {
      {0, 7, 0, 4, 4}, {0, 3, 0, 2}, {0, 7, 9, 2}, {1, 7, 4, 2, 2}, {1, 7, 6, 3, 1}};
  const Pack pack = make_pack(pieces, 2);
  EXPECT_EQ(pack.num_context_rows, (std::vector<int64_t>{4, 3}));
  ASSERT_EQ(pack.documents.size(), 2u);
  EXPECT_EQ(pack.documents[0].first_query, 7);
  const std::span<const Segment> segments = pack.segments_of(pack.documents[0]);
  ASSERT_EQ(segments.size(), 3u);
  EXPECT_EQ(num_rows(queries(segments[0], pack.documents[0])), 0);
  EXPECT_EQ(segments[1].length, 5);  // joined from two
  EXPECT_EQ(segments[1].q_row + 3, 0);
  EXPECT_EQ(queries(segments[1], pack.documents[0]).begin, 7);
  EXPECT_EQ(segments[2].q_row, 2);  // follows document 3's two
}

TEST(Pack, AcceptsNoTokensAtAll) {
  const Pack pack = make_pack({}, 4);
  EXPECT_EQ(pack.num_rows, std::vector<int64_t>(4, 0));
  EXPECT_TRUE(pack.documents.empty());
}

TEST(Pack, DoesNotDependOnHowRanksInterleave) {
  Random random(5);
  for (int step = 0; step < 50; ++step) {
    std::vector<Piece> pieces = shuffled_pieces(random, draw_lengths(random, 6, 40), 4);
    const Pack pack = make_pack(pieces, 4);
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.rank > b.rank; });
    EXPECT_EQ(digest_of(pack, {}, {}), digest_of(make_pack(pieces, 4), {}, {}));
  }
}

TEST(Pack, RejectsBadPieces) {
  const auto make = [](std::vector<Piece> pieces) { return make_pack(pieces, 2); };
  EXPECT_REJECTED(make({{2, 4, 0, 1}}), "document 4: rank is 2");
  EXPECT_REJECTED(make({{-1, 4, 0, 1}}), "document 4: rank is -1");
  EXPECT_REJECTED(make({{0, 4, -1, 1}}), "document 4: rank 0 holds start -1");
  EXPECT_REJECTED(make({{0, 4, 0, -3}}), "length -3");
  EXPECT_REJECTED(make({{0, 4, INT64_MAX, 2}}), "document 4");
  EXPECT_REJECTED(make({{0, 4, 0, 5}, {1, 4, 8, 2}}), "no rank holds positions [5, 8)");
  EXPECT_REJECTED(make({{1, 4, 3, 2}}), "no rank holds positions [0, 3)");
  EXPECT_REJECTED(make({{0, 4, 0, 5}, {1, 4, 4, 2}}),
                  "positions [4, 6) of rank 1 overlap positions [0, 5) of rank 0");
  EXPECT_REJECTED(make({{0, 4, 0, 5, -1}}), "rank 0 has -1 context rows in 5 from position 0");
  EXPECT_REJECTED(make({{0, 4, 0, 5, 6}}), "expected 0 to 5");
  EXPECT_REJECTED(make({{0, 4, 0, 5, 5}}), "document 4: all 5 tokens are context rows");
  EXPECT_REJECTED(make({{0, 4, 0, 5, 5}, {1, 4, 5, 2, 2}}), "all 7 tokens are context rows");
  EXPECT_REJECTED(make({{0, 4, 0, 5}, {1, 4, 5, 2, 1}}),
                  "positions [5, 7) of rank 1 have 1 context rows, but positions [0, 5)");
  EXPECT_REJECTED(make({{0, 4, 0, 5, 3}, {1, 4, 5, 2, 2}}), "but positions [3, 5) have queries");
  EXPECT_REJECTED(make_pack({}, 0), "num_ranks is 0");
}

}  // namespace
}  // namespace distca::planner
