#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../model/plan.h"
#include "../model/ranges.h"

namespace distca::planner {

// The visiting tasks of one document on one server.
struct Visit {
  int64_t document;
  std::vector<Range> queries;  // of its tasks, in order
  RangeSet keys;               // the union of its tasks' keys
  bool is_kept;                // whether their inputs are
};

// The tasks of one server, in plan order.
std::span<const Task> tasks_of(const Plan& plan, int64_t server);

// Visits of one server, given its tasks in plan order.
std::vector<Visit> visits_of(const Pack& pack, const Mask& mask, std::span<const Task> tasks);

// Positions of a document's rows that one rank is home to.
struct HomeRun {
  Range positions;
  int64_t row;  // of keys
  int64_t q_row;
};

// The rows that a rank is home to, by document and position.
class HomeRuns {
 public:
  // Throws std::invalid_argument for a bad rank.
  HomeRuns(const Pack& pack, int64_t rank);

  int64_t rank() const { return rank_; }
  std::span<const HomeRun> of(int64_t document) const {
    return {runs_.data() + first_[document],
            static_cast<size_t>(first_[document + 1] - first_[document])};
  }

  // Calls visit(first home row, positions) for every part of `range` that is here, in order; `row`
  // says whether rows of keys or of queries.
  template <typename Visitor>
  void for_each_part(int64_t document, int64_t HomeRun::*row, Range range, Visitor&& visit) const {
    const std::span<const HomeRun> runs = of(document);
    auto run = std::partition_point(runs.begin(), runs.end(), [range](const HomeRun& run) {
      return run.positions.end <= range.begin;
    });
    for (; run != runs.end() && run->positions.begin < range.end; ++run) {
      const Range part = intersect(run->positions, range);
      visit((*run).*row + part.begin - run->positions.begin, part);
    }
  }

 private:
  int64_t rank_;
  std::vector<HomeRun> runs_;
  std::vector<int32_t> first_;  // [documents + 1] index into runs_
};

}  // namespace distca::planner
