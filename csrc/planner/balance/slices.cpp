#include "slices.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace distca::planner {
namespace {

constexpr size_t kNumLargest = 1;      // largest items of a donor among the candidates
constexpr size_t kNumNear = 1;         // candidates on either side of the target
constexpr double kThriftyPart = 0.55;  // last part of a document: most relief per byte if causal
constexpr double kKeysPart = 0.7;      // part of the least bytes that the keys of a last slice take
constexpr int kNumSplitPoints = 4;     // intervals of split points tried for a first slice
constexpr size_t kMaxSimilar = 1024;   // largest items compared in length with a candidate
constexpr int64_t kStepsPerCut = 16;   // charged to the budget
constexpr double kMissingPart = 0.5;   // of the least bytes of target left over: a candidate's cost

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Returns the greatest count in [low, high] for which `holds`. It must hold for `low`, and stay
// false once false.
template <typename Predicate>
int64_t last_true(int64_t low, int64_t high, Predicate holds) {
  ++high;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

// Returns the greatest count in [0, high) whose seconds are at most `most`. `above`, the seconds of
// `high`, must be more. Seconds of causal rows are a parabola, so its root through the middle is
// exact. For other masks interpolation comes close, and every third step bisects.
template <typename Seconds>
int64_t last_within(int64_t high, double above, double most, Seconds seconds) {
  int64_t low = 0;
  double below = 0;
  const auto is_open = [&] { return high - low > 1; };
  const auto split_at = [&](int64_t count) {
    count = std::clamp(count, low + 1, high - 1);
    const double value = seconds(count);
    (value <= most ? low : high) = count;
    (value <= most ? below : above) = value;
    return value;
  };
  const int64_t middle = high / 2;
  if (middle > 1) {
    const double whole = static_cast<double>(high), half = static_cast<double>(middle);
    const double mean = above / whole, first_mean = split_at(middle) / half;
    const double bend = (mean - first_mean) / (whole - half);
    const double slope = first_mean - bend * half;
    const double root = slope + std::sqrt(std::max(0.0, slope * slope + 4 * bend * most));
    const int64_t guess =
        root > 0 ? static_cast<int64_t>(std::min(whole, 2 * most / root)) : middle;
    if (is_open()) split_at(guess);
    if (is_open()) split_at(low == guess ? guess + 1 : guess - 1);
  }
  for (int i = 1; is_open(); ++i) {
    const double fraction = (most - below) / (above - below);
    split_at(i % 3 == 0 ? low + (high - low) / 2
                        : low + static_cast<int64_t>(fraction * static_cast<double>(high - low)));
  }
  return low;
}

// Split points at multiples of `grain` rows from an item's first row, and its end.
struct Grid {
  Range rows;
  int64_t grain;

  int64_t index(int64_t position) const { return ceil_div(position - rows.begin, grain); }
  int64_t at(int64_t index) const { return std::min(rows.end, rows.begin + index * grain); }
};

}  // namespace

Cutter::Cutter(Assignment& assignment, const PlanOptions& options, const Weights& weights,
               int64_t donor, std::vector<double> capacities)
    : assignment_(assignment),
      options_(options),
      weights_(weights),
      donor_(donor),
      gives_all_(assignment.limit(donor) == 0),
      capacities_(std::move(capacities)) {}

void Cutter::remember(int64_t document) {
  const auto front = fronts_.find(document);
  if (front == fronts_.end() || front->second.started) return;
  front->second.started = true;
  started_.push_back(document);
}

std::optional<Move> Cutter::first_rows(const Request& request, size_t index, int64_t grain) {
  const Item& item = assignment_.own(donor_)[index];
  held_ = &assignment_.keys_on(request.receiver, item.document);
  return cut(request, index, grain, item.rows, false);
}

// Lists the largest items, those closest to the target, and the rest below earlier slices.
void Cutter::list_candidates(double target) {
  const std::span<const Item> own = assignment_.own(donor_);
  const auto near = std::partition_point(
      own.begin(), own.end(), [target](const Item& item) { return item.seconds > target; });
  const size_t at = static_cast<size_t>(near - own.begin());
  const size_t first = at < kNumNear ? 0 : at - kNumNear;
  candidates_.clear();
  for (size_t i = 0; i < std::min(kNumLargest, own.size()); ++i) candidates_.push_back(i);
  for (size_t i = first; i < std::min(at + kNumNear, own.size()); ++i) candidates_.push_back(i);
  std::erase_if(started_, [&](int64_t document) {
    const int64_t end = fronts_.at(document).end;
    bool is_left = false;
    for (const Item& item : assignment_.own_of(donor_, document)) {
      if (item.rows.end > end) continue;
      is_left = true;
      candidates_.push_back(assignment_.find_own(donor_, item));
    }
    return !is_left;
  });
  std::sort(candidates_.begin(), candidates_.end());
  candidates_.erase(std::unique(candidates_.begin(), candidates_.end()), candidates_.end());
  assignment_.spend(static_cast<int64_t>(candidates_.size()));
}

std::optional<Move> Cutter::best_slice(const Request& request, int64_t grain) {
  best_.reset();
  best_cost_ = std::numeric_limits<double>::infinity();
  list_candidates(std::min(request.target, request.capacity));
  for (const size_t idx : candidates_) consider(request, idx, grain);
  return best_;
}

void Cutter::consider(const Request& request, size_t index, int64_t grain) {
  const Item& item = assignment_.own(donor_)[index];
  held_ = &assignment_.keys_on(request.receiver, item.document);
  const auto keep = [&](const std::optional<Move>& move) {
    if (!move) return;
    const double value = cost(request, item, *move);
    if (value >= best_cost_) return;
    best_cost_ = value;
    best_ = move;
  };
  const int64_t end = split_point_of(request, item, grain);
  if (request.is_thrifty && !gives_all_ && end == item.rows.end &&
      item.seconds < std::min(request.target, request.capacity)) {
    const auto num_last =
        static_cast<int64_t>(kThriftyPart * static_cast<double>(num_rows(item.rows)));
    const int64_t first = (num_rows(item.rows) - num_last) / grain * grain;
    const std::optional<Move> last =
        cut(request, index, grain, {item.rows.begin + first, end}, true);
    keep(last);
    if (last) return;
  }
  const std::optional<Move> below = cut(request, index, grain, {item.rows.begin, end}, true);
  keep(below);
  if (below && below->relief >= request.target) {
    const int64_t last = last_split_point(request.target, item, end);
    if (last < end) keep(cut(request, index, grain, {item.rows.begin, last}, true));
  }
  const bool is_kept = is_behind_front(item);
  if (!below || is_kept || gives_all_ || options_.mask.window_left >= 0) {
    keep(cut(request, index, grain, item.rows, false));
  }
}

// Returns whether the item lies above the slices that were cut downward from its document.
bool Cutter::is_behind_front(const Item& item) const {
  const auto front = fronts_.find(item.document);
  return front != fronts_.end() && front->second.started && item.rows.begin >= front->second.end;
}

// Returns the upper end of the item's next slice.
int64_t Cutter::split_point_of(const Request& request, const Item& item, int64_t grain) {
  if (options_.mask.window_left >= 0 || gives_all_) return item.rows.end;
  const auto front = fronts_.find(item.document);
  if (front != fronts_.end()) return front->second.started ? item.rows.end : front->second.end;
  const int64_t end = best_split_point(
      request.planned_seconds > 0 ? request.planned_seconds : request.target, item, grain);
  fronts_.emplace(item.document, Front{end});
  return end;
}

int64_t Cutter::best_split_point(double surplus, const Item& item, int64_t grain) const {
  if (num_rows(item.rows) <= grain) return item.rows.end;
  const std::span<const Item> own = assignment_.own(donor_);
  const std::span<const Item> largest_item = own.first(std::min(kMaxSimilar, own.size()));
  double similar_seconds = 0;  // seconds of items with at least half as many rows
  assignment_.spend(static_cast<int64_t>(largest_item.size()));
  for (const Item& other : largest_item) {
    if (2 * num_rows(other.rows) >= num_rows(item.rows)) similar_seconds += other.seconds;
  }
  const double target = surplus * item.seconds / similar_seconds;
  if (target >= item.seconds) return item.rows.end;
  const Grid grid{item.rows, grain};
  const int64_t last = grid.index(item.rows.end);
  const int64_t least =
      1 + last_true(0, last - 1, [&](int64_t index) {
        return assignment_.seconds(item.document, {item.rows.begin, grid.at(index)}) < target;
      });
  int64_t best = item.rows.end;
  double fewest = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= kNumSplitPoints; ++i) {
    const int64_t end = grid.at(least + (last - least) * i / kNumSplitPoints);
    const double bytes = bytes_from(item, grain, end, target);
    if (bytes < fewest) {
      fewest = bytes;
      best = end;
    }
  }
  return best;
}

