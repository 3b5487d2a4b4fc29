#include "scheduler.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "assignment.h"

namespace distca::planner {
namespace {

constexpr size_t kMaxReceivers = 32;   // tried per move before the donor is given up
constexpr double kLeastRelief = 1e-4;  // of the limit; less is not worth a task
constexpr size_t kNumNear = 3;         // items tried on either side of the ideal size

enum class Side { kHead, kTail };

// One end of an item, in steps of `grain` rows.
struct End {
  const Item& item;
  Side side;
  int64_t grain;

  int64_t num_grains() const { return (num_rows(item.rows) + grain - 1) / grain; }
  int64_t boundary(int64_t count) const {
    const int64_t from_begin = side == Side::kHead ? count : num_grains() - count;
    return std::min(item.rows.end, item.rows.begin + from_begin * grain);
  }
  Range slice(int64_t count) const {
    return side == Side::kHead ? Range{item.rows.begin, boundary(count)}
                               : Range{boundary(count), item.rows.end};
  }
  Range rest(int64_t count) const {
    return side == Side::kHead ? Range{boundary(count), item.rows.end}
                               : Range{item.rows.begin, boundary(count)};
  }
};

// The least count in (low, high] for which `holds`, given that it stays true once true; `high` if
// there is none.
template <typename Predicate>
int64_t first_true(int64_t low, int64_t high, Predicate holds) {
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (holds(middle) ? high : low) = middle;
  }
  return high;
}

bool better(const Move& a, const Move& b, Preference preference) {
  const double bytes_a = static_cast<double>(a.bytes) * b.relief;  // per second moved, once both
  const double bytes_b = static_cast<double>(b.bytes) * a.relief;  // are divided by both reliefs
  if (preference == Preference::kFewBytes) {
    return std::tie(bytes_a, b.relief) < std::tie(bytes_b, a.relief);
  }
  return std::tie(b.relief, bytes_a) < std::tie(a.relief, bytes_b);
}

class Search {
 public:
  Search(Assignment& assignment, int64_t donor, int64_t grain, double least_relief,
         Preference preference)
      : assignment_(assignment),
        donor_(donor),
        grain_(grain),
        least_relief_(least_relief),
        preference_(preference) {}

  // The preferred move to the roomiest server that can take any, or to one that has its keys.
  std::optional<Move> run();

 private:
  std::vector<size_t> candidates(int64_t receiver) const;
  void consider(int64_t receiver, size_t item);
  void consider_holders(size_t item);
  std::optional<Move> cut(int64_t receiver, size_t item, Side side);

  Assignment& assignment_;
  const int64_t donor_;
  const int64_t grain_;        // rows between cuts
  const double least_relief_;  // seconds
  const Preference preference_;
  std::optional<Move> best_;
};

std::optional<Move> Search::run() {
  size_t num_tried = 0;
  for (const auto& [room, receiver] : assignment_.receivers()) {
    if (num_tried++ == kMaxReceivers) break;
    for (const size_t item : candidates(receiver)) {
      consider(receiver, item);
      consider_holders(item);
    }
    if (best_) break;
  }
  return best_;
}

// The dearest items and those near twice the seconds to move: bytes per second moved are least
// when a tail of about half an item's seconds is cut off.
std::vector<size_t> Search::candidates(int64_t receiver) const {
  const std::vector<Item>& own = assignment_.server(donor_).own;
  const double wanted = std::min(assignment_.surplus(donor_), assignment_.room(receiver));
  const auto ideal = std::partition_point(
      own.begin(), own.end(), [wanted](const Item& item) { return item.seconds > 2 * wanted; });
  const size_t near = static_cast<size_t>(ideal - own.begin());
  const size_t first = near < kNumNear ? 0 : near - kNumNear;
  std::vector<size_t> chosen;
  for (size_t i = 0; i < std::min<size_t>(2, first); ++i) chosen.push_back(i);
  for (size_t i = first; i < std::min(near + kNumNear, own.size()); ++i) chosen.push_back(i);
  return chosen;
}

void Search::consider(int64_t receiver, size_t item) {
  for (Side side : {Side::kHead, Side::kTail}) {
    const std::optional<Move> move = cut(receiver, item, side);
    if (move && (!best_ || better(*move, *best_, preference_))) best_ = move;
  }
}

// The two servers with most room among those that have keys of the item's document already.
void Search::consider_holders(size_t item) {
  std::array<std::pair<double, int64_t>, 2> roomiest{{{least_relief_, -1}, {least_relief_, -1}}};
  for (const Holder& holder : assignment_.holders(assignment_.server(donor_).own[item].document)) {
    std::pair<double, int64_t> entry{assignment_.room(holder.server), holder.server};
    if (entry.first > roomiest[0].first) std::swap(entry, roomiest[0]);
    if (entry.first > roomiest[1].first) std::swap(entry, roomiest[1]);
  }
  for (const auto& [room, server] : roomiest) {
    if (server >= 0) consider(server, item);
  }
}

// The smallest slice that brings the donor within the limit or, when the receiver has no place for
// it, the largest that fits.
std::optional<Move> Search::cut(int64_t receiver, size_t index, Side side) {
  const Item& item = assignment_.server(donor_).own[index];
  const End end{item, side, grain_};
  const auto fits = [&](int64_t count) {
    return assignment_.fits(item, end.slice(count), donor_, receiver);
  };
  const auto relief = [&](int64_t count) {
    return item.seconds - assignment_.seconds(item.document, end.rest(count));
  };
  if (!fits(1)) return std::nullopt;
  const double surplus = assignment_.surplus(donor_);
  int64_t count = first_true(0, end.num_grains(), [&](int64_t c) { return relief(c) >= surplus; });
  if (!fits(count)) count = first_true(1, count, [&](int64_t c) { return !fits(c); }) - 1;

  const Range slice = end.slice(count);
  const int64_t bytes = assignment_.bytes_of(item.document, slice, receiver);
  const Move move{donor_, receiver, index, slice, end.rest(count), relief(count), bytes};
  if (move.relief < least_relief_ || !assignment_.key_homes_fit(move)) return std::nullopt;
  return move;
}

}  // namespace

std::vector<Task> home_cut(const Pack& pack) {
  std::vector<Task> tasks;
  for (size_t i = 0; i < pack.documents.size(); ++i) {
    for (const Segment& segment : pack.documents[i].segments) {
      const Range rows = positions(segment);
      tasks.push_back({static_cast<int64_t>(i), rows.begin, rows.end, segment.rank});
    }
  }
  std::sort(tasks.begin(), tasks.end(), in_plan_order);
  return tasks;
}

Schedule schedule(const Pack& pack, const PlanOptions& options, const std::vector<Task>& home,
                  const std::vector<Load>& home_loads, const Limits& limits,
                  Preference preference) {
  const double least_relief = kLeastRelief * limits.seconds;
  Assignment assignment(pack, options, limits, home, home_loads);
  bool balanced = true;
  while (!assignment.donors().empty()) {
    const int64_t donor = assignment.donors().begin()->second;
    std::optional<Move> move;
    for (const int64_t grain : {options.cost.tile_q, int64_t{1}}) {
      if (!move) move = Search(assignment, donor, grain, least_relief, preference).run();
    }
    if (move) {
      assignment.apply(*move);
    } else {
      assignment.retire(donor);
      balanced = false;
    }
  }
  return {assignment.tasks(), balanced};
}

}  // namespace distca::planner
