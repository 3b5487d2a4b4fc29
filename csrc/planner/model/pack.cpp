#include "pack.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace distca::planner {
namespace {

struct PlacedPiece {
  int64_t document;
  int64_t num_context;
  Segment segment;
};

std::string to_string(const Segment& segment) {
  return "positions [" + std::to_string(segment.start) + ", " +
         std::to_string(segment.start + segment.length) + ") of rank " +
         std::to_string(segment.rank);
}

[[noreturn]] void reject(int64_t document, const std::string& what) {
  throw std::invalid_argument("pieces: document " + std::to_string(document) + ": " + what);
}

void check(const Piece& piece, int64_t num_ranks) {
  if (piece.rank < 0 || piece.rank >= num_ranks) {
    reject(piece.document, "rank is " + std::to_string(piece.rank) + "; expected 0 <= rank < " +
                               std::to_string(num_ranks));
  }
  if (piece.start < 0 || piece.length < 0 ||
      piece.start > std::numeric_limits<int64_t>::max() - piece.length) {
    reject(piece.document, "rank " + std::to_string(piece.rank) + " holds start " +
                               std::to_string(piece.start) + ", length " +
                               std::to_string(piece.length) +
                               "; expected neither negative and a sum below 2^63");
  }
  const int64_t most = piece.start > 0 ? 0 : std::max<int64_t>(0, piece.length - 1);
  if (piece.num_context < 0 || piece.num_context > most) {
    reject(piece.document,
           "rank " + std::to_string(piece.rank) + " has " + std::to_string(piece.num_context) +
               " context rows in " + std::to_string(piece.length) + " from position " +
               std::to_string(piece.start) + "; expected 0 to " + std::to_string(most));
  }
}

// Calls visit(placed piece) for every piece that is not empty, placed on its rank's rows.
template <typename Visit>
void place(std::span<const Piece> pieces, Pack& pack, Visit visit) {
  for (const Piece& piece : pieces) {
    check(piece, pack.num_ranks);
    if (piece.length == 0) continue;
    int64_t& row = pack.num_rows[piece.rank];
    if (piece.length > std::numeric_limits<int64_t>::max() - row) {
      reject(piece.document, "rank " + std::to_string(piece.rank) + " would hold " +
                                 std::to_string(row) + " + " + std::to_string(piece.length) +
                                 " tokens; expected a sum below 2^63");
    }
    int64_t& num_context_rows = pack.num_context_rows[piece.rank];
    num_context_rows += piece.num_context;
    visit(PlacedPiece{piece.document,
                      piece.num_context,
                      {piece.start, piece.length, piece.rank, row, row - num_context_rows}});
    row += piece.length;
  }
}

// Adds the segment to the pack's last document, whose end it has to continue without overlap or
// gap.
void append(Pack& pack, const Segment& segment) {
  Document& document = pack.documents.back();
  if (segment.start > document.length) {
    reject(document.id, "no rank holds positions [" + std::to_string(document.length) + ", " +
                            std::to_string(segment.start) + ") before " + to_string(segment));
  }
  if (segment.start < document.length) {
    reject(document.id, to_string(segment) + " overlap " + to_string(pack.segments.back()));
  }
  document.length += segment.length;
  if (document.num_segments > 0) {
    Segment& last = pack.segments.back();
    if (last.rank == segment.rank && last.row + last.length == segment.row) {
      last.length += segment.length;
      return;
    }
  }
  pack.segments.push_back(segment);
  ++document.num_segments;
}

void append(Pack& pack, const PlacedPiece& piece) {
  if (pack.documents.empty() || pack.documents.back().id != piece.document) {
    const auto first_segment = static_cast<int64_t>(pack.segments.size());
    pack.documents.push_back({piece.document, 0, first_segment, 0, piece.num_context});
  }
  append(pack, piece.segment);
}

// Pieces in order of (document, start), as they mostly come, are not copied for sorting.
void append_in_order(std::span<const Piece> pieces, Pack& pack) {
  const auto piece_precedes = [](const Piece& a, const Piece& b) {
    return std::tie(a.document, a.start) < std::tie(b.document, b.start);
  };
  if (std::is_sorted(pieces.begin(), pieces.end(), piece_precedes)) {
    place(pieces, pack, [&](const PlacedPiece& piece) { append(pack, piece); });
    return;
  }
  std::vector<PlacedPiece> placed;
  placed.reserve(pieces.size());
  place(pieces, pack, [&](const PlacedPiece& piece) { placed.push_back(piece); });
  const auto precedes = [](const PlacedPiece& a, const PlacedPiece& b) {
    return std::tie(a.document, a.segment.start) < std::tie(b.document, b.segment.start);
  };
  std::stable_sort(placed.begin(), placed.end(), precedes);
  for (const PlacedPiece& piece : placed) append(pack, piece);
}

}  // namespace

Pack make_pack(std::span<const Piece> pieces, int64_t num_ranks) {
  if (num_ranks < 1) {
    throw std::invalid_argument("num_ranks is " + std::to_string(num_ranks) +
                                "; expected at least 1");
  }
  const std::vector<int64_t> zeros(num_ranks, 0);
  Pack pack{num_ranks, zeros, zeros, {}, {}};
  pack.documents.reserve(pieces.size());
  pack.segments.reserve(pieces.size());
  append_in_order(pieces, pack);
  const auto precedes = [&pack](const Document& a, const Document& b) {
    const Segment& first = pack.segments[a.first_segment];
    const Segment& other = pack.segments[b.first_segment];
    return std::tie(first.rank, first.row) < std::tie(other.rank, other.row);
  };
  if (std::is_sorted(pack.documents.begin(), pack.documents.end(), precedes)) return pack;
  std::sort(pack.documents.begin(), pack.documents.end(), precedes);
  const std::vector<Segment> by_id = std::move(pack.segments);
  pack.segments.clear();
  pack.segments.reserve(by_id.size());
  for (Document& document : pack.documents) {
    const auto first = by_id.begin() + document.first_segment;
    document.first_segment = static_cast<int64_t>(pack.segments.size());
    pack.segments.insert(pack.segments.end(), first, first + document.num_segments);
  }
  return pack;
}

}  // namespace distca::planner
