#include "cost.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace distca::planner {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The same, fast for the powers of two that tiles are.
int64_t num_tiles_up_to(int64_t position, int64_t tile) {
  const uint64_t side = static_cast<uint64_t>(tile);
  if ((side & (side - 1)) != 0) return ceil_div(position, tile);
  return (position + tile - 1) >> std::countr_zero(side);
}

// Sum of 0 + 1 + ... + (count - 1).
int64_t triangle(int64_t count) {
  return count * (count - 1) / 2;
}

// Sum over i in [0, count) of floor((first + i * step) / divisor); nothing is negative. The part
// below the divisor counts lattice points under a line, whose axes swap as in Euclid's algorithm.
int64_t floor_sum(int64_t count, int64_t first, int64_t step, int64_t divisor) {
  int64_t sum = 0;
  while (count > 0) {
    sum += triangle(count) * (step / divisor) + count * (first / divisor);
    step %= divisor;
    first %= divisor;
    const int64_t last = first + count * step;
    count = last / divisor;
    first = last % divisor;
    std::swap(step, divisor);
  }
  return sum;
}

// Tiles of any mask with any visible pair; apart, so that the causal case stays fast.
[[gnu::noinline]] int64_t num_masked_tiles(const Mask& mask, Range q, int64_t length,
                                           const CostModel& cost) {
  const int64_t num_q_tiles = num_tiles_up_to(q.end - q.begin, cost.tile_q);
  const Range keys = keys_of(mask, q, length);
  const int64_t widest = ceil_div(length - keys.begin, cost.tile_k);

  // Key tiles up to the last key of each query tile; the last query tile may be cut short.
  int64_t tiles = ceil_div(keys.end - keys.begin, cost.tile_k);
  int64_t num_rising = 0;
  if (mask.window_right >= 0) {
    const int64_t room = std::max<int64_t>(0, length - mask.window_right - q.begin);
    num_rising = std::min(num_q_tiles - 1, room / cost.tile_q);
  }
  if (num_rising > 0) {
    const int64_t first_end = q.begin + cost.tile_q + mask.window_right;
    const int64_t first = first_end - keys.begin + cost.tile_k - 1;
    tiles += floor_sum(num_rising, first, cost.tile_q, cost.tile_k);
  }
  tiles += (num_q_tiles - 1 - num_rising) * widest;

  // Key tiles wholly before the first key of each query tile.
  if (mask.window_left >= 0) {
    const int64_t hidden = std::max<int64_t>(0, mask.window_left - q.begin);
    const int64_t skipped =
        hidden / cost.tile_q + (hidden % cost.tile_q != 0);  // query tiles that see key 0
    if (skipped < num_q_tiles) {
      const int64_t first = q.begin + skipped * cost.tile_q - mask.window_left - keys.begin;
      tiles -= floor_sum(num_q_tiles - skipped, first, cost.tile_q, cost.tile_k);
    }
  }
  return tiles;
}

// Tiles with any visible pair: query tiles start at q.begin, key tiles at the first visible key.
int64_t num_tiles(const Mask& mask, Range q, int64_t length, const CostModel& cost) {
  const bool is_causal = mask.window_left < 0 && mask.window_right == 0;
  if (!is_causal || cost.tile_q != cost.tile_k) return num_masked_tiles(mask, q, length, cost);
  // Each query tile sees one key tile more than the one before it, up to the last, cut short.
  const int64_t num_q_tiles = num_tiles_up_to(q.end - q.begin, cost.tile_q);
  return (num_q_tiles - 1) * num_tiles_up_to(q.begin, cost.tile_k) + triangle(num_q_tiles) +
         num_tiles_up_to(q.end, cost.tile_k);
}

// Where x stands on an axis: between two entries, or beyond an edge and in proportion to it.
struct Place {
  size_t low;
  size_t high;
  double weight;  // of the entry at `high`
  double scale;
};

Place place_on(const std::vector<int64_t>& axis, int64_t x) {
  const size_t last = axis.size() - 1;
  const double value = static_cast<double>(x);
  if (x <= axis.front()) return {0, 0, 0.0, value / static_cast<double>(axis.front())};
  if (x >= axis.back()) return {last, last, 0.0, value / static_cast<double>(axis.back())};
  const size_t high = std::upper_bound(axis.begin(), axis.end(), x) - axis.begin();
  const double low_x = static_cast<double>(axis[high - 1]);
  return {high - 1, high, (value - low_x) / (static_cast<double>(axis[high]) - low_x), 1.0};
}

double interpolate(const CostModel& cost, int64_t num_rows, int64_t num_keys) {
  const Place row = place_on(cost.table_rows, num_rows);
  const Place key = place_on(cost.table_keys, num_keys);
  const auto along_keys = [&](size_t i) {
    const double* seconds = cost.table_seconds.data() + i * cost.table_keys.size();
    return seconds[key.low] * (1 - key.weight) + seconds[key.high] * key.weight;
  };
  const double seconds = along_keys(row.low) * (1 - row.weight) + along_keys(row.high) * row.weight;
  return seconds * row.scale * key.scale;
}