// Returns the upper end of a donor's last slice. It need not touch earlier slices, so it ends where
// its keys take about their part of the least bytes for its work.
int64_t Cutter::last_split_point(double target, const Item& item, int64_t end) const {
  const double bytes = kKeysPart * weights_.bytes_per_root_second * std::sqrt(target);
  const double num_keys = bytes / static_cast<double>(std::max<int64_t>(1, options_.row_bytes.key));
  const int64_t most = static_cast<int64_t>(std::min(num_keys, static_cast<double>(end)));
  const int64_t last = std::max(item.rows.begin, most);
  return assignment_.seconds(item.document, {item.rows.begin, last}) < target ? end : last;
}

// Returns the longest slice down from `end` of at most `most` seconds, but at least `grain` rows.
Range Cutter::slice_below(const Item& item, int64_t grain, int64_t end, double most) const {
  const Grid grid{item.rows, grain};
  const int64_t last = grid.index(end);
  const auto slice = [&](int64_t count) { return Range{grid.at(last - count), end}; };
  const auto seconds = [&](int64_t count) {
    return assignment_.seconds(item.document, slice(count));
  };
  const double all = seconds(last);
  if (all <= most) return slice(last);
  return slice(std::max<int64_t>(1, last_within(last, all, most, seconds)));
}

