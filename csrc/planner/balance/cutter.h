#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "assignment.h"

namespace distca::planner {

// Asks a donor for one slice. Seconds are at speed 1.
struct Request {
  int64_t receiver;
  double target;    // wanted relief of the donor; tiles may round it up
  double capacity;  // upper bound of the slice's seconds
  double max_bytes = std::numeric_limits<double>::infinity();  // into the receiver
  double planned_seconds = 0;  // total of this and later requests; 0 means target

  double most() const { return std::min(target, capacity); }
};

// Cuts one donor's own items. The slices of a document are cut one below the other, down from a
// split point. Rows above that point stay at home: they would cost the most bytes, since they need
// all keys before them.
class Cutter {
 public:
  // `capacities` are the capacities of the likely receivers, the largest first.
  Cutter(Assignment& assignment, int64_t donor, std::vector<double> capacities = {});

  // Returns the cheapest slice that keeps servers and links within the limits and meets the
  // request. It holds the target or, if that does not fit, as much as fits.
  std::optional<Move> best_slice(const Request& request);
  // Returns a slice at the beginning of one of the donor's own items.
  std::optional<Move> first_rows(const Request& request, const Item& item);
  // Applies a move. The next slices of its document are cut below it.
  void apply(const Move& move);

 private:
  enum class From { kBegin, kEnd };

  std::vector<Item> candidates(double target);
  void consider(const Request& request, const Item& item);
  std::optional<Move> cut(const Request& request, const Item& item, Range part, From from,
                          const RangeSet& keys) const;
  int64_t split_point_of(const Request& request, const Item& item);
  int64_t best_split_point(const Item& item, double target) const;
  double cost(const Request& request, const Move& move) const;

  Assignment& assignment_;
  const Problem& problem_;
  const int64_t donor_;
  const bool gives_all_;  // the donor serves nothing
  const std::vector<double> capacities_;
  std::unordered_map<int64_t, int64_t> split_points_;  // of first slices, by document
  std::set<int64_t> started_;                          // documents with slices cut from them
  std::optional<Move> best_;
  double best_cost_ = 0;
};

}  // namespace distca::planner
