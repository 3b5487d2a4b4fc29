#include "recut.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace distca::planner {
namespace {

constexpr size_t kMaxSlices = 8;        // of a document; with more, split points matter less
constexpr int64_t kNumSplitPoints = 8;  // tried for the first slice before those near the best

// One document and the receivers that have rows of it.
class Recut {
 public:
  Recut(Assignment& assignment, const PlanOptions& options, const Weights& weights,
        std::span<const Placement> old);

  void run(std::span<const double> max_bytes);

 private:
  struct Row {
    double bytes = std::numeric_limits<double>::infinity();
    std::vector<Range> slices;  // downward, one for each of the first receivers
  };

  double bytes(Range slice) const;
  Row row_from(int64_t end, std::span<const double> max_bytes) const;
  Row best_row(std::span<const double> max_bytes) const;
  bool gives_enough(const std::vector<Range>& slices) const;
  bool give(const std::vector<Range>& slices);

  Assignment& assignment_;
  const PlanOptions& options_;
  const int64_t donor_;
  Item whole_;
  std::vector<Placement> old_;  // by falling capacity
  double max_rest_;             // seconds of the document that the donor may keep
  double old_bytes_ = 0;
  Cutter cutter_;
};

double capacity_of(const Assignment& assignment, const Placement& placement) {
  return assignment.seconds(placement.document, placement.rows) -
         assignment.surplus(placement.receiver);
}

std::vector<Placement> by_capacity(const Assignment& assignment, std::span<const Placement> old) {
  std::vector<Placement> sorted(old.begin(), old.end());
  std::sort(sorted.begin(), sorted.end(), [&](const Placement& a, const Placement& b) {
    return std::pair(-capacity_of(assignment, a), a.receiver) <
           std::pair(-capacity_of(assignment, b), b.receiver);
  });
  return sorted;
}

std::vector<double> capacities_of(const Assignment& assignment,
                                  const std::vector<Placement>& sorted) {
  std::vector<double> capacities;
  capacities.reserve(sorted.size());
  for (const Placement& placement : sorted)
    capacities.push_back(capacity_of(assignment, placement));
  return capacities;
}

Recut::Recut(Assignment& assignment, const PlanOptions& options, const Weights& weights,
             std::span<const Placement> old)
    : assignment_(assignment),
      options_(options),
      donor_(old[0].donor),
      whole_(assignment.whole(old[0].document)),
      old_(by_capacity(assignment, old)),
      max_rest_(std::max(0.0, -assignment.surplus(donor_))),
      cutter_(assignment, options, weights, donor_, capacities_of(assignment, old_)) {
  for (const Item& item : assignment.own_of(donor_, whole_.document)) {
    max_rest_ += item.seconds;
  }
  for (const Placement& placement : old_) old_bytes_ += bytes(placement.rows);
}

double Recut::bytes(Range slice) const {
  return static_cast<double>(assignment_.bytes_of(whole_.document, slice, RangeSet()));
}

// Returns infinite bytes if a slice exceeds its receiver's capacity, or the donor keeps too much.
Recut::Row Recut::row_from(int64_t end, std::span<const double> max_bytes) const {
  const double target = whole_.seconds - max_rest_;
  Row row{0, cutter_.row_of_slices(whole_, options_.cost.tile_q, end, target)};
  for (size_t i = 0; i < row.slices.size(); ++i) {
    const int64_t receiver = old_[i].receiver;
    if (assignment_.seconds(whole_.document, row.slices[i]) > capacity_of(assignment_, old_[i]))
      return {};
    const double added = bytes(row.slices[i]) - bytes(old_[i].rows);
    const double total = static_cast<double>(assignment_.bytes_in(receiver)) + added;
    if (added > 0 && total > max_bytes[receiver]) return {};
    row.bytes += bytes(row.slices[i]);
  }
  return gives_enough(row.slices) ? row : Row{};
}

// Returns whether the donor keeps no more than it may.
bool Recut::gives_enough(const std::vector<Range>& slices) const {
  double kept = 0;
  int64_t end = whole_.rows.end;
  for (const Range slice : slices) {
    kept += assignment_.seconds(whole_.document, {slice.end, end});
    end = slice.begin;
  }
  return kept + assignment_.seconds(whole_.document, {whole_.rows.begin, end}) <= max_rest_;
}

// Tries evenly spread split points of the first slice, then ever closer ones around the best.
Recut::Row Recut::best_row(std::span<const double> max_bytes) const {
  const int64_t grain = options_.cost.tile_q;
  const int64_t last = (num_rows(whole_.rows) + grain - 1) / grain;
  int64_t step = std::max<int64_t>(1, last / kNumSplitPoints);
  int64_t best_index = last;
  Row best;
  const auto try_split_point = [&](int64_t index) {
    if (index < 1 || index > last) return;
    const int64_t end = std::min(whole_.rows.end, whole_.rows.begin + index * grain);
    Row row = row_from(end, max_bytes);
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
bool Recut::give(const std::vector<Range>& slices) {
  for (size_t i = 0; i < slices.size(); ++i) {
    const Move move = assignment_.move_of({whole_.document, donor_, old_[i].receiver, slices[i]});
    if (!assignment_.links_fit(move)) return false;
    assignment_.apply(move);
  }
  return true;
}

void Recut::run(std::span<const double> max_bytes) {
  const Row row = best_row(max_bytes);
  if (row.bytes >= old_bytes_) return;
  assignment_.take_back(old_);
  if (give(row.slices)) return;
  assignment_.take_back(old_);
  for (const Placement& placement : old_) assignment_.apply(assignment_.move_of(placement));
}

bool has_receiver_twice(std::span<const Placement> placements) {
  for (size_t i = 0; i < placements.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (placements[i].receiver == placements[j].receiver) return true;
    }
  }
  return false;
}

}  // namespace

void recut(Assignment& assignment, const PlanOptions& options, const Weights& weights,
           std::span<const double> max_bytes) {
  if (options.mask.window_left >= 0) return;  // keys follow their slices, wherever these are
  const std::vector<Placement> all = assignment.placements();
  for (size_t first = 0, last = 0; first < all.size() && !assignment.is_budget_spent();
       first = last) {
    while (last < all.size() && all[last].document == all[first].document) ++last;
    const std::span<const Placement> old(all.data() + first, last - first);
    if (old.size() > kMaxSlices || has_receiver_twice(old)) continue;
    Recut(assignment, options, weights, old).run(max_bytes);
  }
}

}  // namespace distca::planner
