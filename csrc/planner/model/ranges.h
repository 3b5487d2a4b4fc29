#pragma once

#include <algorithm>
#include <span>
#include <tuple>
#include <vector>

#include "pack.h"
#include "plan.h"

namespace distca::planner {

inline Range positions(const Segment& segment) {
  return {segment.start, segment.start + segment.length};
}

// Returns the positions of the segment's queries.
inline Range queries(const Segment& segment, const Document& document) {
  const Range held = positions(segment);
  return {std::clamp(document.first_query, held.begin, held.end), held.end};
}

inline Range queries(const Task& task) {
  return {task.q_begin, task.q_end};
}

inline bool in_plan_order(const Task& a, const Task& b) {
  return std::tie(a.server, a.document, a.q_begin) < std::tie(b.server, b.document, b.q_begin);
}

// Calls visit(tasks) for all tasks of one document on one server, one after the other. `tasks` are
// in plan order.
template <typename Visit>
void for_each_visit(std::span<const Task> tasks, Visit visit) {
  for (auto first = tasks.begin(); first != tasks.end();) {
    const auto last = std::find_if(first, tasks.end(), [first](const Task& task) {
      return task.server != first->server || task.document != first->document;
    });
    visit(std::span(first, last));
    first = last;
  }
}

// Sorted disjoint ranges that do not touch.
class RangeSet {
 public:
  void insert(Range range) {
    if (range.begin >= range.end) return;
    const auto first = std::partition_point(ranges_.begin(), ranges_.end(),
                                            [&](Range held) { return held.end < range.begin; });
    auto last = first;
    for (; last != ranges_.end() && last->begin <= range.end; ++last) {
      range = {std::min(range.begin, last->begin), std::max(range.end, last->end)};
    }
    ranges_.insert(ranges_.erase(first, last), range);
  }
  void clear() { ranges_.clear(); }
  int64_t num_shared(Range range) const {
    int64_t count = 0;
    for (const Range held : ranges_) count += distca::num_shared(held, range);
    return count;
  }
  const std::vector<Range>& ranges() const { return ranges_; }

 private:
  std::vector<Range> ranges_;
};

// Index of the first segment that ends after `position`.
inline size_t segment_at(std::span<const Segment> segments, int64_t position) {
  if (segments.size() == 1) return 0;
  const auto at = std::partition_point(
      segments.begin(), segments.end(),
      [position](const Segment& segment) { return segment.start + segment.length <= position; });
  return static_cast<size_t>(at - segments.begin());
}

// Calls visit(segment, positions) for every part of `range` that one segment holds, in order.
template <typename Visit>
void for_each_segment(std::span<const Segment> segments, Range range, Visit visit) {
  for (size_t i = segment_at(segments, range.begin); i < segments.size(); ++i) {
    if (segments[i].start >= range.end) break;
    visit(segments[i], intersect(positions(segments[i]), range));
  }
}

// A home task has its query rows and all their keys in one segment of its server.
inline bool is_home(std::span<const Segment> segments, Range rows, Range keys, int64_t server) {
  const Segment& segment = segments[segment_at(segments, rows.begin)];
  return segment.rank == server && keys.begin >= segment.start &&
         keys.end <= segment.start + segment.length;  // keys include the queries' own positions
}

inline bool is_home(const Pack& pack, const Mask& mask, const Task& task) {
  const Document& document = pack.documents[task.document];
  return is_home(pack.segments_of(document), queries(task),
                 keys_of(mask, queries(task), document.length), task.server);
}

}  // namespace distca::planner
