#include <algorithm>

#include "assignment.h"

namespace distca::planner {
namespace {

constexpr int64_t kStepsPerDocument = 4;  // charged to the budget for a document that moves whole
constexpr int64_t kMovedAtOnce = 16;      // items that shift in memory for one step of the budget

}  // namespace

const std::deque<Item>& Assignment::own(int64_t rank) {
  Rank& entry = ranks_[rank];
  if (!entry.is_open) {
    const std::span<const Item> sorted = problem_.largest_first(rank);
    entry.own.assign(sorted.begin(), sorted.end());
    entry.is_open = true;
    spend(static_cast<int64_t>(sorted.size()) / kMovedAtOnce + 1);
  }
  return entry.own;
}

std::vector<Item>& Assignment::rest_of(int64_t rank, int64_t document) {
  const auto [entry, is_new] = ranks_[rank].rest.try_emplace(document);
  if (is_new) {
    const std::span<const Item> all = problem_.home_items(rank, document);
    entry->second.assign(all.begin(), all.end());
  }
  return entry->second;
}

size_t Assignment::find_own(int64_t rank, const Item& item) const {
  const std::deque<Item>& own = ranks_[rank].own;
  return static_cast<size_t>(std::lower_bound(own.begin(), own.end(), item, is_larger) -
                             own.begin());
}

void Assignment::insert_own(int64_t rank, const Item& item) {
  std::deque<Item>& own = ranks_[rank].own;
  const size_t at = find_own(rank, item);
  spend(static_cast<int64_t>(std::min(at, own.size() - at)) / kMovedAtOnce);
  own.insert(own.begin() + static_cast<std::ptrdiff_t>(at), item);
  rest_of(rank, item.document).push_back(item);
}

void Assignment::erase_own(int64_t rank, size_t first, size_t last) {
  std::deque<Item>& own = ranks_[rank].own;
  spend(static_cast<int64_t>(std::min(first, own.size() - last)) / kMovedAtOnce);
  own.erase(own.begin() + static_cast<std::ptrdiff_t>(first),
            own.begin() + static_cast<std::ptrdiff_t>(last));
}

void Assignment::erase_own(int64_t rank, const Item& item) {
  const size_t at = find_own(rank, item);
  erase_own(rank, at, at + 1);
}

// Adds the traffic of all rows that the rank computes of the document, `times` times (1 or -1).
void Assignment::count(int64_t document, int64_t rank, int64_t times) {
  rows_.clear();
  for (const Item& item : received_of(rank, document)) rows_.push_back(item.rows);
  if (!has_lone_home(document)) {
    for (const Item& item : own_of(rank, document)) rows_.push_back(item.rows);
  }
  spend(problem_.document(document).num_segments + static_cast<int64_t>(rows_.size()));
  traffic_.add(document, rows_, rank, times);
}

// Adds rows of another home, and joins them with rows that touch them.
void Assignment::receive(int64_t rank, Item item) {
  std::vector<Item>& received = ranks_[rank].received[item.document];
  spend(static_cast<int64_t>(received.size()));
  const size_t num_joined = std::erase_if(received, [&](const Item& other) {
    if (other.rows.end != item.rows.begin && other.rows.begin != item.rows.end) return false;
    item.rows = {std::min(item.rows.begin, other.rows.begin),
                 std::max(item.rows.end, other.rows.end)};
    add_seconds(rank, other, -1);
    return true;
  });
  if (num_joined > 0) item.seconds = problem_.seconds(item.document, item.rows);
  add_seconds(rank, item, 1);
  received.push_back(item);
}

// Adds the item's seconds (times = 1), or subtracts them (times = -1).
void Assignment::add_seconds(int64_t rank, const Item& item, int times) {
  seconds_[rank] += times * item.seconds;
  if (problem_.are_visiting(item.document, item.rows, rank))
    visiting_[rank] += times * item.seconds;
}

// Clears what rounding leaves of the seconds of a rank that has no items.
void Assignment::settle(int64_t rank) {
  if (ranks_[rank].own.empty() && ranks_[rank].received.empty()) {
    seconds_[rank] = visiting_[rank] = 0;
  }
}

void Assignment::apply(const Move& move) {
  const Item& item = move.item;
  const bool was_shared = is_shared_[item.document];
  if (was_shared) {
    count(item.document, move.donor, -1);
    count(item.document, move.receiver, -1);
  }
  std::erase_if(rest_of(move.donor, item.document),
                [&](const Item& each) { return each.rows.begin == item.rows.begin; });
  erase_own(move.donor, item);
  add_seconds(move.donor, item, -1);
  for (const Range rows : outside(move.slice, item.rows)) {
    if (num_rows(rows) == 0) continue;
    const Item rest{item.document, rows, problem_.seconds(item.document, rows)};
    insert_own(move.donor, rest);
    add_seconds(move.donor, rest, 1);
  }
  settle(move.donor);
  receive(move.receiver, {item.document, move.slice, move.seconds});
  if (was_shared) count(item.document, move.donor, 1);
  is_shared_[item.document] = true;
  count(item.document, move.receiver, 1);
}

// Moves all items that a donor of speed 0 still has of a document. Ignores links.
double Assignment::give_all_of(int64_t document, int64_t donor, int64_t receiver,
                               double max_seconds) {
  const std::span<const Item> own = own_of(donor, document);
  const std::vector<Item> all(own.begin(), own.end());
  double relief = 0;
  for (const Item& item : all) relief += item.seconds;
  if (relief > max_seconds) return 0;
  count(document, donor, -1);
  count(document, receiver, -1);
  std::vector<Item>& received = ranks_[receiver].received[document];
  for (const Item& item : all) {
    erase_own(donor, item);
    received.push_back(item);
    add_seconds(donor, item, -1);
    add_seconds(receiver, item, 1);
  }
  rest_of(donor, document).clear();
  count(document, receiver, 1);
  settle(donor);
  return relief;
}

double Assignment::give_whole_documents(int64_t donor, int64_t receiver, double max_seconds) {
  const std::deque<Item>& own = this->own(donor);
  const auto begin = std::partition_point(own.begin(), own.end(), [max_seconds](const Item& item) {
    return item.seconds > max_seconds;
  });
  const auto first = static_cast<size_t>(begin - own.begin());
  const auto move_of = [&](const Item& item) {
    const int64_t bytes = bytes_of(item.document, item.rows, keys_on(receiver, item.document));
    return Move{donor, receiver, item, item.rows, item.seconds, item.seconds, bytes};
  };
  if (first < own.size() && is_shared_[own[first].document]) {
    if (is_budget_spent()) {
      if (problem_.options.speed(donor) > 0) return 0;
      return give_all_of(own[first].document, donor, receiver, max_seconds);
    }
    const Move whole = move_of(own[first]);
    if (!links_fit(whole)) return 0;
    apply(whole);
    return whole.seconds;
  }
  double relief = 0;
  size_t last = first;
  for (; last < own.size() && relief + own[last].seconds <= max_seconds; ++last) {
    const Item& item = own[last];
    if (is_shared_[item.document] || !links_fit(move_of(item))) break;
    is_shared_[item.document] = true;
    traffic_.add(item.document, {&item.rows, 1}, receiver, 1);
    ranks_[donor].rest.try_emplace(item.document);
    ranks_[receiver].received[item.document].push_back(item);
    relief += item.seconds;
  }
  spend(kStepsPerDocument * static_cast<int64_t>(last - first) + 1);
  erase_own(donor, first, last);
  seconds_[donor] -= relief;
  settle(donor);
  seconds_[receiver] += relief;
  visiting_[receiver] += relief;  // documents with one home
  return relief;
}

void Assignment::take_back(std::span<const Task> tasks) {
  const int64_t document = tasks[0].document, donor = home_of(document);
  for (const Task& task : tasks) {
    count(document, task.server, -1);
    for (const Item& item : received_of(task.server, document)) add_seconds(task.server, item, -1);
    ranks_[task.server].received.erase(document);
  }
  for (const Item& item : own_of(donor, document)) {
    add_seconds(donor, item, -1);
    erase_own(donor, item);
  }
  rest_of(donor, document).clear();
  insert_own(donor, whole(document));
  add_seconds(donor, whole(document), 1);
}

}  // namespace distca::planner
