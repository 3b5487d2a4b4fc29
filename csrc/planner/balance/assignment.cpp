#include "assignment.h"

#include <algorithm>

namespace distca::planner {

Assignment::Assignment(const Pack& pack, const PlanOptions& options, const HomeCut& home,
                       double limit, Budget& budget)
    : pack_(pack),
      options_(options),
      home_(home),
      limit_(limit),
      seconds_(home.seconds),
      traffic_(home.traffic),
      ranks_(pack.num_ranks),
      away_(pack.documents.size(), Away::kNothing),
      budget_(budget) {
  for (size_t i = 0; i < away_.size(); ++i) {
    if (pack.documents[i].num_segments > 1) away_[i] = Away::kRows;
  }
}

double Assignment::capacity(int64_t rank) const {
  const double most = limit(rank);
  const double in_link = link_seconds_in(traffic_[rank], options_.links) / limit_;
  const double held = static_cast<double>(traffic_[rank].held_bytes) / options_.cap_bytes(rank);
  return most - std::max(seconds_[rank], most * std::max(in_link, held));
}

void Assignment::open(int64_t rank) {
  Rank& entry = ranks_[rank];
  if (entry.is_open) return;
  entry.own.assign(home_.largest_first(rank));
  entry.is_open = true;
  spend(static_cast<int64_t>(entry.own.size()) / kMovedAtOnce + 1);
}

std::span<const Item> Assignment::own(int64_t rank) {
  open(rank);
  return ranks_[rank].own.all();
}

std::span<const Item> Assignment::own_of(int64_t rank, int64_t document) const {
  const auto entry = ranks_[rank].rest.find(document);
  if (entry != ranks_[rank].rest.end()) return entry->second;
  if (away_[document] == Away::kWhole) return {};
  return items_of(home_.items_of(rank), document);
}

std::vector<Item>& Assignment::rest_of(int64_t rank, int64_t document) {
  const auto [entry, is_new] = ranks_[rank].rest.try_emplace(document);
  if (is_new) {
    const std::span<const Item> all = items_of(home_.items_of(rank), document);
    entry->second.assign(all.begin(), all.end());
  }
  return entry->second;
}

const RangeSet& Assignment::keys_on(int64_t receiver, int64_t document) {
  keys_.clear();
  if (away_[document] == Away::kNothing) return keys_;
  const Document& entry = pack_.documents[document];
  const auto hold = [&](std::span<const Item> items) {
    spend(static_cast<int64_t>(items.size()));
    for (const Item& item : items) {
      keys_.insert(keys_of(options_.mask, item.rows, entry.length));
    }
  };
  hold(items_of(ranks_[receiver].guests, document));
  if (has_lone_home(document)) return keys_;
  hold(own_of(receiver, document));
  for (const Item& home : items_of(home_.items_of(receiver), document)) {
    const bool has_context = home.rows.begin == entry.first_query;  // context comes first
    keys_.insert({has_context ? 0 : home.rows.begin, home.rows.end});
  }
  return keys_;
}

int64_t Assignment::bytes_of(int64_t document, Range rows, const RangeSet& held_keys) const {
  const Range keys = keys_of(options_.mask, rows, pack_.documents[document].length);
  spend(static_cast<int64_t>(held_keys.ranges().size()));
  const int64_t num_held = held_keys.ranges().empty() ? 0 : held_keys.num_shared(keys);
  return num_rows(rows) * options_.row_bytes.query +
         (num_rows(keys) - num_held) * options_.row_bytes.key;
}

double Assignment::node_bytes_left(int64_t rank) const {
  return limit_ * options_.links.node_bytes_per_second / kOneWay -
         static_cast<double>(traffic_[rank].node_bytes_out);
}

bool Assignment::links_fit(const Move& move) const {
  const int64_t document = ranks_[move.donor].own[move.item].document;
  const Load &in = traffic_[move.receiver], &out = traffic_[move.donor];
  const bool inside = traffic_.same_node(move.donor, move.receiver);
  const double bytes_per_second =
      inside ? options_.links.bytes_per_second : options_.links.node_bytes_per_second;
  const double most = limit_ * bytes_per_second / kOneWay;
  const int64_t now_in = inside ? in.bytes_in - in.node_bytes_in : in.node_bytes_in;
  const int64_t now_out = inside ? out.bytes_out - out.node_bytes_out : out.node_bytes_out;
  const int64_t bytes_out =
      has_lone_home(document) ? move.bytes : num_rows(move.slice) * options_.row_bytes.query;
  if (static_cast<double>(now_in + move.bytes) > most) return false;
  if (static_cast<double>(now_out + bytes_out) > most) return false;
  const Range keys = keys_of(options_.mask, move.slice, pack_.documents[document].length);
  const int64_t held = in.held_bytes + num_rows(move.slice) * options_.held_bytes.query +
                       num_rows(keys) * options_.held_bytes.key;
  return static_cast<double>(held) <= options_.cap_bytes(move.receiver);
}

bool Assignment::is_idle(int64_t rank) const {
  const Rank& entry = ranks_[rank];
  return entry.own.empty() && entry.guests.empty() && entry.whole_documents.empty();
}

std::vector<Placement> Assignment::placements() const {
  std::vector<Placement> all;
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    for (const Item& guest : ranks_[rank].guests) {
      const std::span<const Segment> segments = pack_.segments_of(pack_.documents[guest.document]);
      if (segments.size() > 1) continue;
      all.push_back({guest.document, segments[0].rank, rank, guest.rows});
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Placement& a, const Placement& b) { return a.document < b.document; });
  return all;
}

