#include "slices.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace distca::planner {
namespace {

constexpr size_t kNumDearest = 1;      // shares of a donor that are tried
constexpr size_t kNumNear = 1;         // and those on either side of the wanted size
constexpr double kThriftyPart = 0.55;  // of a causal document, the last rows bring most for bytes
constexpr double kKeysPart = 0.7;      // of its least bytes, those of the keys of a last slice
constexpr int kNumEnds = 4;            // ends that are tried for a document's first slice
constexpr size_t kMaxAlike = 1024;     // of a donor's dearest shares: about as long as another
constexpr int64_t kStepsPerCut = 16;   // of the budget
constexpr double kMissingPart = 0.5;   // of a slice's bytes for what another one leaves to be moved

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The greatest count in [low, high] for which `holds`, given that it stays false once false and
// holds for `low`.
template <typename Predicate>
int64_t last_true(int64_t low, int64_t high, Predicate holds) {
  ++high;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

// The greatest count in [0, high) whose seconds are at most `most`, where those of 0 are 0 and
// those of `high` are `above`, which is more. Causal rows grow evenly, so that a parabola through
// the middle hits it; elsewhere interpolation comes close, and every third step halves what is
// left.
template <typename Seconds>
int64_t last_within(int64_t high, double above, double most, Seconds seconds) {
  int64_t low = 0;
  double below = 0;
  const auto is_open = [&] { return high - low > 1; };
  const auto split_at = [&](int64_t count) {
    count = std::clamp(count, low + 1, high - 1);
    const double value = seconds(count);
    (value <= most ? low : high) = count;
    (value <= most ? below : above) = value;
    return value;
  };
  const int64_t middle = high / 2;
  if (middle > 1) {
    const double all = static_cast<double>(high), half = static_cast<double>(middle);
    const double mean = above / all, first_mean = split_at(middle) / half;
    const double bend = (mean - first_mean) / (all - half);
    const double slope = first_mean - bend * half;
    const double root = slope + std::sqrt(std::max(0.0, slope * slope + 4 * bend * most));
    const int64_t guess = root > 0 ? static_cast<int64_t>(std::min(all, 2 * most / root)) : middle;
    if (is_open()) split_at(guess);
    if (is_open()) split_at(low == guess ? guess + 1 : guess - 1);
  }
  for (int i = 1; is_open(); ++i) {
    const double share = (most - below) / (above - below);
    split_at(i % 3 == 0 ? low + (high - low) / 2
                        : low + static_cast<int64_t>(share * static_cast<double>(high - low)));
  }
  return low;
}

// Steps of `grain` rows from the first of a share's, of which a part is cut.
struct Steps {
  Range rows;
  int64_t grain;

  int64_t index(int64_t position) const { return ceil_div(position - rows.begin, grain); }
  int64_t at(int64_t index) const { return std::min(rows.end, rows.begin + index * grain); }
};

}  // namespace

Cutter::Cutter(Assignment& assignment, const PlanOptions& options, const Prices& prices,
               int64_t donor, std::vector<double> rooms)
    : assignment_(assignment),
      options_(options),
      prices_(prices),
      donor_(donor),
      gives_all_(assignment.limit(donor) == 0),
      rooms_(std::move(rooms)) {}

void Cutter::remember(int64_t document) {
  const auto front = fronts_.find(document);
  if (front == fronts_.end() || front->second.started) return;
  front->second.started = true;
  started_.push_back(document);
}

std::optional<Move> Cutter::first_rows(const Wish& wish, size_t index, int64_t grain) {
  const Share& share = assignment_.own(donor_)[index];
  held_ = &assignment_.keys_on(wish.receiver, share.document);
  return cut(wish, index, grain, share.rows, false);
}

// The dearest shares, those that hold just what is wanted, and what lies below slices cut before.
void Cutter::list_tried(double wanted) {
  const std::span<const Share> own = assignment_.own(donor_);
  const auto near = std::partition_point(
      own.begin(), own.end(), [wanted](const Share& share) { return share.seconds > wanted; });
  const size_t at = static_cast<size_t>(near - own.begin());
  const size_t first = at < kNumNear ? 0 : at - kNumNear;
  tried_.clear();
  for (size_t i = 0; i < std::min(kNumDearest, own.size()); ++i) tried_.push_back(i);
  for (size_t i = first; i < std::min(at + kNumNear, own.size()); ++i) tried_.push_back(i);
  std::erase_if(started_, [&](int64_t document) {
    const int64_t end = fronts_.at(document).end;
    bool is_left = false;
    for (const Share& share : assignment_.own_of(donor_, document)) {
      if (share.rows.end > end) continue;
      is_left = true;
      tried_.push_back(assignment_.find_own(donor_, share));
    }
    return !is_left;
  });
  std::sort(tried_.begin(), tried_.end());
  tried_.erase(std::unique(tried_.begin(), tried_.end()), tried_.end());
  assignment_.spend(static_cast<int64_t>(tried_.size()));
}

std::optional<Move> Cutter::best_slice(const Wish& wish, int64_t grain) {
  best_.reset();
  least_ = std::numeric_limits<double>::infinity();
  list_tried(std::min(wish.wanted, wish.room));
  for (const size_t idx : tried_) consider(wish, idx, grain);
  return best_;
}

void Cutter::consider(const Wish& wish, size_t index, int64_t grain) {
  const Share& share = assignment_.own(donor_)[index];
  held_ = &assignment_.keys_on(wish.receiver, share.document);
  const auto keep = [&](const std::optional<Move>& move) {
    if (!move) return;
    const double value = cost(wish, share, *move);
    if (value >= least_) return;
    least_ = value;
    best_ = move;
  };
  const int64_t end = end_of(wish, share, grain);
  if (wish.is_thrifty && !gives_all_ && end == share.rows.end &&
      share.seconds < std::min(wish.wanted, wish.room)) {
    const auto num_last =
        static_cast<int64_t>(kThriftyPart * static_cast<double>(num_rows(share.rows)));
    const int64_t first = (num_rows(share.rows) - num_last) / grain * grain;
    const std::optional<Move> last = cut(wish, index, grain, {share.rows.begin + first, end}, true);
    keep(last);
    if (last) return;
  }
  const std::optional<Move> below = cut(wish, index, grain, {share.rows.begin, end}, true);
  keep(below);
  if (below && below->relief >= wish.wanted) {
    const int64_t last = last_end(wish.wanted, share, end);
    if (last < end) keep(cut(wish, index, grain, {share.rows.begin, last}, true));
  }
  const bool is_kept = is_behind_front(share);
  if (!below || is_kept || gives_all_ || options_.mask.window_left >= 0) {
    keep(cut(wish, index, grain, share.rows, false));
  }
}

// Whether the share is what slices cut downward have left behind them.
bool Cutter::is_behind_front(const Share& share) const {
  const auto front = fronts_.find(share.document);
  return front != fronts_.end() && front->second.started && share.rows.begin >= front->second.end;
}

// Where the next slice of the share ends.
int64_t Cutter::end_of(const Wish& wish, const Share& share, int64_t grain) {
  if (options_.mask.window_left >= 0 || gives_all_) return share.rows.end;
  const auto found = fronts_.find(share.document);
  if (found != fronts_.end()) return found->second.started ? share.rows.end : found->second.end;
  const int64_t end = best_end(wish.planned > 0 ? wish.planned : wish.wanted, share, grain);
  fronts_.emplace(share.document, Front{end});
  return end;
}

int64_t Cutter::best_end(double surplus, const Share& share, int64_t grain) const {
  if (num_rows(share.rows) <= grain) return share.rows.end;
  const std::span<const Share> own = assignment_.own(donor_);
  const std::span<const Share> dearest = own.first(std::min(kMaxAlike, own.size()));
  double alike = 0;  // seconds of shares about as long
  assignment_.spend(static_cast<int64_t>(dearest.size()));
  for (const Share& other : dearest) {
    if (2 * num_rows(other.rows) >= num_rows(share.rows)) alike += other.seconds;
  }
  const double wanted = surplus * share.seconds / alike;
  if (wanted >= share.seconds) return share.rows.end;
  const Steps steps{share.rows, grain};
  const int64_t last = steps.index(share.rows.end);
  const int64_t least =
      1 + last_true(0, last - 1, [&](int64_t index) {
        return assignment_.seconds(share.document, {share.rows.begin, steps.at(index)}) < wanted;
      });
  int64_t best = share.rows.end;
  double fewest = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= kNumEnds; ++i) {
    const int64_t end = steps.at(least + (last - least) * i / kNumEnds);
    const double bytes = bytes_from(share, grain, end, wanted);
    if (bytes < fewest) {
      fewest = bytes;
      best = end;
    }
  }
  return best;
}