// Returns the slice that holds the target, or the longest one below it if that exceeds the
// capacity.
Range Cutter::last_slice(const Item& item, int64_t grain, int64_t end, double target,
                         double capacity) const {
  const Grid grid{item.rows, grain};
  end = grid.at(grid.index(last_split_point(target, item, end)));
  const Range below = slice_below(item, grain, end, target);
  if (assignment_.seconds(item.document, below) >= target) return below;
  const Range above{std::max(item.rows.begin, below.begin - grain), end};
  return assignment_.seconds(item.document, above) <= capacity ? above : below;
}

std::vector<Range> Cutter::row_of_slices(const Item& item, int64_t grain, int64_t end,
                                         double target) const {
  std::vector<Range> slices;
  assignment_.spend(static_cast<int64_t>(capacities_.size()));
  for (const double capacity : capacities_) {
    if (target <= 0 || end <= item.rows.begin) break;
    slices.push_back(target <= capacity ? last_slice(item, grain, end, target, capacity)
                                        : slice_below(item, grain, end, capacity));
    target -= assignment_.seconds(item.document, slices.back());
    end = slices.back().begin;
  }
  return slices;
}

// Returns the bytes of slices cut downward from `end`, one per capacity.
double Cutter::bytes_from(const Item& item, int64_t grain, int64_t end, double target) const {
  const RangeSet nothing;
  double bytes = 0;
  for (const Range slice : row_of_slices(item, grain, end, target)) {
    bytes += static_cast<double>(assignment_.bytes_of(item.document, slice, nothing));
  }
  return bytes;
}

bool Cutter::complete(const Request& request, const Item& item, Range slice, Move& move) const {
  const Range head{item.rows.begin, slice.begin}, tail{slice.end, item.rows.end};
  move.slice = slice;
  move.relief = item.seconds - assignment_.seconds(item.document, head) -
                assignment_.seconds(item.document, tail);
  move.seconds = assignment_.seconds(item.document, slice);
  move.bytes = assignment_.bytes_of(item.document, slice, *held_);
  return move.seconds <= request.capacity && static_cast<double>(move.bytes) <= request.max_bytes &&
         assignment_.links_fit(move);
}

// Returns a slice at the end of `part`, or at its beginning.
std::optional<Move> Cutter::cut(const Request& request, size_t index, int64_t grain, Range part,
                                bool downward) const {
  assignment_.spend(kStepsPerCut);
  const Item& item = assignment_.own(donor_)[index];
  const Grid grid{item.rows, grain};
  const int64_t first = grid.index(part.begin), last = grid.index(part.end);
  const auto slice = [&](int64_t count) {
    return downward ? Range{grid.at(last - count), grid.at(last)}
                    : Range{grid.at(first), grid.at(first + count)};
  };
  const auto seconds = [&](int64_t count) {
    return count == 0 ? 0.0 : assignment_.seconds(item.document, slice(count));
  };
  Move move{donor_, request.receiver, index, {}, 0, 0, 0};
  int64_t count = last - first;
  const double all = seconds(count);
  if (all > std::min(request.capacity, request.target)) {
    count = last_within(count, all, std::min(request.capacity, request.target), seconds);
    if (request.target <= request.capacity && seconds(count) < request.target &&
        seconds(count + 1) <= request.capacity) {
      ++count;
    }
  }
  if (count == 0) return std::nullopt;
  if (!complete(request, item, slice(count), move)) {
    count = last_true(0, count - 1,
                      [&](int64_t c) { return c == 0 || complete(request, item, slice(c), move); });
    if (count == 0 || !complete(request, item, slice(count), move)) return std::nullopt;
  }
  if (move.relief < weights_.min_relief && !gives_all_) return std::nullopt;
  return move;
}

// Returns bytes per sqrt(second) of relief. Bytes include a part of the least for the missing
// target.
double Cutter::cost(const Request& request, const Item& item, const Move& move) const {
  double bytes = static_cast<double>(move.bytes);
  if (request.is_thrifty) return bytes / move.relief;
  const double missing = std::min(request.target, request.capacity) - move.relief;
  if (missing > 0) bytes += kMissingPart * weights_.bytes_per_root_second * std::sqrt(missing);
  if (!gives_all_) return bytes / std::sqrt(move.relief);
  const RangeSet nothing;
  for (const Range rest :
       {Range{item.rows.begin, move.slice.begin}, Range{move.slice.end, item.rows.end}}) {
    bytes += static_cast<double>(assignment_.bytes_of(item.document, rest, nothing));
  }
  return bytes - static_cast<double>(assignment_.bytes_of(item.document, item.rows, nothing));
}

}  // namespace distca::planner
