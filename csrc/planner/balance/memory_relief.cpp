#include "memory_relief.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "cutter.h"

namespace distca::planner {
namespace {

// Moves rows to one receiver after the other. Rows that do not fit wait for the next receiver.
class MemoryRelief {
 public:
  MemoryRelief(Assignment& assignment, int64_t donor);

  void run();

 private:
  std::vector<int64_t> receivers() const;
  bool visits_home(const Item& item) const;
  bool give(Item& item, int64_t receiver);
  void give_to(int64_t receiver);

  Assignment& assignment_;
  const Problem& problem_;
  const int64_t donor_;
  Cutter cutter_;
  std::vector<Item> waiting_;  // items that still visit their home, the largest first
};

MemoryRelief::MemoryRelief(Assignment& assignment, int64_t donor)
    : assignment_(assignment),
      problem_(assignment.problem()),
      donor_(donor),
      cutter_(assignment, donor) {
  for (const Item& item : assignment.own(donor)) {
    if (visits_home(item)) waiting_.push_back(item);
  }
}

bool MemoryRelief::visits_home(const Item& item) const {
  const Task task{item.document, item.rows.begin, item.rows.end, donor_};
  return !is_home(problem_.pack, problem_.options.mask, task);
}

std::vector<int64_t> MemoryRelief::receivers() const {
  std::vector<std::pair<double, int64_t>> sorted;
  for (int64_t rank = 0; rank < problem_.pack.num_ranks; ++rank) {
    const double left =
        problem_.options.cap_bytes(rank) - static_cast<double>(assignment_.load(rank).held_bytes);
    if (rank != donor_ && problem_.options.speed(rank) > 0 && left > 0)
      sorted.emplace_back(-left, rank);
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
  const std::optional<Move> move = cutter_.first_rows(request, idx);
  if (!move) return false;
  assignment_.apply(*move);
  item.rows.begin = move->slice.end;
  item.seconds = problem_.seconds(item.document, item.rows);
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

void relieve_memory(Assignment& assignment, int64_t donor) {
  MemoryRelief(assignment, donor).run();
}

}  // namespace distca::planner
