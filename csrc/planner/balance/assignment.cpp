#include "assignment.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace distca::planner {
namespace {

constexpr int64_t kMovedAtOnce = 16;   // shares that move up in a step
constexpr int64_t kStepsPerWhole = 4;  // a document that is given whole

}  // namespace

Home::Home(const Pack& pack, const PlanOptions& options)
    : shares(pack.segments.size()),
      first(pack.num_ranks + 1, 0),
      seconds(pack.num_ranks, 0.0),
      traffic(pack, options),
      dearest_(pack.num_ranks) {
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

std::span<const Share> Home::dearest_first(int64_t rank) const {
  std::vector<Share>& sorted = dearest_[rank];
  if (sorted.empty()) {
    const std::span<const Share> own = shares_of(rank);
    sorted.assign(own.begin(), own.end());
    std::sort(sorted.begin(), sorted.end(), is_dearer);
  }
  return sorted;
}

Assignment::Assignment(const Pack& pack, const PlanOptions& options, const Home& home, double limit,
                       Budget& budget)
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

double Assignment::room(int64_t rank) const {
  const double most = limit(rank);
  const double in_link = link_seconds_in(traffic_[rank], options_.links) / limit_;
  const double held = static_cast<double>(traffic_[rank].held_bytes) / options_.cap_bytes(rank);
  return most - std::max(seconds_[rank], most * std::max(in_link, held));
}

void Assignment::open(int64_t rank) {
  Rank& entry = ranks_[rank];
  if (entry.is_open) return;
  entry.own.assign(home_.dearest_first(rank));
  entry.is_open = true;
  spend(static_cast<int64_t>(entry.own.size()) / kMovedAtOnce + 1);
}

std::span<const Share> Assignment::own(int64_t rank) {
  open(rank);
  return ranks_[rank].own.all();
}

std::span<const Share> Assignment::own_of(int64_t rank, int64_t document) const {
  const auto found = ranks_[rank].left.find(document);
  if (found != ranks_[rank].left.end()) return found->second;
  if (away_[document] == Away::kWhole) return {};
  return shares_of(home_.shares_of(rank), document);
}

std::vector<Share>& Assignment::left_of(int64_t rank, int64_t document) {
  const auto [found, is_new] = ranks_[rank].left.try_emplace(document);
  if (is_new) {
    const std::span<const Share> all = shares_of(home_.shares_of(rank), document);
    found->second.assign(all.begin(), all.end());
  }
  return found->second;
}

void Assignment::insert_own(int64_t rank, const Share& share) {
  spend(ranks_[rank].own.insert(share) / kMovedAtOnce);
  left_of(rank, share.document).push_back(share);
}

const RangeSet& Assignment::keys_on(int64_t receiver, int64_t document) {
  keys_.clear();
  if (away_[document] == Away::kNothing) return keys_;
  const Document& entry = pack_.documents[document];
  const auto hold = [&](std::span<const Share> shares) {
    spend(static_cast<int64_t>(shares.size()));
    for (const Share& share : shares) {
      keys_.insert(keys_of(options_.mask, share.rows, entry.length));
    }
  };
  hold(shares_of(ranks_[receiver].guests, document));
  if (has_lone_home(document)) return keys_;
  hold(own_of(receiver, document));
  for (const Share& home : shares_of(home_.shares_of(receiver), document)) {
    const bool has_context = home.rows.begin == entry.first_query;  // context comes first
    keys_.insert({has_context ? 0 : home.rows.begin, home.rows.end});
  }
  return keys_;
}

int64_t Assignment::bytes_of(int64_t document, Range rows, const RangeSet& held) const {
  const Range keys = keys_of(options_.mask, rows, pack_.documents[document].length);
  spend(static_cast<int64_t>(held.ranges().size()));
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
  const int64_t bytes_out =
      has_lone_home(document) ? move.bytes : num_rows(move.slice) * options_.row_bytes.query;
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
  for (const Share& share : shares_of(ranks_[rank].guests, document)) rows_.push_back(share.rows);
  if (!has_lone_home(document)) {
    for (const Share& share : own_of(rank, document)) rows_.push_back(share.rows);
  }
  spend(pack_.documents[document].num_segments + static_cast<int64_t>(rows_.size()));
  traffic_.add(document, rows_, rank, times);
}

// Gives the slice to the receiver, as part of an adjacent guest where there is one.
void Assignment::take(const Move& move, int64_t document) {
  std::vector<Share>& guests = ranks_[move.receiver].guests;
  double& total = seconds_[move.receiver];
  Share taken{document, move.slice, move.seconds};
  auto first = std::lower_bound(guests.begin(), guests.end(), taken, in_order), last = first;
  const auto joins = [&](const Share& guest) {
    return guest.document == document &&
           (guest.rows.end == taken.rows.begin || guest.rows.begin == taken.rows.end);
  };
  if (first != guests.begin() && joins(*(first - 1))) --first;
  if (last != guests.end() && joins(*last)) ++last;
  for (auto guest = first; guest != last; ++guest) {
    taken.rows = {std::min(taken.rows.begin, guest->rows.begin),
                  std::max(taken.rows.end, guest->rows.end)};
    total -= guest->seconds;
  }
  if (away_[document] != Away::kNothing) taken.seconds = seconds(document, taken.rows);
  total += taken.seconds;
  spend((guests.end() - last) / kMovedAtOnce);
  if (first == last) {
    guests.insert(first, taken);
  } else {
    *first = taken;
    guests.erase(first + 1, last);
  }
}

void Assignment::apply(const Move& move) {
  Rank& donor = ranks_[move.donor];
  const Share share = donor.own[move.share];
  const bool was_moved = away_[share.document] != Away::kNothing;
  if (was_moved) {
    count(share.document, move.donor, -1);
    count(share.document, move.receiver, -1);
  }
  std::erase_if(left_of(move.donor, share.document),
                [&](const Share& each) { return each.rows.begin == share.rows.begin; });
  spend(donor.own.erase(move.share, move.share + 1) / kMovedAtOnce);
  for (const Range rest :
       {Range{share.rows.begin, move.slice.begin}, Range{move.slice.end, share.rows.end}}) {
    if (num_rows(rest) == 0) continue;
    insert_own(move.donor, {share.document, rest, seconds(share.document, rest)});
  }
  seconds_[move.donor] = is_idle(move.donor) ? 0.0 : seconds_[move.donor] - move.relief;
  take(move, share.document);
  if (was_moved) count(share.document, move.donor, 1);
  away_[share.document] = Away::kRows;
  count(share.document, move.receiver, 1);
}

// Gives all shares of a document that a donor which serves nothing still has. Ignores links.
double Assignment::give_all_of(int64_t document, int64_t donor, int64_t receiver, double most) {
  const std::span<const Share> own = own_of(donor, document);
  const std::vector<Share> all(own.begin(), own.end());
  double given = 0;
  for (const Share& share : all) given += share.seconds;
  if (given > most) return 0;
  std::vector<Share>& guests = ranks_[receiver].guests;
  count(document, donor, -1);
  count(document, receiver, -1);
  for (const Share& share : all) {
    const size_t idx = find_own(donor, share);
    spend(ranks_[donor].own.erase(idx, idx + 1) / kMovedAtOnce);
  }
  left_of(donor, document).clear();
  guests.insert(guests.end(), all.begin(), all.end());
  std::sort(guests.begin(), guests.end(), in_order);
  spend(static_cast<int64_t>(guests.size()));
  count(document, receiver, 1);
  seconds_[receiver] += given;
  seconds_[donor] = is_idle(donor) ? 0.0 : seconds_[donor] - given;
  return given;
}

double Assignment::give_wholes(int64_t donor, int64_t receiver, double most) {
  const std::span<const Share> own = this->own(donor);
  const auto begin = std::partition_point(
      own.begin(), own.end(), [most](const Share& share) { return share.seconds > most; });
  const auto first = static_cast<size_t>(begin - own.begin());
  const auto move = [&](size_t idx) {
    const Share& share = own[idx];
    const RangeSet& held = keys_on(receiver, share.document);
    const int64_t bytes = bytes_of(share.document, share.rows, held);
    return Move{donor, receiver, idx, share.rows, share.seconds, share.seconds, bytes};
  };
  if (first < own.size() && away_[own[first].document] == Away::kRows) {
    if (is_budget_spent()) {
      if (limit(donor) > 0) return 0;
      return give_all_of(own[first].document, donor, receiver, most);
    }
    const Move whole = move(first);
    if (!links_fit(whole)) return 0;
    apply(whole);
    return whole.seconds;
  }
  double given = 0;
  size_t last = first;
  for (; last < own.size() && given + own[last].seconds <= most; ++last) {
    const Share& share = own[last];
    if (away_[share.document] == Away::kRows || !links_fit(move(last))) break;
    away_[share.document] = Away::kWhole;
    traffic_.add(share.document, {&share.rows, 1}, receiver, 1);
    ranks_[receiver].wholes.push_back(share);
    given += share.seconds;
  }
  spend(kStepsPerWhole * static_cast<int64_t>(last - first) + 1);
  spend(ranks_[donor].own.erase(first, last) / kMovedAtOnce);
  seconds_[receiver] += given;
  seconds_[donor] = is_idle(donor) ? 0.0 : seconds_[donor] - given;
  return given;
}

bool Assignment::is_idle(int64_t rank) const {
  const Rank& entry = ranks_[rank];
  return entry.own.empty() && entry.guests.empty() && entry.wholes.empty();
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
  for (const Given& each : given) {
    std::vector<Share>& guests = ranks_[each.receiver].guests;
    count(all.document, each.receiver, -1);
    const std::span<const Share> of_document = shares_of(guests, all.document);
    for (const Share& guest : of_document) seconds_[each.receiver] -= guest.seconds;
    const auto first = guests.begin() + (of_document.data() - guests.data());
    spend((guests.end() - first) / kMovedAtOnce);
    guests.erase(first, first + static_cast<std::ptrdiff_t>(of_document.size()));
  }
  const int64_t donor = given[0].donor;
  std::vector<Share>& left = left_of(donor, all.document);
  for (const Share& share : left) {
    seconds_[donor] -= share.seconds;
    const size_t idx = ranks_[donor].own.find(share);
    spend(ranks_[donor].own.erase(idx, idx + 1) / kMovedAtOnce);
  }
  left.clear();
  insert_own(donor, all);
  seconds_[donor] += all.seconds;
}

Move Assignment::move_of(const Given& given) const {
  const std::span<const Share> own = own_of(given.donor, given.document);
  const auto share = std::find_if(own.begin(), own.end(), [&](const Share& each) {
    return each.rows.begin <= given.rows.begin && given.rows.end <= each.rows.end;
  });
  const double kept = seconds(given.document, {share->rows.begin, given.rows.begin}) +
                      seconds(given.document, {given.rows.end, share->rows.end});
  return {given.donor,
          given.receiver,
          find_own(given.donor, *share),
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
    const auto& [own, guests, wholes, left, is_open] = ranks_[rank];
    std::span<const Share> all = home_.shares_of(rank);
    if (is_open || !guests.empty() || !wholes.empty()) {
      const std::span<const Share> rest = is_open ? own.all() : all;
      shares.assign(rest.begin(), rest.end());
      shares.insert(shares.end(), guests.begin(), guests.end());
      shares.insert(shares.end(), wholes.begin(), wholes.end());
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
