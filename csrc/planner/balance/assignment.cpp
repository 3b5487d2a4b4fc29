#include "assignment.h"

#include <algorithm>

#include "../model/ranges.h"

namespace distca::planner {

Assignment::Assignment(const Problem& problem, double limit, Budget& budget)
    : problem_(problem),
      limit_(limit),
      seconds_(problem.home_seconds),
      visiting_(problem.visiting_seconds),
      traffic_(problem.home_traffic),
      ranks_(problem.pack.num_ranks),
      is_shared_(problem.pack.documents.size()),
      budget_(budget) {
  for (size_t i = 0; i < is_shared_.size(); ++i) {
    is_shared_[i] = !has_lone_home(static_cast<int64_t>(i));
  }
}

double Assignment::capacity(int64_t rank) const {
  const double most = limit(rank), speed = problem_.options.speed(rank);
  const double link_seconds = planner::link_seconds(load(rank), problem_.options.links);
  const double held = static_cast<double>(load(rank).held_bytes) / problem_.options.cap_bytes(rank);
  return std::min(
      {most - seconds_[rank], speed * link_seconds_left(rank, link_seconds), most * (1 - held)});
}

// Returns the seconds that the rank has left for visiting tasks. Visiting tasks do not overlap with
// transfers of their own part. The transfers of all parts must fit into the limit, and into the
// time that other traffic leaves on the links.
double Assignment::link_seconds_left(int64_t rank, double link_seconds) const {
  const double speed = problem_.options.speed(rank);
  const double visiting = speed > 0 ? visiting_[rank] / speed : 0;
  const double exposed_part = problem_.options.links.exposed_part;
  const double transfers = kTransferWeight * link_seconds;
  const double hidden = problem_.hidden_seconds - problem_.transfers_wait;
  const auto left = [&](double seconds) {
    return time_left(rank) - std::max(0.0, seconds - hidden);
  };
  return std::min({left(transfers) / exposed_part, left(transfers * exposed_part) - visiting,
                   limit_ + problem_.link_room - transfers});
}

std::span<const Item> Assignment::own_of(int64_t rank, int64_t document) const {
  const auto entry = ranks_[rank].rest.find(document);
  if (entry != ranks_[rank].rest.end()) return entry->second;
  return problem_.home_items(rank, document);
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
  for (const Item& item : problem_.home_items(receiver, document)) keys_.insert(item.rows);
  const Range context{0, problem_.document(document).first_query};
  for_each_segment(problem_.pack.segments_of(problem_.document(document)), context,
                   [&](const Segment& segment, Range rows) {
                     spend(1);
                     if (segment.rank == receiver) keys_.insert(rows);
                   });
  return keys_;
}

int64_t Assignment::bytes_of(int64_t document, Range rows, const RangeSet& keys) const {
  const Range read = problem_.keys_of(document, rows);
  spend(static_cast<int64_t>(keys.ranges().size()));
  return num_rows(rows) * problem_.options.row_bytes.query +
         (num_rows(read) - keys.num_shared(read)) * problem_.options.row_bytes.key;
}

double Assignment::node_bytes_left(int64_t rank) const {
  const Links& links = problem_.options.links;
  const double seconds = time_left(rank) + problem_.hidden_seconds - problem_.transfers_wait;
  return seconds / kTransferWeight * links.node_bytes_per_second -
         static_cast<double>(load(rank).node_bytes_out);
}

bool Assignment::links_fit(const Move& move) const {
  const PlanOptions& options = problem_.options;
  const int64_t document = move.item.document;
  const Load &in = load(move.receiver), &out = load(move.donor);
  const int64_t to_nodes = traffic_.same_node(move.donor, move.receiver) ? 0 : 1;
  const int64_t bytes_out =
      has_lone_home(document) ? move.bytes : num_rows(move.slice) * options.row_bytes.query;
  const double seconds_in = link_seconds(in.bytes_in + move.bytes,
                                         in.node_bytes_in + to_nodes * move.bytes, options.links);
  const double seconds_out = link_seconds(out.bytes_out + bytes_out,
                                          out.node_bytes_out + to_nodes * bytes_out, options.links);
  const double speed = options.speed(move.receiver);
  const double seconds_of_receiver = std::max(seconds_in, link_seconds_out(in, options.links));
  if (link_seconds_left(move.receiver, seconds_of_receiver) < move.seconds / speed) return false;
  // The donor's own visiting tasks do not count, since it still gives some away.
  const double transfers_out = kTransferWeight * seconds_out + problem_.transfers_wait;
  if (transfers_out > time_left(move.donor) + problem_.hidden_seconds) return false;
  const Range keys = problem_.keys_of(document, move.slice);
  const int64_t held = in.held_bytes + num_rows(move.slice) * options.held_bytes.query +
                       num_rows(keys) * options.held_bytes.key;
  return static_cast<double>(held) <= options.cap_bytes(move.receiver);
}

Move Assignment::move_of(int64_t donor, const Item& item, Range slice, int64_t receiver,
                         const RangeSet& keys) const {
  double relief = item.seconds;
  for (const Range rest : outside(slice, item.rows)) {
    relief -= problem_.seconds(item.document, rest);
  }
  const double seconds = problem_.seconds(item.document, slice);
  return {donor, receiver, item, slice, relief, seconds, bytes_of(item.document, slice, keys)};
}

Move Assignment::move_of(const Task& task) const {
  const int64_t donor = home_of(task.document);
  const std::span<const Item> own = own_of(donor, task.document);
  const auto item = std::find_if(own.begin(), own.end(), [&](const Item& each) {
    return each.rows.begin <= task.q_begin && task.q_end <= each.rows.end;
  });
  return move_of(donor, *item, queries(task), task.server);
}

std::vector<Task> Assignment::tasks_away() const {
  std::vector<Task> tasks;
  for (int64_t rank = 0; rank < problem_.pack.num_ranks; ++rank) {
    for (const auto& [document, items] : ranks_[rank].received) {
      if (!has_lone_home(document)) continue;
      for (const Item& item : items) {
        tasks.push_back({document, item.rows.begin, item.rows.end, rank});
      }
    }
  }
  std::sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    return std::tie(a.document, a.q_begin) < std::tie(b.document, b.q_begin);
  });
  return tasks;
}

Item Assignment::whole(int64_t document) const {
  const Range rows{problem_.document(document).first_query, problem_.document(document).length};
  return {document, rows, problem_.seconds(document, rows)};
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
  tasks.reserve(problem_.items.size() + ranks_.size());
  for (int64_t rank = 0; rank < problem_.pack.num_ranks; ++rank) {
    const auto add = [&](const auto& items) {
      for (const auto& [document, rows, _] : items) {
        tasks.push_back({document, rows.begin, rows.end, rank});
      }
    };
    const auto first = static_cast<std::ptrdiff_t>(tasks.size());
    const Rank& entry = ranks_[rank];
    entry.is_open ? add(entry.own) : add(problem_.home_items(rank));
    for (const auto& [_, items] : entry.received) add(items);
    if (entry.is_open || !entry.received.empty()) {
      std::sort(tasks.begin() + first, tasks.end(), in_plan_order);
    }
  }
  return tasks;
}

}  // namespace distca::planner