// Where a donor's last slice ends, of which nothing has to join the ones before: where its keys
// take about the bytes that they take in the slice of fewest bytes for its work.
int64_t Cutter::last_end(double wanted, const Share& share, int64_t end) const {
  const double bytes = kKeysPart * prices_.bytes_per_root * std::sqrt(wanted);
  const double num_keys = bytes / static_cast<double>(std::max<int64_t>(1, options_.row_bytes.key));
  const int64_t most = static_cast<int64_t>(std::min(num_keys, static_cast<double>(end)));
  const int64_t last = std::max(share.rows.begin, most);
  return assignment_.seconds(share.document, {share.rows.begin, last}) < wanted ? end : last;
}

// The longest slice down from `end` that takes at most `most` seconds, but at least `grain` rows.
Range Cutter::slice_below(const Share& share, int64_t grain, int64_t end, double most) const {
  const Steps steps{share.rows, grain};
  const int64_t last = steps.index(end);
  const auto slice = [&](int64_t count) { return Range{steps.at(last - count), end}; };
  const auto seconds = [&](int64_t count) {
    return assignment_.seconds(share.document, slice(count));
  };
  const double all = seconds(last);
  if (all <= most) return slice(last);
  return slice(std::max<int64_t>(1, last_within(last, all, most, seconds)));
}

