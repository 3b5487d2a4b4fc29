#include "assignment.h"

#include <algorithm>

namespace distca::planner {

Assignment::Assignment(const Problem& problem, double limit, Budget& budget)
    : problem_(problem),
      limit_(limit),
      seconds_(problem.home.seconds),
      traffic_(problem.home.traffic),
      ranks_(problem.pack.num_ranks),
      is_shared_(problem.pack.documents.size()),
      budget_(budget) {
  for (size_t i = 0; i < is_shared_.size(); ++i) {
    is_shared_[i] = !has_lone_home(static_cast<int64_t>(i));
  }
}

double Assignment::capacity(int64_t rank) const {
  const double most = limit(rank);
  const double in_link = link_seconds_in(load(rank), problem_.options.links) / limit_;
  const double held = static_cast<double>(load(rank).held_bytes) / problem_.options.cap_bytes(rank);
  return most - std::max(seconds_[rank], most * std::max(in_link, held));
}

const std::deque<Item>& Assignment::own(int64_t rank) {
  open(rank);
  return ranks_[rank].own;
}

std::span<const Item> Assignment::own_of(int64_t rank, int64_t document) const {
  const auto entry = ranks_[rank].rest.find(document);
  if (entry != ranks_[rank].rest.end()) return entry->second;
  return problem_.home.items_of(rank, document);
}

size_t Assignment::find_own(int64_t rank, const Item& item) const {
  const std::deque<Item>& own = ranks_[rank].own;
  return static_cast<size_t>(std::lower_bound(own.begin(), own.end(), item, is_larger) -
                             own.begin());
}

std::span<const Item> Assignment::received_of(int64_t rank, int64_t document) const {
  const auto entry = ranks_[rank].received.find(document);
  return entry == ranks_[rank].received.end() ? std::span<const Item>() : entry->second;
}

const RangeSet& Assignment::keys_on(int64_t receiver, int64_t document) {
  keys_.clear();
  if (!is_shared_[document]) return keys_;
  const auto hold = [&](std::span<const Item> items) {
    spend(static_cast<int64_t>(items.size()));
    for (const Item& item : items) keys_.insert(problem_.keys_of(document, item.rows));
  };
  hold(received_of(receiver, document));
  if (has_lone_home(document)) return keys_;
  hold(own_of(receiver, document));
  const int64_t first_query = problem_.document(document).first_query;
  for (const Item& item : problem_.home.items_of(receiver, document)) {
    const bool has_context = item.rows.begin == first_query;  // context comes first
    keys_.insert({has_context ? 0 : item.rows.begin, item.rows.end});
  }
  return keys_;
}

int64_t Assignment::bytes_of(int64_t document, Range rows, const RangeSet& keys) const {
  const Range read = problem_.keys_of(document, rows);
  spend(static_cast<int64_t>(keys.ranges().size()));
  return num_rows(rows) * problem_.options.row_bytes.query +
         (num_rows(read) - keys.num_shared(read)) * problem_.options.row_bytes.key;
}

double Assignment::node_bytes_left(int64_t rank) const {
  return limit_ * problem_.options.links.node_bytes_per_second / kOneWay -
         static_cast<double>(load(rank).node_bytes_out);
}

bool Assignment::links_fit(const Move& move) const {
  const PlanOptions& options = problem_.options;
  const int64_t document = ranks_[move.donor].own[move.item].document;
  const Load &in = load(move.receiver), &out = load(move.donor);
  const bool inside = traffic_.same_node(move.donor, move.receiver);
  const double bytes_per_second =
      inside ? options.links.bytes_per_second : options.links.node_bytes_per_second;
  const double most = limit_ * bytes_per_second / kOneWay;
  const int64_t now_in = inside ? in.bytes_in - in.node_bytes_in : in.node_bytes_in;
  const int64_t now_out = inside ? out.bytes_out - out.node_bytes_out : out.node_bytes_out;
  const int64_t bytes_out =
      has_lone_home(document) ? move.bytes : num_rows(move.slice) * options.row_bytes.query;
  if (static_cast<double>(now_in + move.bytes) > most) return false;
  if (static_cast<double>(now_out + bytes_out) > most) return false;
  const Range keys = problem_.keys_of(document, move.slice);
  const int64_t held = in.held_bytes + num_rows(move.slice) * options.held_bytes.query +
                       num_rows(keys) * options.held_bytes.key;
  return static_cast<double>(held) <= options.cap_bytes(move.receiver);
}

std::vector<Placement> Assignment::placements() const {
  std::vector<Placement> all;
  for (int64_t rank = 0; rank < problem_.pack.num_ranks; ++rank) {
    for (const auto& [document, items] : ranks_[rank].received) {
      if (!has_lone_home(document)) continue;
      const int64_t donor = problem_.pack.segments_of(problem_.document(document))[0].rank;
      for (const Item& item : items) all.push_back({document, donor, rank, item.rows});
    }
  }
  std::sort(all.begin(), all.end(), [](const Placement& a, const Placement& b) {
    return std::tie(a.document, a.rows.begin) < std::tie(b.document, b.rows.begin);
  });
  return all;
}

Item Assignment::whole(int64_t document) const {
  const Range rows{problem_.document(document).first_query, problem_.document(document).length};
  return {document, rows, problem_.seconds(document, rows)};
}

Move Assignment::move_of(const Placement& placement) const {
  const auto& [document, donor, receiver, rows] = placement;
  const std::span<const Item> own = own_of(donor, document);
  const auto item = std::find_if(own.begin(), own.end(), [rows = rows](const Item& each) {
    return each.rows.begin <= rows.begin && rows.end <= each.rows.end;
  });
  const double rest = problem_.seconds(document, {item->rows.begin, rows.begin}) +
                      problem_.seconds(document, {rows.end, item->rows.end});
  return {donor,
          receiver,
          find_own(donor, *item),
          rows,
          item->seconds - rest,
          problem_.seconds(document, rows),
          bytes_of(document, rows)};
}

bool Assignment::is_valid() const {
  for (int64_t rank = 0; rank < problem_.pack.num_ranks; ++rank) {
    if (is_over_cap(rank)) return false;
    if (problem_.options.speed(rank) == 0 && seconds_[rank] > 0) return false;
  }
  return true;
}

std::vector<Task> Assignment::tasks() const {
  std::vector<Task> tasks;
  tasks.reserve(problem_.home.items.size() + ranks_.size());
  for (int64_t rank = 0; rank < problem_.pack.num_ranks; ++rank) {
    const auto add = [&](const auto& items) {
      for (const auto& [document, rows, _] : items) {
        tasks.push_back({document, rows.begin, rows.end, rank});
      }
    };
    const auto first = static_cast<std::ptrdiff_t>(tasks.size());
    const Rank& entry = ranks_[rank];
    entry.is_open ? add(entry.own) : add(problem_.home.items_of(rank));
    for (const auto& [_, items] : entry.received) add(items);
    if (entry.is_open || !entry.received.empty()) {
      std::sort(tasks.begin() + first, tasks.end(), in_plan_order);
    }
  }
  return tasks;
}

}  // namespace distca::planner
