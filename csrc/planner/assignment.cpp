#include "assignment.h"

#include <algorithm>
#include <tuple>

namespace distca::planner {
namespace {

bool dearer(const Item& a, const Item& b) {
  return a.seconds != b.seconds
             ? a.seconds > b.seconds
             : std::tie(a.document, a.rows.begin) < std::tie(b.document, b.rows.begin);
}

bool precedes(const Holder& holder, int64_t rank) {
  return holder.server < rank;
}

}  // namespace

Assignment::Assignment(const Pack& pack, const PlanOptions& options, const Limits& limits,
                       const std::vector<Task>& home, const std::vector<Load>& home_loads)
    : pack_(pack),
      options_(options),
      limits_(limits),
      link_bytes_(limits.link_seconds * options.link_bytes_per_second),
      servers_(pack.num_ranks),
      holders_(pack.documents.size()),
      key_bytes_(pack.num_ranks, 0) {
  for (const Task& task : home) {
    const Range rows = queries(task);
    servers_[task.server].own.push_back({task.document, rows, seconds(task.document, rows)});
    const Document& document = pack.documents[task.document];
    if (document.segments.size() == 1) continue;
    hold(task.document, task.server, rows);
    hold(task.document, task.server, keys_of(options.mask, rows, document.length));
  }
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    Server& server = servers_[rank];
    server.seconds = home_loads[rank].seconds;
    server.bytes_in = home_loads[rank].bytes_in;
    server.bytes_out = home_loads[rank].bytes_out;
    if (surplus(rank) > 0) std::sort(server.own.begin(), server.own.end(), dearer);
    list(rank);
  }
}

double Assignment::seconds(int64_t document, Range rows) const {
  return options_.cost.seconds(options_.mask, rows, pack_.documents[document].length);
}

// Seconds of compute that the server has left, or the same share of its ingress if that is less.
double Assignment::room(int64_t rank) const {
  const Server& server = servers_[rank];
  const double ingress = static_cast<double>(server.bytes_in) / link_bytes_;
  return limits_.seconds - std::max(server.seconds, ingress * limits_.seconds);
}

void Assignment::list(int64_t rank) {
  if (surplus(rank) > 0) {
    donors_.emplace(-servers_[rank].seconds, rank);
  } else if (room(rank) > 0) {
    receivers_.emplace(-room(rank), rank);
  }
}

void Assignment::unlist(int64_t rank) {
  donors_.erase({-servers_[rank].seconds, rank});
  receivers_.erase({-room(rank), rank});
}

const Holder* Assignment::find_holder(int64_t document, int64_t rank) const {
  const std::vector<Holder>& holders = holders_[document];
  const auto at = std::lower_bound(holders.begin(), holders.end(), rank, precedes);
  return at != holders.end() && at->server == rank ? &*at : nullptr;
}

void Assignment::hold(int64_t document, int64_t rank, Range keys) {
  std::vector<Holder>& holders = holders_[document];
  auto at = std::lower_bound(holders.begin(), holders.end(), rank, precedes);
  if (at == holders.end() || at->server != rank) at = holders.insert(at, Holder{rank, {}});
  at->keys.insert(keys);
}

int64_t Assignment::bytes_of(int64_t document, Range rows, int64_t receiver) const {
  const Range keys = keys_of(options_.mask, rows, pack_.documents[document].length);
  const Holder* holder = find_holder(document, receiver);
  const int64_t held = holder == nullptr ? 0 : holder->keys.num_shared(keys);
  return num_rows(rows) * options_.row_bytes.query +
         (num_rows(keys) - held) * options_.row_bytes.key;
}

bool Assignment::fits(const Item& item, Range slice, int64_t donor, int64_t receiver) const {
  const Server& server = servers_[receiver];
  if (server.seconds + seconds(item.document, slice) > limits_.seconds) return false;
  const int64_t bytes = bytes_of(item.document, slice, receiver);
  if (static_cast<double>(server.bytes_in + bytes) > link_bytes_) return false;
  const bool lone_home = pack_.documents[item.document].segments.size() == 1;
  const int64_t out = lone_home ? bytes : num_rows(slice) * options_.row_bytes.query;
  return static_cast<double>(servers_[donor].bytes_out + out) <= link_bytes_;
}

