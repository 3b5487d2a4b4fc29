#include "cost.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

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

void check_axis(const char* field, const std::vector<int64_t>& axis) {
  for (size_t i = 0; i < axis.size(); ++i) {
    const int64_t least = i == 0 ? 1 : axis[i - 1] + 1;
    require(axis[i] >= least, field, "[", i, "] is ", axis[i],
            "; expected positive, increasing entries: at least ", least);
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
  const auto is_positive = [](double value) { return value > 0 && std::isfinite(value); };
  require(cost.tile_q >= 1, "cost.tile_q is ", cost.tile_q, "; expected at least 1");
  require(cost.tile_k >= 1, "cost.tile_k is ", cost.tile_k, "; expected at least 1");
  require(is_positive(cost.seconds_per_tile), "cost.seconds_per_tile is ", cost.seconds_per_tile,
          "; expected a positive number");
  require(cost.seconds_per_task == 0 || is_positive(cost.seconds_per_task),
          "cost.seconds_per_task is ", cost.seconds_per_task,
          "; expected zero or a positive number");
  check_axis("cost.table_rows", cost.table_rows);
  check_axis("cost.table_keys", cost.table_keys);
  const size_t num_rows = cost.table_rows.size(), num_keys = cost.table_keys.size();
  require(cost.table_seconds.size() == num_rows * num_keys && (num_rows == 0) == (num_keys == 0),
          "cost.table_seconds is ", cost.table_seconds.size(), " entries; expected ", num_rows,
          " rows x ", num_keys, " keys of them, none empty or all");
  for (size_t i = 0; i < cost.table_seconds.size(); ++i) {
    require(is_positive(cost.table_seconds[i]), "cost.table_seconds[", i, "] is ",
            cost.table_seconds[i], "; expected a positive number");
  }
}

}  // namespace distca::planner
