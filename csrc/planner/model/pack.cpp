#include "pack.h"

#include <algorithm>
#include <limits>
#include <ostream>
#include <tuple>

#include "core/check.h"

namespace distca::planner {

static std::ostream& operator<<(std::ostream& out, const Segment& segment) {
  return out << "positions [" << segment.start << ", " << segment.start + segment.length
             << ") of rank " << segment.rank;
}

namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

struct PlacedPiece {
  int64_t document;
  int64_t num_context;
  Segment segment;
};

template <typename... Parts>
void check(bool holds, int64_t document, const Parts&... parts) {
  require(holds, "pieces: document ", document, ": ", parts...);
}

void check(const Piece& piece, const Pack& pack) {
  const auto& [rank, document, start, length, num_context] = piece;
  check(0 <= rank && rank < pack.num_ranks, document, "rank is ", rank, "; expected 0 <= rank < ",
        pack.num_ranks);
  check(start >= 0 && length >= 0 && start <= kMost - length, document, "rank ", rank,
        " holds start ", start, ", length ", length,
        "; expected neither negative and a sum below 2^63");
  check(0 <= num_context && num_context <= length, document, "rank ", rank, " has ", num_context,
        " context rows in ", length, " from position ", start, "; expected 0 to ", length);
  check(length <= kMost - pack.num_rows[rank], document, "rank ", rank, " would hold ",
        pack.num_rows[rank], " + ", length, " tokens; expected a sum below 2^63");
}

// Returns the pieces that are not empty, by document, then start. Counts rows of the ranks.
std::vector<PlacedPiece> place(std::span<const Piece> pieces, Pack& pack) {
  std::vector<PlacedPiece> placed;
  placed.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    check(piece, pack);
    if (piece.length == 0) continue;
    int64_t &row = pack.num_rows[piece.rank], &num_context = pack.num_context_rows[piece.rank];
    num_context += piece.num_context;
    placed.push_back({piece.document,
                      piece.num_context,
                      {piece.start, piece.length, piece.rank, row, row - num_context}});
    row += piece.length;
  }
  const auto precedes = [](const PlacedPiece& a, const PlacedPiece& b) {
    return std::tie(a.document, a.segment.start) < std::tie(b.document, b.segment.start);
  };
  if (!std::is_sorted(placed.begin(), placed.end(), precedes)) {
    std::stable_sort(placed.begin(), placed.end(), precedes);
  }
  return placed;
}

// Adds a document, whose pieces have to continue one another without overlap or gap.
void append(std::span<const PlacedPiece> pieces, Pack& pack) {
  const auto first_segment = static_cast<int64_t>(pack.segments.size());
  Document document{pieces[0].document, 0, first_segment, 0};
  for (const auto& [id, num_context, segment] : pieces) {
    check(segment.start <= document.length, id, "no rank holds positions [", document.length, ", ",
          segment.start, ") before ", segment);
    if (document.num_segments == 0) {
      pack.segments.push_back(segment);
      document.num_segments = 1;
    } else {
      Segment& last = pack.segments.back();
      check(segment.start == document.length, id, segment, " overlap ", last);
      if (last.rank == segment.rank && last.row + last.length == segment.row) {
        last.q_row = segment.q_row - last.length;  // differs if `last` is context
        last.length += segment.length;
      } else {
        pack.segments.push_back(segment);
        ++document.num_segments;
      }
    }
    check(num_context == 0 || document.first_query == segment.start, id, segment, " have ",
          num_context, " context rows, but positions [", document.first_query, ", ", segment.start,
          ") have queries; expected context in a document's first positions only");
    document.first_query += num_context;
    document.length += segment.length;
  }
  check(document.first_query < document.length, document.id, "all ", document.length,
        " tokens are context rows; expected a query");
  pack.documents.push_back(document);
}

}  // namespace

Pack make_pack(std::span<const Piece> pieces, int64_t num_ranks) {
  require(num_ranks >= 1, "num_ranks is ", num_ranks, "; expected at least 1");
  const std::vector<int64_t> zeros(num_ranks, 0);
  Pack pack{num_ranks, zeros, zeros, {}, {}};
  const std::vector<PlacedPiece> placed = place(pieces, pack);
  std::vector<std::span<const PlacedPiece>> documents;
  for (auto first = placed.begin(); first != placed.end();) {
    const auto last = std::find_if(
        first, placed.end(), [&](const PlacedPiece& p) { return p.document != first->document; });
    documents.emplace_back(first, last);
    first = last;
  }
  const auto precedes = [](const auto& a, const auto& b) {
    return std::tie(a[0].segment.rank, a[0].segment.row) <
           std::tie(b[0].segment.rank, b[0].segment.row);
  };
  if (!std::is_sorted(documents.begin(), documents.end(), precedes)) {
    std::sort(documents.begin(), documents.end(), precedes);
  }
  pack.documents.reserve(documents.size());
  pack.segments.reserve(placed.size());
  for (const std::span<const PlacedPiece> document : documents) append(document, pack);
  return pack;
}

}  // namespace distca::planner
