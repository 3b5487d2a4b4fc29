#include "slices.h"

#include <cmath>

namespace distca::planner {
namespace {

// Returns the longest slice down from `end` of at most `most` seconds, but at least a tile.
Range slice_below(const Problem& problem, const Item& item, int64_t end, double most) {
  const Grid points{item.rows, problem.options.cost.tile_q};
  const int64_t last = points.index(end);
  const auto slice = [&](int64_t count) { return Range{points.at(last - count), end}; };
  return slice(last_true(1, last, [&](int64_t count) {
    return problem.seconds(item.document, slice(count)) <= most;
  }));
}

// Returns the slice that holds the target, or the longest one below it if that exceeds the
// capacity. It need not touch earlier slices, so it ends where its keys take about their part of
// the least bytes for its work.
Range last_slice(const Problem& problem, const Item& item, int64_t end, double target,
                 double capacity) {
  const double bytes =
      problem.heuristics.keys_part * problem.bytes_per_root_second * std::sqrt(target);
  const auto key_bytes = static_cast<double>(std::max<int64_t>(1, problem.options.row_bytes.key));
  const auto num_keys = static_cast<int64_t>(std::min(bytes / key_bytes, static_cast<double>(end)));
  const Range first_rows{item.rows.begin, std::max(item.rows.begin, num_keys)};
  const Grid points{item.rows, problem.options.cost.tile_q};
  if (problem.seconds(item.document, first_rows) >= target) {
    end = points.at(points.index(first_rows.end));
  }
  const Range below = slice_below(problem, item, end, target);
  if (problem.seconds(item.document, below) >= target) return below;
  const Range above{std::max(item.rows.begin, below.begin - points.tile), end};
  return problem.seconds(item.document, above) <= capacity ? above : below;
}

}  // namespace

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
