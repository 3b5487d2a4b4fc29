#pragma once

#include <limits>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../model/options.h"
#include "assignment.h"

namespace distca::planner {

// Scales that make slices of different size comparable.
struct Weights {
  double bytes_per_root_second;  // least bytes of a slice over the square root of its seconds
  double min_relief;             // seconds; a slice with less relief is not worth a task
};

// Asks a donor for one slice. Seconds are at speed 1.
struct Request {
  int64_t receiver;
  double target;    // relief of the donor; tiles may round it up
  double capacity;  // upper bound of the slice's seconds
  double max_bytes = std::numeric_limits<double>::infinity();  // into the receiver
  double planned_seconds = 0;  // of this and later requests; 0 means target
  bool is_thrifty = false;     // links are scarce: of short documents only the last rows move
};

// Cuts one donor's own items. Slices of a document are cut downward, one below the other, from a
// split point that leaves its last rows at home: these cost the most bytes, since they need all
// keys before them.
class Cutter {
 public:
  // `capacities` are those of the likely receivers, the largest first.
  Cutter(Assignment& assignment, const PlanOptions& options, const Weights& weights, int64_t donor,
         std::vector<double> capacities);

  // Returns the slice with the lowest cost that keeps servers and links within the limits and the
  // request. It holds the target or, if that does not fit, as much as does. Split points are
  // multiples of `grain` rows of an item.
  std::optional<Move> best_slice(const Request& request, int64_t grain);
  // Returns a slice at the beginning of one of the donor's own items.
  std::optional<Move> first_rows(const Request& request, size_t index, int64_t grain);
  // Returns slices of an item cut downward from `end`, one per capacity, until they hold the
  // target.
  std::vector<Range> row_of_slices(const Item& item, int64_t grain, int64_t end,
                                   double target) const;
  // Must be called for the document of every move that is applied.
  void remember(int64_t document);

 private:
  struct Front {
    int64_t end;  // of the first slice; the next ones end where the item does
    bool started = false;
  };

  void list_candidates(double target);
  void consider(const Request& request, size_t index, int64_t grain);
  std::optional<Move> cut(const Request& request, size_t index, int64_t grain, Range part,
                          bool downward) const;
  bool complete(const Request& request, const Item& item, Range slice, Move& move) const;
  bool is_behind_front(const Item& item) const;
  int64_t split_point_of(const Request& request, const Item& item, int64_t grain);
  int64_t best_split_point(double target, const Item& item, int64_t grain) const;
  int64_t last_split_point(double target, const Item& item, int64_t end) const;
  Range slice_below(const Item& item, int64_t grain, int64_t end, double most) const;
  Range last_slice(const Item& item, int64_t grain, int64_t end, double target,
                   double capacity) const;
  double bytes_from(const Item& item, int64_t grain, int64_t end, double target) const;
  double cost(const Request& request, const Item& item, const Move& move) const;

  Assignment& assignment_;
  const PlanOptions& options_;
  const Weights& weights_;
  const int64_t donor_;
  const bool gives_all_;  // the donor serves nothing
  const std::vector<double> capacities_;
  std::unordered_map<int64_t, Front> fronts_;  // of documents that were tried
  std::vector<int64_t> started_;               // documents with slices cut from them
  std::vector<size_t> candidates_;             // scratch of best_slice: items by index
  const RangeSet* held_ = nullptr;             // keys of an item's document on the receiver
  std::optional<Move> best_;
  double best_cost_ = 0;
};

}  // namespace distca::planner
