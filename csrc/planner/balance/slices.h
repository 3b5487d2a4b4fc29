#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "problem.h"

namespace distca::planner {

// Split points of an item: multiples of a tile's rows from its first row, and its end.
struct Grid {
  int64_t index(int64_t position) const { return (position - rows.begin + tile - 1) / tile; }
  int64_t at(int64_t index) const { return std::min(rows.end, rows.begin + index * tile); }

  Range rows;
  int64_t tile;
};

// Returns the greatest count in [low, high] for which `holds` is true. It must be true for `low`,
// and stay false once it is false.
template <typename Predicate>
int64_t last_true(int64_t low, int64_t high, Predicate holds) {
  if (holds(high)) return high;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

// Returns the upper end of a document's last slice, which holds the target. The slice need not
// touch earlier ones, so it may end where its keys take about `keys_part` of its least bytes.
int64_t last_split_point(const Problem& problem, const Item& item, int64_t end, double target);

// Returns the greatest count in [0, high] whose seconds, which grow with it, are at most `most`.
// Seconds of causal rows are a parabola, so its root through the middle is exact. For other masks
// interpolation comes close, and every third step bisects.
template <typename Seconds>
int64_t last_within(int64_t high, double most, Seconds seconds) {
  int64_t low = 0;
  double below = 0, above = seconds(high);
  if (above <= most) return high;
  const auto split_at = [&](double point) {
    const int64_t count = std::clamp(static_cast<int64_t>(point), low + 1, high - 1);
    const double value = seconds(count);
    (value <= most ? low : high) = count;
    (value <= most ? below : above) = value;
    return value / static_cast<double>(count);
  };
  if (high > 3) {
    const auto whole = static_cast<double>(high), half = static_cast<double>(high / 2);
    const double mean = above / whole, first_mean = split_at(half);
    const double bend = (mean - first_mean) / (whole - half);
    const double slope = first_mean - bend * half;
    const double root = slope + std::sqrt(std::max(0.0, slope * slope + 4 * bend * most));
    const double guess = root > 0 ? std::floor(std::min(whole, 2 * most / root)) : half;
    if (high - low > 1) split_at(guess);
    if (high - low > 1) split_at(static_cast<double>(low) == guess ? guess + 1 : guess - 1);
  }
  for (int i = 1; high - low > 1; ++i) {
    const double part = i % 3 == 0 ? 0.5 : (most - below) / (above - below);
    split_at(static_cast<double>(low) + part * static_cast<double>(high - low));
  }
  return low;
}

// Returns slices of an item cut downward from `end`, one per capacity, until they hold the target.
std::vector<Range> row_of_slices(const Problem& problem, const Item& item, int64_t end,
                                 double target, std::span<const double> capacities);

}  // namespace distca::planner
