#pragma once

#include <algorithm>
#include <tuple>
#include <vector>

#include "pack.h"
#include "plan.h"

namespace distca::planner {

inline int64_t num_rows(Range range) {
  return range.end - range.begin;
}

// May be negative: the distance between ranges that do not meet.
inline Range intersect(Range a, Range b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

inline int64_t num_shared(Range a, Range b) {
  return std::max<int64_t>(0, num_rows(intersect(a, b)));
}

inline Range positions(const Segment& segment) {
  return {segment.start, segment.start + segment.length};
}

inline Range queries(const Task& task) {
  return {task.q_begin, task.q_end};
}

inline bool in_plan_order(const Task& a, const Task& b) {
  return std::tie(a.server, a.document, a.q_begin) < std::tie(b.server, b.document, b.q_begin);
}

// Sorted disjoint ranges that do not touch.
class RangeSet {
 public:
  void insert(Range range);
  int64_t num_shared(Range range) const;
  const std::vector<Range>& ranges() const { return ranges_; }

 private:
  std::vector<Range> ranges_;
};

// First segment of `document` that ends after `position`.
std::vector<Segment>::const_iterator segment_at(const Document& document, int64_t position);

// Calls visit(segment, positions) for every part of `range` that one segment holds, in order.
template <typename Visit>
void for_each_segment(const Document& document, Range range, Visit visit) {
  auto segment = segment_at(document, range.begin);
  for (; segment != document.segments.end() && segment->start < range.end; ++segment) {
    visit(*segment, intersect(positions(*segment), range));
  }
}

// A home task has its query rows and all their keys in one segment of its server.
bool is_home(const Pack& pack, const Mask& mask, const Task& task);

}  // namespace distca::planner
