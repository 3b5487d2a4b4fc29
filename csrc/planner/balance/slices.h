#pragma once

#include <limits>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../model/options.h"
#include "assignment.h"

namespace distca::planner {

// What bytes are weighed with.
struct Prices {
  double bytes_per_root;  // least bytes of a slice over the root of its seconds
  double least_relief;    // seconds; a slice that takes less off its donor is not worth a task
};

// What a receiver may take from the donor at once, in seconds at speed 1.
struct Wish {
  int64_t receiver;
  double wanted;  // off the donor; a little more where tiles do not divide
  double room;    // most that the receiver takes
  double most_bytes = std::numeric_limits<double>::infinity();  // into the receiver
  double planned = 0;       // off the donor by this and later wishes; what is wanted where it is 0
  bool is_thrifty = false;  // bytes are scarcer than documents: of short ones the last rows alone
};

// Cuts one donor's own shares. Slices of a document are cut downward, one below the other, from an
// end that leaves its last rows at home: they are dear to send, since they need all keys before
// them.
class Cutter {
 public:
  // `rooms` of the receivers that are likely to come, the largest first.
  Cutter(Assignment& assignment, const PlanOptions& options, const Prices& prices, int64_t donor,
         std::vector<double> rooms);

  // The slice that brings most for its bytes and keeps servers and links within the limits and the
  // wish: the least that is wanted or, if it has no place, the most that has. Ends at multiples of
  // `grain` rows of a share.
  std::optional<Move> best_slice(const Wish& wish, int64_t grain);
  // A slice at the beginning of one of the donor's own shares.
  std::optional<Move> first_rows(const Wish& wish, size_t index, int64_t grain);
  // Slices of a share cut downward from `end`, one for each of the rooms, until they hold what is
  // wanted.
  std::vector<Range> row_of_slices(const Share& share, int64_t grain, int64_t end,
                                   double wanted) const;
  // To be called for the document of every move that is applied.
  void remember(int64_t document);

 private:
  struct Front {
    int64_t end;  // of the first slice; the next ones end where the share does
    bool started = false;
  };

  void list_tried(double wanted);
  void consider(const Wish& wish, size_t index, int64_t grain);
  std::optional<Move> cut(const Wish& wish, size_t index, int64_t grain, Range part,
                          bool downward) const;
  bool complete(const Wish& wish, const Share& share, Range slice, Move& move) const;
  bool is_behind_front(const Share& share) const;
  int64_t end_of(const Wish& wish, const Share& share, int64_t grain);
  int64_t best_end(double wanted, const Share& share, int64_t grain) const;
  int64_t last_end(double wanted, const Share& share, int64_t end) const;
  Range slice_below(const Share& share, int64_t grain, int64_t end, double most) const;
  Range last_slice(const Share& share, int64_t grain, int64_t end, double wanted,
                   double room) const;
  double bytes_from(const Share& share, int64_t grain, int64_t end, double wanted) const;
  double cost(const Wish& wish, const Share& share, const Move& move) const;

  Assignment& assignment_;
  const PlanOptions& options_;
  const Prices& prices_;
  const int64_t donor_;
  const bool gives_all_;  // the donor serves nothing
  const std::vector<double> rooms_;
  std::unordered_map<int64_t, Front> fronts_;  // of documents that were tried
  std::vector<int64_t> started_;               // those of which slices were cut
  std::vector<size_t> tried_;                  // scratch of best_slice: shares by index
  const RangeSet* held_ = nullptr;             // keys of a share's document on the receiver
  std::optional<Move> best_;
  double least_ = 0;
};

}  // namespace distca::planner