// Leaves in key_bytes_ what each home of the slice's keys would send to the receiver.
void Assignment::collect_key_bytes(const Move& move) {
  const int64_t document = servers_[move.donor].own[move.item].document;
  const Range keys = keys_of(options_.mask, move.slice, pack_.documents[document].length);
  const Holder* holder = find_holder(document, move.receiver);
  for_each_segment(pack_.documents[document], keys, [&](const Segment& segment, Range part) {
    const int64_t held = holder == nullptr ? 0 : holder->keys.num_shared(part);
    key_bytes_[segment.rank] += (num_rows(part) - held) * options_.row_bytes.key;
  });
}

bool Assignment::key_homes_fit(const Move& move) {
  const Document& document = pack_.documents[servers_[move.donor].own[move.item].document];
  if (document.segments.size() == 1) return true;  // fits() has looked at the only home
  collect_key_bytes(move);
  const int64_t query_bytes = num_rows(move.slice) * options_.row_bytes.query;
  bool fit = true;
  const Range keys = keys_of(options_.mask, move.slice, document.length);
  for_each_segment(document, keys, [&](const Segment& segment, Range) {
    const int64_t sent = std::exchange(key_bytes_[segment.rank], 0);
    const int64_t total =
        servers_[segment.rank].bytes_out + sent + (segment.rank == move.donor ? query_bytes : 0);
    fit = fit && (sent == 0 || static_cast<double>(total) <= link_bytes_);
  });
  return fit;
}

// Gives the slice to the receiver, as part of an adjacent guest where there is one.
void Assignment::take(const Move& move, int64_t document) {
  Server& receiver = servers_[move.receiver];
  Range rows = move.slice;
  for (auto guest = receiver.guests.begin(); guest != receiver.guests.end();) {
    const bool joins = guest->document == document &&
                       (guest->rows.end == rows.begin || guest->rows.begin == rows.end);
    if (joins) {
      rows = {std::min(rows.begin, guest->rows.begin), std::max(rows.end, guest->rows.end)};
      receiver.seconds -= guest->seconds;
    }
    guest = joins ? receiver.guests.erase(guest) : guest + 1;
  }
  receiver.guests.push_back({document, rows, seconds(document, rows)});
  receiver.seconds += receiver.guests.back().seconds;
}

void Assignment::apply(const Move& move) {
  unlist(move.donor);
  unlist(move.receiver);
  Server& donor = servers_[move.donor];
  const Item item = donor.own[move.item];
  const Document& document = pack_.documents[item.document];

  collect_key_bytes(move);
  const Range keys = keys_of(options_.mask, move.slice, document.length);
  for_each_segment(document, keys, [&](const Segment& segment, Range) {
    servers_[segment.rank].bytes_out += std::exchange(key_bytes_[segment.rank], 0);
  });
  donor.bytes_out += num_rows(move.slice) * options_.row_bytes.query;
  servers_[move.receiver].bytes_in += move.bytes;
  hold(item.document, move.receiver, keys);

  donor.seconds -= move.relief;
  donor.own.erase(donor.own.begin() + static_cast<std::ptrdiff_t>(move.item));
  if (num_rows(move.rest) > 0) {
    const Item rest{item.document, move.rest, item.seconds - move.relief};
    donor.own.insert(std::upper_bound(donor.own.begin(), donor.own.end(), rest, dearer), rest);
  }
  take(move, item.document);
  list(move.donor);
  list(move.receiver);
}

std::vector<Task> Assignment::tasks() const {
  std::vector<Task> tasks;
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    for (const std::vector<Item>* items : {&servers_[rank].own, &servers_[rank].guests}) {
      for (const Item& item : *items) {
        tasks.push_back({item.document, item.rows.begin, item.rows.end, rank});
      }
    }
  }
  std::sort(tasks.begin(), tasks.end(), in_plan_order);
  return tasks;
}

}  // namespace distca::planner
