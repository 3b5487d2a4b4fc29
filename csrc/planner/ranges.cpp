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
    count += planner::num_shared(*held, range);
  }
  return count;
}

std::vector<Segment>::const_iterator segment_at(const Document& document, int64_t position) {
  return std::partition_point(
      document.segments.begin(), document.segments.end(),
      [position](const Segment& segment) { return segment.start + segment.length <= position; });
}

bool is_home(const Pack& pack, const Mask& mask, const Task& task) {
  const Document& document = pack.documents[task.document];
  const Segment& segment = *segment_at(document, task.q_begin);
  if (segment.rank != task.server) return false;
  const Range rows = positions(segment);
  const Range keys = keys_of(mask, queries(task), document.length);  // the queries' own included
  return keys.begin >= rows.begin && keys.end <= rows.end;
}

}  // namespace distca::planner
