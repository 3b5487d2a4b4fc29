#include "memory_relief.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace distca::planner {
namespace {

// Moves rows to one receiver after the other. Rows that do not fit wait for the next receiver.
class MemoryRelief {
 public:
  MemoryRelief(Assignment& assignment, const Pack& pack, const PlanOptions& options,
               const Weights& weights, int64_t donor);

  void run();

 private:
  std::vector<int64_t> receivers() const;
  bool visits_home(const Item& item) const;
  bool give(Item& item, int64_t receiver);
  void give_to(int64_t receiver);

  Assignment& assignment_;
  const Pack& pack_;
  const PlanOptions& options_;
  const int64_t donor_;
  Cutter cutter_;
  std::vector<Item> waiting_;  // items that still visit their home, the largest first
};

MemoryRelief::MemoryRelief(Assignment& assignment, const Pack& pack, const PlanOptions& options,
                           const Weights& weights, int64_t donor)
    : assignment_(assignment),
      pack_(pack),
      options_(options),
      donor_(donor),
      cutter_(assignment, options, weights, donor, {}) {
  for (const Item& item : assignment.own(donor)) {
    if (visits_home(item)) waiting_.push_back(item);
  }
}

bool MemoryRelief::visits_home(const Item& item) const {
  const Document& document = pack_.documents[item.document];
  const Range keys = keys_of(options_.mask, item.rows, document.length);
  return !is_home(pack_.segments_of(document), item.rows, keys, donor_);
}

std::vector<int64_t> MemoryRelief::receivers() const {
  std::vector<std::pair<double, int64_t>> sorted;
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    const double left =
        options_.cap_bytes(rank) - static_cast<double>(assignment_.load(rank).held_bytes);
    if (rank != donor_ && options_.speed(rank) > 0 && left > 0) sorted.emplace_back(-left, rank);
  }
  std::sort(sorted.begin(), sorted.end());
  std::vector<int64_t> ranks;
  ranks.reserve(sorted.size());
  for (const auto& [_, rank] : sorted) ranks.push_back(rank);
  return ranks;
}

// Moves the first rows of the item and leaves the others in it. Returns whether any moved.
bool MemoryRelief::give(Item& item, int64_t receiver) {
  const size_t idx = assignment_.find_own(donor_, item);
  const Request request{receiver, item.seconds, item.seconds};
  const std::optional<Move> move = cutter_.first_rows(request, idx, options_.cost.tile_q);
  if (!move) return false;
  assignment_.apply(*move);
  item.rows.begin = move->slice.end;
  item.seconds = assignment_.seconds(item.document, item.rows);
  return true;
}

void MemoryRelief::give_to(int64_t receiver) {
  size_t num_tried = 0, num_kept = 0;
  bool has_place = true;
  while (has_place && num_tried < waiting_.size() && assignment_.is_over_cap(donor_)) {
    Item& item = waiting_[num_tried];
    if (give(item, receiver)) {
      if (num_rows(item.rows) == 0 || !visits_home(item)) ++num_tried;
      continue;
    }
    has_place = !assignment_.is_budget_spent();
    waiting_[num_kept++] = item;
    ++num_tried;
  }
  if (num_kept == num_tried) return;
  waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(num_kept),
                 waiting_.begin() + static_cast<std::ptrdiff_t>(num_tried));
}

void MemoryRelief::run() {
  for (const int64_t receiver : receivers()) {
    if (!assignment_.is_over_cap(donor_)) return;
    give_to(receiver);
  }
}

}  // namespace

void relieve_memory(Assignment& assignment, const Pack& pack, const PlanOptions& options,
                    const Weights& weights, int64_t donor) {
  MemoryRelief(assignment, pack, options, weights, donor).run();
}

}  // namespace distca::planner
