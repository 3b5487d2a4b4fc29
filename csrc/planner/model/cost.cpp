#include "cost.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace distca::planner {
namespace {

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

double CostModel::seconds(const Mask& mask, Range q, int64_t length) const {
  if (q.begin >= q.end) return 0.0;
  const auto tiles = static_cast<double>(num_tiles(mask, q, length, {tile_q, tile_k}));
  if (table_seconds.empty()) return tiles * seconds_per_tile + seconds_per_task;
  const Range keys = keys_of(mask, q, length);
  const int64_t num_rows = q.end - q.begin;
  const int64_t num_keys = keys.end - keys.begin;
  const double share = tiles / (static_cast<double>(ceil_div(num_rows, tile_q)) *
                                static_cast<double>(ceil_div(num_keys, tile_k)));
  return seconds_per_task + (interpolate(*this, num_rows, num_keys) - seconds_per_task) * share;
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
