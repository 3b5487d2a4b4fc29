#include "recut.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "slices.h"

namespace distca::planner {
namespace {

// One document and the receivers that have rows of it.
class Recut {
 public:
  Recut(Assignment& assignment, std::vector<Placement> by_capacity,
        std::span<const double> most_bytes);

  void run();

 private:
  struct Row {
    double bytes = std::numeric_limits<double>::infinity();
    std::vector<Range> slices;  // downward, one for each of the first receivers
  };

  double bytes(Range slice) const;
  Row row_from(int64_t end) const;
  Row best_row() const;
  double seconds_kept(const std::vector<Range>& slices) const;
  bool give(const std::vector<Range>& slices);

  Assignment& assignment_;
  const Problem& problem_;
  const std::span<const double> most_bytes_;
  const std::vector<Placement> old_;  // by descending capacity
  const int64_t donor_;
  const Item whole_;
  std::vector<double> capacities_;  // of the receivers without their old slices
  double max_kept_;                 // seconds of the document that the donor may keep
};

double capacity_of(const Assignment& assignment, const Placement& placement) {
  return assignment.problem().seconds(placement.document, placement.rows) -
         assignment.surplus(placement.receiver);
}

Recut::Recut(Assignment& assignment, std::vector<Placement> by_capacity,
             std::span<const double> most_bytes)
    : assignment_(assignment),
      problem_(assignment.problem()),
      most_bytes_(most_bytes),
      old_(std::move(by_capacity)),
      donor_(old_[0].donor),
      whole_(assignment.whole(old_[0].document)),
      max_kept_(std::max(0.0, -assignment.surplus(donor_))) {
  for (const Item& item : assignment.own_of(donor_, whole_.document)) max_kept_ += item.seconds;
  for (const Placement& each : old_) capacities_.push_back(capacity_of(assignment, each));
}

double Recut::bytes(Range slice) const {
  return static_cast<double>(assignment_.bytes_of(whole_.document, slice));
}

// Returns infinite bytes if a slice exceeds its receiver's capacity, or the donor keeps too much.
Recut::Row Recut::row_from(int64_t end) const {
  assignment_.spend(static_cast<int64_t>(capacities_.size()));
  Row row{0, row_of_slices(problem_, whole_, end, whole_.seconds - max_kept_, capacities_)};
  for (size_t i = 0; i < row.slices.size(); ++i) {
    if (problem_.seconds(whole_.document, row.slices[i]) > capacities_[i]) return {};
    const double added = bytes(row.slices[i]) - bytes(old_[i].rows);
    const double total = static_cast<double>(assignment_.load(old_[i].receiver).bytes_in) + added;
    if (added > 0 && total > most_bytes_[old_[i].receiver]) return {};
    row.bytes += bytes(row.slices[i]);
  }
  return seconds_kept(row.slices) <= max_kept_ ? row : Row{};
}

double Recut::seconds_kept(const std::vector<Range>& slices) const {
  double kept = 0;
  int64_t end = whole_.rows.end;
  for (const Range slice : slices) {
    kept += problem_.seconds(whole_.document, {slice.end, end});
    end = slice.begin;
  }
  return kept + problem_.seconds(whole_.document, {whole_.rows.begin, end});
}

// Tries evenly spread split points of the first slice, then ever closer ones around the best.
Recut::Row Recut::best_row() const {
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
bool Recut::give(const std::vector<Range>& slices) {
  for (size_t i = 0; i < slices.size(); ++i) {
    const Move move = assignment_.move_of({whole_.document, donor_, old_[i].receiver, slices[i]});
    if (!assignment_.links_fit(move)) return false;
    assignment_.apply(move);
  }
  return true;
}

void Recut::run() {
  double old_bytes = 0;
  for (const Placement& each : old_) old_bytes += bytes(each.rows);
  const Row row = best_row();
  if (row.bytes >= old_bytes) return;
  assignment_.take_back(old_);
  if (give(row.slices)) return;
  assignment_.take_back(old_);
  for (const Placement& each : old_) assignment_.apply(assignment_.move_of(each));
}

}  // namespace

void recut(Assignment& assignment, std::span<const double> most_bytes) {
  const Problem& problem = assignment.problem();
  if (problem.options.mask.window_left >= 0)
    return;  // keys follow their slices, wherever these are
  const std::vector<Placement> all = assignment.placements();
  for (auto first = all.begin(); first != all.end() && !assignment.is_budget_spent();) {
    const auto last = std::find_if(
        first, all.end(), [&](const Placement& each) { return each.document != first->document; });
    std::vector<Placement> old(first, last);
    first = last;
    if (static_cast<int>(old.size()) > problem.heuristics.max_recut_slices) continue;
    std::sort(old.begin(), old.end(), [&](const Placement& a, const Placement& b) {
      return std::pair(-capacity_of(assignment, a), a.receiver) <
             std::pair(-capacity_of(assignment, b), b.receiver);
    });
    const auto has_same_receiver = [&](const Placement& a) {
      return std::count_if(old.begin(), old.end(),
                           [&](const Placement& b) { return a.receiver == b.receiver; }) > 1;
    };
    if (std::any_of(old.begin(), old.end(), has_same_receiver)) continue;
    Recut(assignment, std::move(old), most_bytes).run();
  }
}

}  // namespace distca::planner
