#include "cutter.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "slices.h"

namespace distca::planner {

Cutter::Cutter(Assignment& assignment, int64_t donor, std::vector<double> capacities)
    : assignment_(assignment),
      problem_(assignment.problem()),
      donor_(donor),
      gives_all_(assignment.limit(donor) == 0),
      capacities_(std::move(capacities)) {}

void Cutter::apply(const Move& move) {
  const int64_t document = move.item.document;
  assignment_.apply(move);
  if (split_points_.contains(document)) started_.insert(document);
}

std::optional<Move> Cutter::first_rows(const Request& request, const Item& item) {
  return cut(request, item, item.rows, From::kBegin,
             assignment_.keys_on(request.receiver, item.document));
}

// Returns the largest item, those closest to the target, and the rest below earlier slices.
std::vector<Item> Cutter::candidates(double target) {
  const std::deque<Item>& own = assignment_.own(donor_);
  const auto near = std::partition_point(
      own.begin(), own.end(), [target](const Item& item) { return item.seconds > target; });
  const std::ptrdiff_t num_near = problem_.heuristics.num_near;
  std::vector<Item> items = {own.front()};
  items.insert(items.end(), near - std::min(num_near, near - own.begin()),
               near + std::min(num_near, own.end() - near));
  std::erase_if(started_, [&](int64_t document) {
    bool is_left = false;
    for (const Item& item : assignment_.own_of(donor_, document)) {
      if (item.rows.end > split_points_.at(document)) continue;
      is_left = true;
      items.push_back(item);
    }
    return !is_left;
  });
  std::sort(items.begin(), items.end(), is_larger);
  const auto is_same = [](const Item& a, const Item& b) {
    return a.document == b.document && a.rows.begin == b.rows.begin;
  };
  items.erase(std::unique(items.begin(), items.end(), is_same), items.end());
  assignment_.spend(static_cast<int64_t>(items.size()));
  return items;
}

std::optional<Move> Cutter::best_slice(const Request& request) {
  best_.reset();
  best_cost_ = std::numeric_limits<double>::infinity();
  for (const Item& item : candidates(request.most())) consider(request, item);
  return best_;
}

// Compares slices of one item with the best so far.
void Cutter::consider(const Request& request, const Item& item) {
  const RangeSet& keys = assignment_.keys_on(request.receiver, item.document);
  const auto try_part = [&](Range part, From from) {
    const std::optional<Move> move = cut(request, item, part, from, keys);
    const double value = move ? cost(request, *move) : best_cost_;
    if (value < best_cost_) {
      best_cost_ = value;
      best_ = move;
    }
    return move;
  };
  const int64_t end = split_point_of(request, item);
  const std::optional<Move> below = try_part({item.rows.begin, end}, From::kEnd);
  if (below && below->relief >= request.target) {
    try_part({item.rows.begin, last_split_point(problem_, item, end, request.target)}, From::kEnd);
  }
  if (!below || gives_all_ || problem_.options.mask.window_left >= 0) {
    try_part(item.rows, From::kBegin);
  }
}

// Returns the upper end of the item's next slice.
int64_t Cutter::split_point_of(const Request& request, const Item& item) {
  if (problem_.options.mask.window_left >= 0 || gives_all_ || !problem_.heuristics.splits_high) {
    return item.rows.end;
  }
  const auto [entry, is_new] = split_points_.try_emplace(item.document, item.rows.end);
  if (is_new) {
    const double seconds = request.planned_seconds > 0 ? request.planned_seconds : request.target;
    entry->second = best_split_point(item, seconds);
  }
  const bool is_above = entry->second <= item.rows.begin;
  return is_above ? item.rows.end : std::min(entry->second, item.rows.end);
}

// Returns the split point whose row of slices moves the fewest bytes.
int64_t Cutter::best_split_point(const Item& item, double target) const {
  // Assume that the donor's other items give about the same part of themselves.
  target *= item.seconds / assignment_.own(donor_).front().seconds;
  const Grid points{item.rows, problem_.options.cost.tile_q};
  const int64_t last = points.index(item.rows.end);
  if (target >= item.seconds || last == 1) return item.rows.end;
  const int64_t least =
      1 + last_true(0, last - 1, [&](int64_t index) {
        return problem_.seconds(item.document, {item.rows.begin, points.at(index)}) < target;
      });
  const int num_intervals = problem_.heuristics.num_split_points;
  int64_t best = item.rows.end;
  double fewest = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= num_intervals; ++i) {
    const int64_t end = points.at(least + (last - least) * i / num_intervals);
    assignment_.spend(static_cast<int64_t>(capacities_.size()));
    double bytes = 0;
    for (const Range slice : row_of_slices(problem_, item, end, target, capacities_)) {
      bytes += static_cast<double>(assignment_.bytes_of(item.document, slice));
    }
    if (bytes < fewest) {
      fewest = bytes;
      best = end;
    }
  }
  return best;
}

// Returns a slice at one end of `part`, for a receiver that already has `keys`.
std::optional<Move> Cutter::cut(const Request& request, const Item& item, Range part, From from,
                                const RangeSet& keys) const {
  constexpr int64_t kSteps = 16;
  assignment_.spend(kSteps);
  const Grid points{item.rows, problem_.options.cost.tile_q};
  const int64_t first = points.index(part.begin), last = points.index(part.end);
  const auto slice = [&](int64_t count) {
    return from == From::kEnd ? Range{points.at(last - count), points.at(last)}
                              : Range{points.at(first), points.at(first + count)};
  };
  const auto seconds = [&](int64_t count) { return problem_.seconds(item.document, slice(count)); };
  int64_t count = last_within(last - first, request.most(), seconds);
  if (count < last - first && request.target <= request.capacity &&
      seconds(count) < request.target && seconds(count + 1) <= request.capacity) {
    ++count;
  }
  if (count == 0) return std::nullopt;
  Move move;
  const auto fits = [&](int64_t num_tiles) {
    if (num_tiles == 0) return true;
    move = assignment_.move_of(donor_, item, slice(num_tiles), request.receiver, keys);
    return move.seconds <= request.capacity &&
           static_cast<double>(move.bytes) <= request.max_bytes && assignment_.links_fit(move);
  };
  if (!fits(count)) {
    count = last_true(0, count - 1, fits);
    if (count == 0 || !fits(count)) return std::nullopt;
  }
  if (move.relief < problem_.min_relief && !gives_all_) return std::nullopt;
  return move;
}

// Returns bytes per sqrt(second) of relief. Bytes include a part of the least bytes of the missing
// target. For a donor that gives all its work, they include the cost of the rest.
double Cutter::cost(const Request& request, const Move& move) const {
  double bytes = static_cast<double>(move.bytes);
  const double missing = std::max(0.0, request.most() - move.relief);
  bytes += problem_.heuristics.missing_part * problem_.bytes_per_root_second * std::sqrt(missing);
  if (!gives_all_) return bytes / std::sqrt(move.relief);
  const Item& item = move.item;
  for (const Range rest : outside(move.slice, item.rows)) {
    bytes += static_cast<double>(assignment_.bytes_of(item.document, rest));
  }
  return bytes - static_cast<double>(assignment_.bytes_of(item.document, item.rows));
}

}  // namespace distca::planner
