#include <algorithm>

#include "assignment.h"

namespace distca::planner {
namespace {

constexpr int64_t kStepsPerDocument = 4;  // charged to the budget for a document that moves whole

}  // namespace

void Assignment::insert_own(int64_t rank, const Item& item) {
  spend(ranks_[rank].own.insert(item) / kMovedAtOnce);
  rest_of(rank, item.document).push_back(item);
}

// Adds the traffic of all rows that the rank computes of the document, `times` times (1 or -1).
void Assignment::count(int64_t document, int64_t rank, int64_t times) {
  rows_.clear();
  for (const Item& item : items_of(ranks_[rank].guests, document)) rows_.push_back(item.rows);
  if (!has_lone_home(document)) {
    for (const Item& item : own_of(rank, document)) rows_.push_back(item.rows);
  }
  spend(pack_.documents[document].num_segments + static_cast<int64_t>(rows_.size()));
  traffic_.add(document, rows_, rank, times);
}

// Adds the slice to the receiver's guests and joins it with adjacent ones.
void Assignment::take(const Move& move, int64_t document) {
  std::vector<Item>& guests = ranks_[move.receiver].guests;
  double& total = seconds_[move.receiver];
  Item guest_item{document, move.slice, move.seconds};
  auto first = std::lower_bound(guests.begin(), guests.end(), guest_item, in_order), last = first;
  const auto joins = [&](const Item& guest) {
    return guest.document == document &&
           (guest.rows.end == guest_item.rows.begin || guest.rows.begin == guest_item.rows.end);
  };
  if (first != guests.begin() && joins(*(first - 1))) --first;
  if (last != guests.end() && joins(*last)) ++last;
  for (auto guest = first; guest != last; ++guest) {
    guest_item.rows = {std::min(guest_item.rows.begin, guest->rows.begin),
                       std::max(guest_item.rows.end, guest->rows.end)};
    total -= guest->seconds;
  }
  if (away_[document] != Away::kNothing) guest_item.seconds = seconds(document, guest_item.rows);
  total += guest_item.seconds;
  spend((guests.end() - last) / kMovedAtOnce);
  if (first == last) {
    guests.insert(first, guest_item);
  } else {
    *first = guest_item;
    guests.erase(first + 1, last);
  }
}

void Assignment::apply(const Move& move) {
  Rank& donor = ranks_[move.donor];
  const Item item = donor.own[move.item];
  const bool was_moved = away_[item.document] != Away::kNothing;
  if (was_moved) {
    count(item.document, move.donor, -1);
    count(item.document, move.receiver, -1);
  }
  std::erase_if(rest_of(move.donor, item.document),
                [&](const Item& each) { return each.rows.begin == item.rows.begin; });
  spend(donor.own.erase(move.item, move.item + 1) / kMovedAtOnce);
  for (const Range rest :
       {Range{item.rows.begin, move.slice.begin}, Range{move.slice.end, item.rows.end}}) {
    if (num_rows(rest) == 0) continue;
    insert_own(move.donor, {item.document, rest, seconds(item.document, rest)});
  }
  seconds_[move.donor] = is_idle(move.donor) ? 0.0 : seconds_[move.donor] - move.relief;
  take(move, item.document);
  if (was_moved) count(item.document, move.donor, 1);
  away_[item.document] = Away::kRows;
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
  std::vector<Item>& guests = ranks_[receiver].guests;
  count(document, donor, -1);
  count(document, receiver, -1);
  for (const Item& item : all) {
    const size_t idx = find_own(donor, item);
    spend(ranks_[donor].own.erase(idx, idx + 1) / kMovedAtOnce);
  }
  rest_of(donor, document).clear();
  guests.insert(guests.end(), all.begin(), all.end());
  std::sort(guests.begin(), guests.end(), in_order);
  spend(static_cast<int64_t>(guests.size()));
  count(document, receiver, 1);
  seconds_[receiver] += relief;
  seconds_[donor] = is_idle(donor) ? 0.0 : seconds_[donor] - relief;
  return relief;
}

double Assignment::give_whole_documents(int64_t donor, int64_t receiver, double max_seconds) {
  const std::span<const Item> own = this->own(donor);
  const auto begin = std::partition_point(own.begin(), own.end(), [max_seconds](const Item& item) {
    return item.seconds > max_seconds;
  });
  const auto first = static_cast<size_t>(begin - own.begin());
  const auto move = [&](size_t idx) {
    const Item& item = own[idx];
    const RangeSet& held = keys_on(receiver, item.document);
    const int64_t bytes = bytes_of(item.document, item.rows, held);
    return Move{donor, receiver, idx, item.rows, item.seconds, item.seconds, bytes};
  };
  if (first < own.size() && away_[own[first].document] == Away::kRows) {
    if (is_budget_spent()) {
      if (limit(donor) > 0) return 0;
      return give_all_of(own[first].document, donor, receiver, max_seconds);
    }
    const Move whole = move(first);
    if (!links_fit(whole)) return 0;
    apply(whole);
    return whole.seconds;
  }
  double relief = 0;
  size_t last = first;
  for (; last < own.size() && relief + own[last].seconds <= max_seconds; ++last) {
    const Item& item = own[last];
    if (away_[item.document] == Away::kRows || !links_fit(move(last))) break;
    away_[item.document] = Away::kWhole;
    traffic_.add(item.document, {&item.rows, 1}, receiver, 1);
    ranks_[receiver].whole_documents.push_back(item);
    relief += item.seconds;
  }
  spend(kStepsPerDocument * static_cast<int64_t>(last - first) + 1);
  spend(ranks_[donor].own.erase(first, last) / kMovedAtOnce);
  seconds_[receiver] += relief;
  seconds_[donor] = is_idle(donor) ? 0.0 : seconds_[donor] - relief;
  return relief;
}

void Assignment::take_back(std::span<const Placement> placements) {
  const Item all = whole(placements[0].document);
  for (const Placement& each : placements) {
    std::vector<Item>& guests = ranks_[each.receiver].guests;
    count(all.document, each.receiver, -1);
    const std::span<const Item> of_document = items_of(guests, all.document);
    for (const Item& guest : of_document) seconds_[each.receiver] -= guest.seconds;
    const auto first = guests.begin() + (of_document.data() - guests.data());
    spend((guests.end() - first) / kMovedAtOnce);
    guests.erase(first, first + static_cast<std::ptrdiff_t>(of_document.size()));
  }
  const int64_t donor = placements[0].donor;
  std::vector<Item>& rest = rest_of(donor, all.document);
  for (const Item& item : rest) {
    seconds_[donor] -= item.seconds;
    const size_t idx = ranks_[donor].own.find(item);
    spend(ranks_[donor].own.erase(idx, idx + 1) / kMovedAtOnce);
  }
  rest.clear();
  insert_own(donor, all);
  seconds_[donor] += all.seconds;
}

}  // namespace distca::planner
