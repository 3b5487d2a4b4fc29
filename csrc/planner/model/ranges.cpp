#include "ranges.h"

namespace distca::planner {

void RangeSet::insert(Range range) {
  if (range.begin >= range.end) return;
  auto first = std::lower_bound(ranges_.begin(), ranges_.end(), range.begin,
                                [](Range held, int64_t begin) { return held.end < begin; });
  auto last = first;
  for (; last != ranges_.end() && last->begin <= range.end; ++last) {
    range = {std::min(range.begin, last->begin), std::max(range.end, last->end)};
  }
  if (first == last) {
    ranges_.insert(first, range);
  } else {
    *first = range;
    ranges_.erase(first + 1, last);
  }
}

int64_t RangeSet::num_shared(Range range) const {
  auto held = std::lower_bound(ranges_.begin(), ranges_.end(), range.begin,
                               [](Range held, int64_t begin) { return held.end <= begin; });
  int64_t count = 0;
  for (; held != ranges_.end() && held->begin < range.end; ++held) {
    count += distca::num_shared(*held, range);
  }
  return count;
}

}  // namespace distca::planner
