#include "slices.h"

#include <cmath>

namespace distca::planner {
namespace {

// Returns the longest slice down from `end` of at most `most` seconds, but at least a tile.
Range slice_below(const Problem& problem, const Item& item, int64_t end, double most) {
  const Grid points{item.rows, problem.options.cost.tile_q};
  const int64_t last = points.index(end);
  const auto slice = [&](int64_t count) { return Range{points.at(last - count), end}; };
  return slice(std::max<int64_t>(1, last_within(last, most, [&](int64_t count) {
                                   return problem.seconds(item.document, slice(count));
                                 })));
}

// Returns the slice that holds the target, or the longest one below it if that exceeds the
// capacity.
Range last_slice(const Problem& problem, const Item& item, int64_t end, double target,
                 double capacity) {
  const Grid points{item.rows, problem.options.cost.tile_q};
  end = points.at(points.index(last_split_point(problem, item, end, target)));
  const Range below = slice_below(problem, item, end, target);
  if (problem.seconds(item.document, below) >= target) return below;
  const Range above{std::max(item.rows.begin, below.begin - points.tile), end};
  return problem.seconds(item.document, above) <= capacity ? above : below;
}

}  // namespace

int64_t last_split_point(const Problem& problem, const Item& item, int64_t end, double target) {
  const double bytes =
      problem.heuristics.keys_part * problem.bytes_per_root_second * std::sqrt(target);
  const auto key_bytes = static_cast<double>(std::max<int64_t>(1, problem.options.row_bytes.key));
  const auto num_keys = static_cast<int64_t>(std::min(bytes / key_bytes, static_cast<double>(end)));
  const Range first_rows{item.rows.begin, std::max(item.rows.begin, num_keys)};
  return problem.seconds(item.document, first_rows) < target ? end : first_rows.end;
}

std::vector<Range> row_of_slices(const Problem& problem, const Item& item, int64_t end,
                                 double target, std::span<const double> capacities) {
  std::vector<Range> slices;
  for (const double capacity : capacities) {
    if (target <= 0 || end <= item.rows.begin) break;
    slices.push_back(target <= capacity ? last_slice(problem, item, end, target, capacity)
                                        : slice_below(problem, item, end, capacity));
    target -= problem.seconds(item.document, slices.back());
    end = slices.back().begin;
  }
  return slices;
}

}  // namespace distca::planner
