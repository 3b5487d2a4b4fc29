#include "assignment.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace distca::planner {
namespace {

bool dearer(const Share& a, const Share& b) {
  return a.seconds != b.seconds
             ? a.seconds > b.seconds
             : std::tie(a.document, a.rows.begin) < std::tie(b.document, b.rows.begin);
}

bool in_order(const Share& a, const Share& b) {
  return std::tie(a.document, a.rows.begin) < std::tie(b.document, b.rows.begin);
}

}  // namespace

Home::Home(const Pack& pack, const PlanOptions& options)
    : shares(pack.segments.size()),
      first(pack.num_ranks + 1, 0),
      seconds(pack.num_ranks, 0.0),
      traffic(pack, options) {
  for (const Segment& segment : pack.segments) ++first[segment.rank + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    const Document& document = pack.documents[i];
    for (const Segment& segment : pack.segments_of(document)) {
      const Range rows = queries(segment, document);
      const double cost = options.cost.seconds(options.mask, rows, document.length);
      shares[next[segment.rank]++] = {static_cast<int64_t>(i), rows, cost};
      seconds[segment.rank] += cost;
    }
  }
  std::vector<Range> rows;
  for (int64_t rank = 0; rank < pack.num_ranks; ++rank) {
    const std::span<const Share> own = shares_of(rank);
    for (size_t i = 0; i < own.size();) {
      const int64_t document = own[i].document;
      rows.clear();
      for (; i < own.size() && own[i].document == document; ++i) rows.push_back(own[i].rows);
      traffic.add(document, rows, rank, 1);
    }
  }
}

Assignment::Assignment(const Pack& pack, const PlanOptions& options, const Home& home, double limit)
    : pack_(pack),
      options_(options),
      home_(home),
      limit_(limit),
      seconds_(home.seconds),
      traffic_(home.traffic),
      ranks_(pack.num_ranks),
      has_moved_(pack.documents.size(), 0) {
  for (size_t i = 0; i < has_moved_.size(); ++i) {
    has_moved_[i] = pack.documents[i].num_segments > 1 ? 1 : 0;
  }
}

double Assignment::room(int64_t rank) const {
  const double most = limit(rank);
  const double in_link = link_seconds_in(traffic_[rank], options_.links) / limit_;
  const double held = static_cast<double>(traffic_[rank].held_bytes) / options_.cap_bytes(rank);
  return most - std::max(seconds_[rank], most * std::max(in_link, held));
}

std::span<const Share> Assignment::own_now(int64_t rank) const {
  return ranks_[rank].is_open ? std::span<const Share>(ranks_[rank].own) : home_.shares_of(rank);
}

std::span<const Share> Assignment::own(int64_t rank) {
  Rank& entry = ranks_[rank];
  if (!entry.is_open) {
    const std::span<const Share> shares = home_.shares_of(rank);
    entry.own.assign(shares.begin(), shares.end());
    std::sort(entry.own.begin(), entry.own.end(), dearer);
    entry.is_open = true;
  }
  return entry.own;
}

const RangeSet& Assignment::keys_on(int64_t receiver, int64_t document) {
  keys_.clear();
  if (!has_moved_[document]) return keys_;
  const int64_t length = pack_.documents[document].length;
  const auto hold = [&](const Share& share) {
    if (share.document != document) return;
    keys_.insert(keys_of(options_.mask, share.rows, length));
  };
  for (const Share& share : ranks_[receiver].guests) hold(share);
  if (pack_.documents[document].num_segments == 1) return keys_;
  for (const Share& share : own_now(receiver)) hold(share);
  for (const Segment& segment : pack_.segments_of(pack_.documents[document])) {
    if (segment.rank == receiver) keys_.insert(positions(segment));
  }
  return keys_;
}

int64_t Assignment::bytes_of(int64_t document, Range rows, const RangeSet& held) const {
  const Range keys = keys_of(options_.mask, rows, pack_.documents[document].length);
  const int64_t num_held = held.ranges().empty() ? 0 : held.num_shared(keys);
  return num_rows(rows) * options_.row_bytes.query +
         (num_rows(keys) - num_held) * options_.row_bytes.key;
}

double Assignment::node_bytes_left(int64_t rank) const {
  return limit_ * options_.links.node_bytes_per_second / kOneWay -
         static_cast<double>(traffic_[rank].node_bytes_out);
}

bool Assignment::links_fit(const Move& move) const {
  const int64_t document = ranks_[move.donor].own[move.share].document;
  const Load &in = traffic_[move.receiver], &out = traffic_[move.donor];
  const bool inside = traffic_.same_node(move.donor, move.receiver);
  const double bytes_per_second =
      inside ? options_.links.bytes_per_second : options_.links.node_bytes_per_second;
  const double most = limit_ * bytes_per_second / kOneWay;
  const int64_t now_in = inside ? in.bytes_in - in.node_bytes_in : in.node_bytes_in;
  const int64_t now_out = inside ? out.bytes_out - out.node_bytes_out : out.node_bytes_out;
  const bool lone_home = pack_.documents[document].num_segments == 1;
  const int64_t bytes_out =
      lone_home ? move.bytes : num_rows(move.slice) * options_.row_bytes.query;
  if (static_cast<double>(now_in + move.bytes) > most) return false;
  if (static_cast<double>(now_out + bytes_out) > most) return false;
  const Range keys = keys_of(options_.mask, move.slice, pack_.documents[document].length);
  const int64_t held = in.held_bytes + num_rows(move.slice) * options_.held_bytes.query +
                       num_rows(keys) * options_.held_bytes.key;
  return static_cast<double>(held) <= options_.cap_bytes(move.receiver);
}

