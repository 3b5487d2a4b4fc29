#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "schedule.h"
#include "slices.h"

namespace distca::planner {
namespace {

double capacity_of(const Assignment& assignment, const Task& task) {
  return assignment.problem().seconds(task.document, queries(task)) -
         assignment.surplus(task.server);
}

// One document and the receivers that have rows of it.
class Recut {
 public:
  // `old` are the document's tasks away from home, by descending capacity.
  Recut(Assignment& assignment, std::span<const Task> old, std::span<const double> most_bytes)
      : assignment_(assignment),
        problem_(assignment.problem()),
        most_bytes_(most_bytes),
        old_(old),
        donor_(assignment.home_of(old[0].document)),
        whole_(assignment.whole(old[0].document)),
        max_kept_(std::max(0.0, -assignment.surplus(donor_))) {
    for (const Item& item : assignment.own_of(donor_, whole_.document)) max_kept_ += item.seconds;
    for (const Task& task : old) capacities_.push_back(capacity_of(assignment, task));
  }

  void run() {
    double old_bytes = 0;
    for (const Task& task : old_) old_bytes += bytes(queries(task));
    const Row row = best_row();
    if (row.bytes >= old_bytes) return;
    assignment_.take_back(old_);
    if (give(row.slices)) return;
    assignment_.take_back(old_);
    for (const Task& task : old_) assignment_.apply(assignment_.move_of(task));
  }

 private:
  struct Row {
    double bytes = std::numeric_limits<double>::infinity();
    std::vector<Range> slices;  // downward, one for each of the first receivers
  };

  double seconds(Range rows) const { return problem_.seconds(whole_.document, rows); }
  double bytes(Range slice) const {
    return static_cast<double>(assignment_.bytes_of(whole_.document, slice));
  }

  // Returns infinite bytes if a slice exceeds its receiver's capacity, or the donor keeps too much.
  Row row_from(int64_t end) const {
    assignment_.spend(static_cast<int64_t>(capacities_.size()));
    Row row{0, row_of_slices(problem_, whole_, end, whole_.seconds - max_kept_, capacities_)};
    double kept = 0;
    int64_t kept_end = whole_.rows.end;
    for (size_t i = 0; i < row.slices.size(); ++i) {
      const Range slice = row.slices[i];
      if (seconds(slice) > capacities_[i]) return {};
      const double added = bytes(slice) - bytes(queries(old_[i]));
      const double total = static_cast<double>(assignment_.load(old_[i].server).bytes_in) + added;
      if (added > 0 && total > most_bytes_[old_[i].server]) return {};
      row.bytes += bytes(slice);
      kept += seconds({slice.end, kept_end});
      kept_end = slice.begin;
    }
    return kept + seconds({whole_.rows.begin, kept_end}) <= max_kept_ ? row : Row{};
  }

  // Tries evenly spread split points of the first slice, then ever closer ones around the best.
  Row best_row() const {
    const Grid points{whole_.rows, problem_.options.cost.tile_q};
    const int64_t last = points.index(whole_.rows.end);
    int64_t step = std::max<int64_t>(1, last / problem_.heuristics.num_recut_points);
    int64_t best_index = last;
    Row best;
    const auto try_split_point = [&](int64_t index) {
      if (index < 1 || index > last) return;
      Row row = row_from(points.at(index));
      if (row.bytes >= best.bytes) return;
      best = std::move(row);
      best_index = index;
    };
    for (int64_t index = last; index >= 1; index -= step) try_split_point(index);
    while (step > 1) {
      step = (step + 1) / 2;
      const int64_t middle = best_index;
      try_split_point(middle + step);
      try_split_point(middle - step);
    }
    return best;
  }

  // Applies the slices. Stops at the first that exceeds links or memory, and returns false.
  bool give(const std::vector<Range>& slices) {
    for (size_t i = 0; i < slices.size(); ++i) {
      const auto& [begin, end] = slices[i];
      const Move move = assignment_.move_of({whole_.document, begin, end, old_[i].server});
      if (!assignment_.links_fit(move)) return false;
      assignment_.apply(move);
    }
    return true;
  }

  Assignment& assignment_;
  const Problem& problem_;
  const std::span<const double> most_bytes_;
  const std::span<const Task> old_;
  const int64_t donor_;
  const Item whole_;
  std::vector<double> capacities_;  // of the receivers without their old slices
  double max_kept_;                 // seconds of the document that the donor may keep
};

}  // namespace

void recut(Assignment& assignment, std::span<const double> most_bytes) {
  const Problem& problem = assignment.problem();
  if (problem.options.mask.window_left >= 0)
    return;  // keys follow their slices, wherever these are
  std::vector<Task> tasks = assignment.tasks_away();
  for (auto first = tasks.begin(); first != tasks.end() && !assignment.is_budget_spent();) {
    const auto last = std::find_if(
        first, tasks.end(), [&](const Task& task) { return task.document != first->document; });
    const std::span<Task> old(first, last);
    first = last;
    if (static_cast<int>(old.size()) > problem.heuristics.max_recut_slices) continue;
    const auto on_same_server = [](const Task& a, const Task& b) { return a.server == b.server; };
    std::sort(old.begin(), old.end(),
              [](const Task& a, const Task& b) { return a.server < b.server; });
    if (std::adjacent_find(old.begin(), old.end(), on_same_server) != old.end()) continue;
    std::stable_sort(old.begin(), old.end(), [&](const Task& a, const Task& b) {
      return capacity_of(assignment, a) > capacity_of(assignment, b);
    });
    Recut(assignment, old, most_bytes).run();
  }
}

}  // namespace distca::planner
