#include "cutter.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "slices.h"

namespace distca::planner {
namespace {

constexpr int64_t kStepsPerCut = 16;  // charged to the budget

}  // namespace

Cutter::Cutter(Assignment& assignment, int64_t donor, std::vector<double> capacities)
    : assignment_(assignment),
      problem_(assignment.problem()),
      donor_(donor),
      gives_all_(assignment.limit(donor) == 0),
      capacities_(std::move(capacities)) {}

void Cutter::apply(const Move& move) {
  const int64_t document = assignment_.own(donor_)[move.item].document;
  assignment_.apply(move);
  if (!split_points_.contains(document)) return;
  if (std::find(started_.begin(), started_.end(), document) == started_.end()) {
    started_.push_back(document);
  }
}

std::optional<Move> Cutter::first_rows(const Request& request, size_t index) {
  const Item& item = assignment_.own(donor_)[index];
  receiver_keys_ = &assignment_.keys_on(request.receiver, item.document);
  return cut(request, index, item.rows, From::kBegin);
}

// Lists the largest item, those closest to the target, and the rest below earlier slices.
void Cutter::list_candidates(double target) {
  const std::deque<Item>& own = assignment_.own(donor_);
  const auto near = std::partition_point(
      own.begin(), own.end(), [target](const Item& item) { return item.seconds > target; });
  const auto at = static_cast<size_t>(near - own.begin());
  const auto num_near = static_cast<size_t>(problem_.heuristics.num_near);
  candidates_.assign(1, 0);
  for (size_t i = at - std::min(at, num_near); i < std::min(at + num_near, own.size()); ++i) {
    candidates_.push_back(i);
  }
  std::erase_if(started_, [&](int64_t document) {
    bool is_left = false;
    for (const Item& item : assignment_.own_of(donor_, document)) {
      if (item.rows.end > split_points_.at(document)) continue;
      is_left = true;
      candidates_.push_back(assignment_.find_own(donor_, item));
    }
    return !is_left;
  });
  std::sort(candidates_.begin(), candidates_.end());
  candidates_.erase(std::unique(candidates_.begin(), candidates_.end()), candidates_.end());
  assignment_.spend(static_cast<int64_t>(candidates_.size()));
}

std::optional<Move> Cutter::best_slice(const Request& request) {
  best_.reset();
  best_cost_ = std::numeric_limits<double>::infinity();
  list_candidates(request.most());
  for (const size_t idx : candidates_) consider(request, idx);
  return best_;
}

// Keeps the move if it costs less than the best one so far. Returns false if there is no move.
bool Cutter::keep(const Request& request, const Item& item, const std::optional<Move>& move) {
  if (!move) return false;
  const double value = cost(request, item, *move);
  if (value < best_cost_) {
    best_cost_ = value;
    best_ = move;
  }
  return true;
}

void Cutter::consider(const Request& request, size_t index) {
  const Item& item = assignment_.own(donor_)[index];
  receiver_keys_ = &assignment_.keys_on(request.receiver, item.document);
  const auto keep_cut = [&](Range part, From from) {
    return keep(request, item, cut(request, index, part, from));
  };
  const int64_t end = split_point_of(request, item);
  if (request.is_thrifty && !gives_all_ && end == item.rows.end && item.seconds < request.most()) {
    const double num_first =
        (1 - problem_.heuristics.thrifty_part) * static_cast<double>(num_rows(item.rows));
    const int64_t tile = problem_.options.cost.tile_q;
    const int64_t first = item.rows.begin + static_cast<int64_t>(num_first) / tile * tile;
    if (keep_cut({first, end}, From::kEnd)) return;
  }
  const std::optional<Move> below = cut(request, index, {item.rows.begin, end}, From::kEnd);
  keep(request, item, below);
  if (below && below->relief >= request.target) {
    keep_cut({item.rows.begin, last_split_point(problem_, item, end, request.target)}, From::kEnd);
  }
  if (!below || gives_all_ || problem_.options.mask.window_left >= 0) {
    keep_cut(item.rows, From::kBegin);
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

bool Cutter::complete(const Request& request, const Item& item, Range slice, Move& move) const {
  const Range head{item.rows.begin, slice.begin}, tail{slice.end, item.rows.end};
  move.slice = slice;
  move.relief =
      item.seconds - problem_.seconds(item.document, head) - problem_.seconds(item.document, tail);
  move.seconds = problem_.seconds(item.document, slice);
  move.bytes = assignment_.bytes_of(item.document, slice, *receiver_keys_);
  return move.seconds <= request.capacity && static_cast<double>(move.bytes) <= request.max_bytes &&
         assignment_.links_fit(move);
}

// Returns a slice at one end of `part`.
std::optional<Move> Cutter::cut(const Request& request, size_t index, Range part, From from) const {
  assignment_.spend(kStepsPerCut);
  const Item& item = assignment_.own(donor_)[index];
  const Grid points{item.rows, problem_.options.cost.tile_q};
  const int64_t first = points.index(part.begin), last = points.index(part.end);
  const auto slice = [&](int64_t count) {
    return from == From::kEnd ? Range{points.at(last - count), points.at(last)}
                              : Range{points.at(first), points.at(first + count)};
  };
  const auto seconds = [&](int64_t count) { return problem_.seconds(item.document, slice(count)); };
  Move move{donor_, request.receiver, index, {}, 0, 0, 0};
  int64_t count = last_within(last - first, request.most(), seconds);
  if (count < last - first && request.target <= request.capacity &&
      seconds(count) < request.target && seconds(count + 1) <= request.capacity) {
    ++count;
  }
  if (count == 0) return std::nullopt;
  if (!complete(request, item, slice(count), move)) {
    count = last_true(0, count - 1,
                      [&](int64_t c) { return c == 0 || complete(request, item, slice(c), move); });
    if (count == 0 || !complete(request, item, slice(count), move)) return std::nullopt;
  }
  if (move.relief < problem_.min_relief && !gives_all_) return std::nullopt;
  return move;
}

// Returns bytes per sqrt(second) of relief. Bytes include a part of the least bytes of the missing
// target. For a donor that gives all its work, they include the cost of the rest.
double Cutter::cost(const Request& request, const Item& item, const Move& move) const {
  double bytes = static_cast<double>(move.bytes);
  if (request.is_thrifty) return bytes / move.relief;
  const double missing = std::max(0.0, request.most() - move.relief);
  bytes += problem_.heuristics.missing_part * problem_.bytes_per_root_second * std::sqrt(missing);
  if (!gives_all_) return bytes / std::sqrt(move.relief);
  for (const Range rest :
       {Range{item.rows.begin, move.slice.begin}, Range{move.slice.end, item.rows.end}}) {
    bytes += static_cast<double>(assignment_.bytes_of(item.document, rest));
  }
  return bytes - static_cast<double>(assignment_.bytes_of(item.document, item.rows));
}

}  // namespace distca::planner