Item Assignment::whole(int64_t document) const {
  const Document& entry = pack_.documents[document];
  const Range rows{entry.first_query, entry.length};
  return {document, rows, seconds(document, rows)};
}

Move Assignment::move_of(const Placement& placement) const {
  const std::span<const Item> own = own_of(placement.donor, placement.document);
  const auto item = std::find_if(own.begin(), own.end(), [&](const Item& each) {
    return each.rows.begin <= placement.rows.begin && placement.rows.end <= each.rows.end;
  });
  const double remainder = seconds(placement.document, {item->rows.begin, placement.rows.begin}) +
                           seconds(placement.document, {placement.rows.end, item->rows.end});
  return {placement.donor,
          placement.receiver,
          find_own(placement.donor, *item),
          placement.rows,
          item->seconds - remainder,
          seconds(placement.document, placement.rows),
          bytes_of(placement.document, placement.rows, RangeSet())};
}

bool Assignment::is_valid() const {
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    if (is_over_cap(rank)) return false;
    if (options_.speed(rank) == 0 && seconds_[rank] > 0) return false;
  }
  return true;
}

double Assignment::total_bytes() const {
  double bytes = 0;
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    bytes += static_cast<double>(traffic_[rank].bytes_in);
  }
  return bytes;
}

double Assignment::slowest_seconds() const {
  double most = 0;
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    if (seconds_[rank] > 0) most = std::max(most, seconds_[rank] / options_.speed(rank));
  }
  return most;
}

double Assignment::makespan() const {
  double most = slowest_seconds();
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    most = std::max(most, link_seconds(traffic_[rank], options_.links));
  }
  return most;
}

std::vector<Task> Assignment::tasks() const {
  std::vector<Task> tasks;
  tasks.reserve(home_.items.size() + ranks_.size());
  std::vector<Item> items;
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    const auto& [own, guests, whole_documents, rest, is_open] = ranks_[rank];
    std::span<const Item> all = home_.items_of(rank);
    if (is_open || !guests.empty() || !whole_documents.empty()) {
      const std::span<const Item> home_items = is_open ? own.all() : all;
      items.assign(home_items.begin(), home_items.end());
      items.insert(items.end(), guests.begin(), guests.end());
      items.insert(items.end(), whole_documents.begin(), whole_documents.end());
      std::sort(items.begin(), items.end(), in_order);
      all = items;
    }
    for (const Item& item : all) {
      tasks.push_back({item.document, item.rows.begin, item.rows.end, rank});
    }
  }
  return tasks;
}

}  // namespace distca::planner
