#include "recut.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace distca::planner {
namespace {

constexpr size_t kMaxSlices =
    8;                           // of a document; where there are more, where they end matters less
constexpr int64_t kNumEnds = 8;  // of the first slice that are tried before those near the best

// One document and the receivers that have rows of it.
class Recut {
 public:
  Recut(Assignment& assignment, const PlanOptions& options, const Prices& prices,
        std::span<const Given> old);

  void run(std::span<const double> most_bytes);

 private:
  struct Row {
    double bytes = std::numeric_limits<double>::infinity();
    std::vector<Range> slices;  // downward, one for each of the first receivers
  };

  double bytes(Range slice) const;
  Row row_from(int64_t end, std::span<const double> most_bytes) const;
  Row best_row(std::span<const double> most_bytes) const;
  bool gives_enough(const std::vector<Range>& slices) const;
  bool give(const std::vector<Range>& slices);

  Assignment& assignment_;
  const PlanOptions& options_;
  const int64_t donor_;
  Share whole_;
  std::vector<Given> old_;  // by falling room
  double most_kept_;        // seconds that the donor may keep of the document
  double old_bytes_ = 0;
  Cutter cutter_;
};

double room_of(const Assignment& assignment, const Given& given) {
  return assignment.seconds(given.document, given.rows) - assignment.surplus(given.receiver);
}

std::vector<Given> by_room(const Assignment& assignment, std::span<const Given> old) {
  std::vector<Given> sorted(old.begin(), old.end());
  std::sort(sorted.begin(), sorted.end(), [&](const Given& a, const Given& b) {
    return std::pair(-room_of(assignment, a), a.receiver) <
           std::pair(-room_of(assignment, b), b.receiver);
  });
  return sorted;
}

std::vector<double> rooms_of(const Assignment& assignment, const std::vector<Given>& sorted) {
  std::vector<double> rooms;
  rooms.reserve(sorted.size());
  for (const Given& given : sorted) rooms.push_back(room_of(assignment, given));
  return rooms;
}

Recut::Recut(Assignment& assignment, const PlanOptions& options, const Prices& prices,
             std::span<const Given> old)
    : assignment_(assignment),
      options_(options),
      donor_(old[0].donor),
      whole_(assignment.whole(old[0].document)),
      old_(by_room(assignment, old)),
      most_kept_(std::max(0.0, -assignment.surplus(donor_))),
      cutter_(assignment, options, prices, donor_, rooms_of(assignment, old_)) {
  for (const Share& share : assignment.own_of(donor_, whole_.document)) {
    most_kept_ += share.seconds;
  }
  for (const Given& given : old_) old_bytes_ += bytes(given.rows);
}

double Recut::bytes(Range slice) const {
  return static_cast<double>(assignment_.bytes_of(whole_.document, slice, RangeSet()));
}

// Infinite bytes where a receiver has no room for its slice, or the donor keeps too much.
Recut::Row Recut::row_from(int64_t end, std::span<const double> most_bytes) const {
  const double wanted = whole_.seconds - most_kept_;
  Row row{0, cutter_.row_of_slices(whole_, options_.cost.tile_q, end, wanted)};
  for (size_t i = 0; i < row.slices.size(); ++i) {
    const int64_t receiver = old_[i].receiver;
    if (assignment_.seconds(whole_.document, row.slices[i]) > room_of(assignment_, old_[i]))
      return {};
    const double added = bytes(row.slices[i]) - bytes(old_[i].rows);
    const double total = static_cast<double>(assignment_.bytes_in(receiver)) + added;
    if (added > 0 && total > most_bytes[receiver]) return {};
    row.bytes += bytes(row.slices[i]);
  }
  return gives_enough(row.slices) ? row : Row{};
}

// Whether the donor gives away what it has to.
bool Recut::gives_enough(const std::vector<Range>& slices) const {
  double kept = 0;
  int64_t end = whole_.rows.end;
  for (const Range slice : slices) {
    kept += assignment_.seconds(whole_.document, {slice.end, end});
    end = slice.begin;
  }
  return kept + assignment_.seconds(whole_.document, {whole_.rows.begin, end}) <= most_kept_;
}

// Of evenly spread ends of the first slice, then of ends ever nearer to the best.
Recut::Row Recut::best_row(std::span<const double> most_bytes) const {
  const int64_t grain = options_.cost.tile_q;
  const int64_t last = (num_rows(whole_.rows) + grain - 1) / grain;
  int64_t step = std::max<int64_t>(1, last / kNumEnds);
  int64_t best_index = last;
  Row best;
  const auto try_end = [&](int64_t index) {
    if (index < 1 || index > last) return;
    const int64_t end = std::min(whole_.rows.end, whole_.rows.begin + index * grain);
    Row row = row_from(end, most_bytes);
    if (row.bytes >= best.bytes) return;
    best = std::move(row);
    best_index = index;
  };
  for (int64_t index = last; index >= 1; index -= step) try_end(index);
  while (step > 1) {
    step = (step + 1) / 2;
    const int64_t middle = best_index;
    try_end(middle + step);
    try_end(middle - step);
  }
  return best;
}

// Whether links and memory have place for the slices; stops at the first that has none.
bool Recut::give(const std::vector<Range>& slices) {
  for (size_t i = 0; i < slices.size(); ++i) {
    const Move move = assignment_.move_of({whole_.document, donor_, old_[i].receiver, slices[i]});
    if (!assignment_.links_fit(move)) return false;
    assignment_.apply(move);
  }
  return true;
}

void Recut::run(std::span<const double> most_bytes) {
  const Row row = best_row(most_bytes);
  if (row.bytes >= old_bytes_) return;
  assignment_.take_back(old_);
  if (give(row.slices)) return;
  assignment_.take_back(old_);
  for (const Given& given : old_) assignment_.apply(assignment_.move_of(given));
}

bool has_receiver_twice(std::span<const Given> given) {
  for (size_t i = 0; i < given.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (given[i].receiver == given[j].receiver) return true;
    }
  }
  return false;
}

}  // namespace

void recut(Assignment& assignment, const PlanOptions& options, const Prices& prices,
           std::span<const double> most_bytes) {
  if (options.mask.window_left >= 0) return;  // keys follow their slices, wherever these are
  const std::vector<Given> all = assignment.given();
  for (size_t first = 0, last = 0; first < all.size() && !assignment.is_budget_spent();
       first = last) {
    while (last < all.size() && all[last].document == all[first].document) ++last;
    const std::span<const Given> old(all.data() + first, last - first);
    if (old.size() > kMaxSlices || has_receiver_twice(old)) continue;
    Recut(assignment, options, prices, old).run(most_bytes);
  }
}

}  // namespace distca::planner
