#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace distca::planner {

// A contiguous part of a document that a rank holds. A rank's pieces, in order, are its packed
// rows.
struct Piece {
  int64_t rank;      // home rank, 0 <= rank < num_ranks
  int64_t document;  // any id that is the same on every rank; ids need not be dense
  int64_t start;     // position of the piece's first token in its document
  int64_t length;    // tokens; 0 is allowed and ignored
  // Number of its first tokens that are context: keys without queries, which another call computes.
  // The context of a document is its first positions, in one or more pieces, but never all of it.
  int64_t num_context = 0;
};

// A piece placed on its home rank's rows. Rows of keys count all tokens, rows of queries leave out
// context.
struct Segment {
  int64_t start;   // position in the document
  int64_t length;  // tokens
  int64_t rank;    // home rank
  int64_t row;     // first of its rows of keys on the home rank
  int64_t q_row;   // query row that its first token would have; may be negative; undefined if all
                   // tokens are context
};

struct Document {
  int64_t id;
  int64_t length;         // tokens
  int64_t first_segment;  // index into Pack::segments
  int64_t num_segments;
  int64_t first_query = 0;  // positions before it are context: keys without queries
};

// Every token of a step: all documents and where their rows live.
struct Pack {
  int64_t num_ranks;
  std::vector<int64_t> num_rows;          // [num_ranks] of keys: all tokens
  std::vector<int64_t> num_context_rows;  // [num_ranks] of them without queries
  std::vector<Document> documents;  // in order of (rank, row) of their first segment; none empty
  std::vector<Segment> segments;    // by document, then start; each document's tile [0, length)

  std::span<const Segment> segments_of(const Document& document) const {
    return {segments.data() + document.first_segment, static_cast<size_t>(document.num_segments)};
  }
};

// Throws std::invalid_argument naming document, rank and positions when pieces are negative, out of
// range, overlap, leave a gap or have context elsewhere than Piece says. `pieces` are in row order
// within each rank; ranks may interleave.
Pack make_pack(std::span<const Piece> pieces, int64_t num_ranks);

}  // namespace distca::planner
