#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

// Counts and ranges of rows. Like all of csrc/core, it uses the standard library only.
namespace distca {

// Row indices are int32 in layouts and on devices.
constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

constexpr int64_t ceil_div(int64_t count, int64_t divisor) {
  return (count + divisor - 1) / divisor;
}

constexpr int64_t round_up(int64_t count, int64_t multiple) {
  return ceil_div(count, multiple) * multiple;
}

// [begin, end)
struct Range {
  int64_t begin;
  int64_t end;
};

constexpr int64_t num_rows(Range range) {
  return range.end - range.begin;
}

// If the ranges do not meet, the length is minus their distance.
constexpr Range intersect(Range a, Range b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

constexpr int64_t num_shared(Range a, Range b) {
  return std::max<int64_t>(0, num_rows(intersect(a, b)));
}

// What is left of `rows`, before and after a part of them.
constexpr std::array<Range, 2> outside(Range part, Range rows) {
  return {Range{rows.begin, part.begin}, Range{part.end, rows.end}};
}

// Consecutive rows, or slots.
struct Run {
  int64_t first;
  int64_t length;
};

}  // namespace distca