[[noreturn]] void reject(const std::string& field, const std::string& value,
                         const std::string& expected) {
  throw std::invalid_argument(field + " is " + value + "; expected " + expected);
}

void check_axis(const std::string& field, const std::vector<int64_t>& axis) {
  for (size_t i = 0; i < axis.size(); ++i) {
    const int64_t least = i == 0 ? 1 : axis[i - 1] + 1;
    if (axis[i] < least) {
      reject(field + "[" + std::to_string(i) + "]", std::to_string(axis[i]),
             "positive, increasing entries: at least " + std::to_string(least));
    }
  }
}

}  // namespace

Range keys_of(const Mask& mask, Range q, int64_t length) {
  if (q.begin >= q.end) return {q.begin, q.begin};
  const bool all_before = mask.window_left < 0 || mask.window_left >= q.begin;
  const bool all_after = mask.window_right < 0 || mask.window_right >= length - q.end;
  return {all_before ? 0 : q.begin - mask.window_left,
          all_after ? length : q.end + mask.window_right};
}

int64_t num_pairs(const Mask& mask, Range q, int64_t length) {
  if (q.begin >= q.end) return 0;
  int64_t pairs = (q.end - q.begin) * length;
  if (mask.window_right >= 0) {  // query p hides the keys behind p + window_right
    const int64_t split = std::clamp(length - mask.window_right, q.begin, q.end);
    const int64_t shortest = length - mask.window_right - split;  // hidden from query split - 1
    pairs -= (split - q.begin) * shortest + triangle(split - q.begin);
  }
  if (mask.window_left >= 0) {  // and the keys before p - window_left
    const int64_t split = std::clamp(mask.window_left, q.begin, q.end);
    pairs -= (q.end - split) * (split - mask.window_left) + triangle(q.end - split);
  }
  return pairs;
}

double CostModel::seconds(const Mask& mask, Range q, int64_t length) const {
  if (q.begin >= q.end) return 0.0;
  if (table_seconds.empty()) {
    return static_cast<double>(num_tiles(mask, q, length, *this)) * seconds_per_tile +
           seconds_per_task;
  }
  const Range keys = keys_of(mask, q, length);
  const int64_t num_rows = q.end - q.begin;
  const int64_t num_keys = keys.end - keys.begin;
  const double share = static_cast<double>(num_tiles(mask, q, length, *this)) /
                       (static_cast<double>(ceil_div(num_rows, tile_q)) *
                        static_cast<double>(ceil_div(num_keys, tile_k)));
  return seconds_per_task + (interpolate(*this, num_rows, num_keys) - seconds_per_task) * share;
}

void validate(const Mask& mask) {
  const std::string expected = "-1 (no limit) or the number of keys seen on that side";
  if (mask.window_left < -1) {
    reject("mask.window_left", std::to_string(mask.window_left), expected);
  }
  if (mask.window_right < -1) {
    reject("mask.window_right", std::to_string(mask.window_right), expected);
  }
}

void validate(const CostModel& cost) {
  if (cost.tile_q < 1) reject("cost.tile_q", std::to_string(cost.tile_q), "at least 1");
  if (cost.tile_k < 1) reject("cost.tile_k", std::to_string(cost.tile_k), "at least 1");
  if (!(cost.seconds_per_tile > 0) || !std::isfinite(cost.seconds_per_tile)) {
    reject("cost.seconds_per_tile", std::to_string(cost.seconds_per_tile), "a positive number");
  }
  if (!(cost.seconds_per_task >= 0) || !std::isfinite(cost.seconds_per_task)) {
    reject("cost.seconds_per_task", std::to_string(cost.seconds_per_task),
           "zero or a positive number");
  }
  check_axis("cost.table_rows", cost.table_rows);
  check_axis("cost.table_keys", cost.table_keys);
  const size_t num_entries = cost.table_rows.size() * cost.table_keys.size();
  const bool lone_axis = num_entries == 0 && cost.table_rows.size() + cost.table_keys.size() > 0;
  if (cost.table_seconds.size() != num_entries || lone_axis) {
    reject("cost.table_seconds", std::to_string(cost.table_seconds.size()) + " entries",
           std::to_string(cost.table_rows.size()) + " rows x " +
               std::to_string(cost.table_keys.size()) + " keys of them, none empty or all");
  }
  for (size_t i = 0; i < num_entries; ++i) {
    if (!(cost.table_seconds[i] > 0) || !std::isfinite(cost.table_seconds[i])) {
      reject("cost.table_seconds[" + std::to_string(i) + "]", std::to_string(cost.table_seconds[i]),
             "a positive number");
    }
  }
}

}  // namespace distca::planner