// Adds or takes back the traffic of what a rank computes of one document.
void Assignment::count(int64_t document, int64_t rank, int64_t times) {
  rows_.clear();
  for (const Share& share : ranks_[rank].guests) {
    if (share.document == document) rows_.push_back(share.rows);
  }
  if (pack_.documents[document].num_segments > 1) {
    for (const Share& share : own_now(rank)) {
      if (share.document == document) rows_.push_back(share.rows);
    }
  }
  traffic_.add(document, rows_, rank, times);
}

// Gives the slice to the receiver, as part of an adjacent guest where there is one.
void Assignment::take(const Move& move, int64_t document) {
  std::vector<Share>& guests = ranks_[move.receiver].guests;
  double& total = seconds_[move.receiver];
  Share taken{document, move.slice, move.seconds};
  if (has_moved_[document]) {
    for (auto guest = guests.begin(); guest != guests.end();) {
      const bool joins = guest->document == document && (guest->rows.end == taken.rows.begin ||
                                                         guest->rows.begin == taken.rows.end);
      if (joins) {
        taken.rows = {std::min(taken.rows.begin, guest->rows.begin),
                      std::max(taken.rows.end, guest->rows.end)};
        total -= guest->seconds;
      }
      guest = joins ? guests.erase(guest) : guest + 1;
    }
    taken.seconds = seconds(document, taken.rows);
  }
  guests.push_back(taken);
  total += taken.seconds;
}

void Assignment::apply(const Move& move) {
  std::vector<Share>& own = ranks_[move.donor].own;
  const Share share = own[move.share];
  const bool was_moved = has_moved_[share.document];
  if (was_moved) {
    count(share.document, move.donor, -1);
    count(share.document, move.receiver, -1);
  }
  own.erase(own.begin() + static_cast<std::ptrdiff_t>(move.share));
  for (const Range rest :
       {Range{share.rows.begin, move.slice.begin}, Range{move.slice.end, share.rows.end}}) {
    if (num_rows(rest) == 0) continue;
    const Share left{share.document, rest, seconds(share.document, rest)};
    own.insert(std::upper_bound(own.begin(), own.end(), left, dearer), left);
  }
  const bool is_idle = own.empty() && ranks_[move.donor].guests.empty();
  seconds_[move.donor] = is_idle ? 0.0 : seconds_[move.donor] - move.relief;
  take(move, share.document);
  if (was_moved) count(share.document, move.donor, 1);
  has_moved_[share.document] = 1;
  count(share.document, move.receiver, 1);
}

std::vector<Given> Assignment::given() const {
  std::vector<Given> all;
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    for (const Share& guest : ranks_[rank].guests) {
      const std::span<const Segment> segments = pack_.segments_of(pack_.documents[guest.document]);
      if (segments.size() > 1) continue;
      all.push_back({guest.document, segments[0].rank, rank, guest.rows});
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Given& a, const Given& b) { return a.document < b.document; });
  return all;
}

Share Assignment::whole(int64_t document) const {
  const Document& entry = pack_.documents[document];
  const Range rows{entry.first_query, entry.length};
  return {document, rows, seconds(document, rows)};
}

void Assignment::take_back(std::span<const Given> given) {
  const Share all = whole(given[0].document);
  const auto is_of = [&](const Share& share) { return share.document == all.document; };
  for (const Given& each : given) {
    std::vector<Share>& guests = ranks_[each.receiver].guests;
    count(all.document, each.receiver, -1);
    for (const Share& guest : guests) {
      if (is_of(guest)) seconds_[each.receiver] -= guest.seconds;
    }
    std::erase_if(guests, is_of);
  }
  const int64_t donor = given[0].donor;
  std::vector<Share>& own = ranks_[donor].own;
  for (const Share& share : own) {
    if (is_of(share)) seconds_[donor] -= share.seconds;
  }
  std::erase_if(own, is_of);
  own.insert(std::upper_bound(own.begin(), own.end(), all, dearer), all);
  seconds_[donor] += all.seconds;
}

Move Assignment::move_of(const Given& given) const {
  const std::vector<Share>& own = ranks_[given.donor].own;
  const auto share = std::find_if(own.begin(), own.end(), [&](const Share& each) {
    return each.document == given.document && each.rows.begin <= given.rows.begin &&
           given.rows.end <= each.rows.end;
  });
  const double kept = seconds(given.document, {share->rows.begin, given.rows.begin}) +
                      seconds(given.document, {given.rows.end, share->rows.end});
  return {given.donor,
          given.receiver,
          static_cast<size_t>(share - own.begin()),
          given.rows,
          share->seconds - kept,
          seconds(given.document, given.rows),
          bytes_of(given.document, given.rows, RangeSet())};
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
  tasks.reserve(home_.shares.size() + ranks_.size());
  std::vector<Share> shares;
  for (int64_t rank = 0; rank < pack_.num_ranks; ++rank) {
    const std::span<const Share> own = own_now(rank);
    const std::vector<Share>& guests = ranks_[rank].guests;
    std::span<const Share> all = own;
    if (ranks_[rank].is_open || !guests.empty()) {
      shares.assign(own.begin(), own.end());
      shares.insert(shares.end(), guests.begin(), guests.end());
      std::sort(shares.begin(), shares.end(), in_order);
      all = shares;
    }
    for (const Share& share : all) {
      tasks.push_back({share.document, share.rows.begin, share.rows.end, rank});
    }
  }
  return tasks;
}

}  // namespace distca::planner