// The slice that brings what is wanted, or the most below it if that has no room.
Range Cutter::last_slice(const Share& share, int64_t grain, int64_t end, double wanted,
                         double room) const {
  const Steps steps{share.rows, grain};
  end = steps.at(steps.index(last_end(wanted, share, end)));
  const Range below = slice_below(share, grain, end, wanted);
  if (assignment_.seconds(share.document, below) >= wanted) return below;
  const Range above{std::max(share.rows.begin, below.begin - grain), end};
  return assignment_.seconds(share.document, above) <= room ? above : below;
}

std::vector<Range> Cutter::row_of_slices(const Share& share, int64_t grain, int64_t end,
                                         double wanted) const {
  std::vector<Range> slices;
  assignment_.spend(static_cast<int64_t>(rooms_.size()));
  for (const double room : rooms_) {
    if (wanted <= 0 || end <= share.rows.begin) break;
    slices.push_back(wanted <= room ? last_slice(share, grain, end, wanted, room)
                                    : slice_below(share, grain, end, room));
    wanted -= assignment_.seconds(share.document, slices.back());
    end = slices.back().begin;
  }
  return slices;
}

// Bytes of slices cut downward from `end` for one receiver after the other.
double Cutter::bytes_from(const Share& share, int64_t grain, int64_t end, double wanted) const {
  const RangeSet nothing;
  double bytes = 0;
  for (const Range slice : row_of_slices(share, grain, end, wanted)) {
    bytes += static_cast<double>(assignment_.bytes_of(share.document, slice, nothing));
  }
  return bytes;
}

bool Cutter::complete(const Wish& wish, const Share& share, Range slice, Move& move) const {
  const Range head{share.rows.begin, slice.begin}, tail{slice.end, share.rows.end};
  move.slice = slice;
  move.relief = share.seconds - assignment_.seconds(share.document, head) -
                assignment_.seconds(share.document, tail);
  move.seconds = assignment_.seconds(share.document, slice);
  move.bytes = assignment_.bytes_of(share.document, slice, *held_);
  return move.seconds <= wish.room && static_cast<double>(move.bytes) <= wish.most_bytes &&
         assignment_.links_fit(move);
}

// A slice at the end of `part`, or at its beginning.
std::optional<Move> Cutter::cut(const Wish& wish, size_t index, int64_t grain, Range part,
                                bool downward) const {
  assignment_.spend(kStepsPerCut);
  const Share& share = assignment_.own(donor_)[index];
  const Steps steps{share.rows, grain};
  const int64_t first = steps.index(part.begin), last = steps.index(part.end);
  const auto slice = [&](int64_t count) {
    return downward ? Range{steps.at(last - count), steps.at(last)}
                    : Range{steps.at(first), steps.at(first + count)};
  };
  const auto seconds = [&](int64_t count) {
    return count == 0 ? 0.0 : assignment_.seconds(share.document, slice(count));
  };
  Move move{donor_, wish.receiver, index, {}, 0, 0, 0};
  int64_t count = last - first;
  const double all = seconds(count);
  if (all > std::min(wish.room, wish.wanted)) {
    count = last_within(count, all, std::min(wish.room, wish.wanted), seconds);
    if (wish.wanted <= wish.room && seconds(count) < wish.wanted &&
        seconds(count + 1) <= wish.room) {
      ++count;
    }
  }
  if (count == 0) return std::nullopt;
  if (!complete(wish, share, slice(count), move)) {
    count = last_true(0, count - 1,
                      [&](int64_t c) { return c == 0 || complete(wish, share, slice(c), move); });
    if (count == 0 || !complete(wish, share, slice(count), move)) return std::nullopt;
  }
  if (move.relief < prices_.least_relief && !gives_all_) return std::nullopt;
  return move;
}

// Bytes now and some of those that what is left to move will need at least, over the root of what
// the slice brings.
double Cutter::cost(const Wish& wish, const Share& share, const Move& move) const {
  double bytes = static_cast<double>(move.bytes);
  if (wish.is_thrifty) return bytes / move.relief;
  const double missing = std::min(wish.wanted, wish.room) - move.relief;
  if (missing > 0) bytes += kMissingPart * prices_.bytes_per_root * std::sqrt(missing);
  if (!gives_all_) return bytes / std::sqrt(move.relief);
  const RangeSet nothing;
  for (const Range rest :
       {Range{share.rows.begin, move.slice.begin}, Range{move.slice.end, share.rows.end}}) {
    bytes += static_cast<double>(assignment_.bytes_of(share.document, rest, nothing));
  }
  return bytes - static_cast<double>(assignment_.bytes_of(share.document, share.rows, nothing));
}

}  // namespace distca::planner
