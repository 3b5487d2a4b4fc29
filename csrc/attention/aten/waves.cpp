#include "waves.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace distca::attention::aten {
namespace {

// A longer run of unread keys is cut, so that one long gap does not widen the launch of all
// sequences; each sequence costs the backward pass 128 rows of workspace, so not too finely.
constexpr int64_t kMaxGap = 4096;

void check_rows(const std::vector<PlacedTask>& tasks) {
  for (const PlacedTask& task : tasks) {
    const int64_t end = std::max(query_rows(task).end, key_rows(task).end);
    if (end > kMaxRows) {
      throw std::length_error(
          "tasks: row " + std::to_string(end) +
          " is past the 2^31 - 1 rows of a varlen call; use fewer tokens a rank");
    }
  }
}

void append_sequence(int64_t num_q_rows, int64_t num_k_rows, Wave& wave) {
  wave.cu_seqlens_q.push_back(static_cast<int32_t>(wave.cu_seqlens_q.back() + num_q_rows));
  wave.cu_seqlens_k.push_back(static_cast<int32_t>(wave.cu_seqlens_k.back() + num_k_rows));
  wave.max_k = std::max(wave.max_k, num_k_rows);
}

void tile_rows(Wave& wave) {
  int64_t max_gap = kMaxGap;
  for (const PlacedTask& task : wave.tasks) max_gap = std::max(max_gap, task.num_k_rows);
  for (const PlacedTask& task : wave.tasks) {
    const int64_t q_gap = task.q_row - wave.cu_seqlens_q.back();
    if (q_gap > 0) append_sequence(q_gap, 0, wave);
    while (task.k_row > wave.cu_seqlens_k.back()) {
      append_sequence(0, std::min(max_gap, task.k_row - wave.cu_seqlens_k.back()), wave);
    }
    append_sequence(task.num_q_rows, task.num_k_rows, wave);
    wave.max_q = std::max(wave.max_q, task.num_q_rows);
  }
}

// Returns the window that hides the same keys if queries stand `shift` positions later.
Mask shifted(const Mask& mask, int64_t shift) {
  Mask window = mask;
  if (mask.window_left >= 0) window.window_left += shift;
  if (mask.window_right >= 0) window.window_right -= shift;
  return window;
}

}  // namespace

std::vector<Wave> make_waves(std::vector<PlacedTask> tasks, const Mask& mask) {
  check_rows(tasks);
  std::erase_if(tasks, [](const PlacedTask& task) { return task.num_q_rows == 0; });
  std::ranges::stable_sort(tasks, {}, &PlacedTask::q_row);
  std::vector<Wave> waves;
  for (const PlacedTask& task : tasks) {
    const Mask window = shifted(mask, num_later_keys(task));
    auto wave = std::ranges::find_if(waves, [&](const Wave& wave) {
      return key_rows(wave.tasks.back()).end <= task.k_row &&
             wave.window.window_left == window.window_left &&
             wave.window.window_right == window.window_right;
    });
    if (wave == waves.end()) {
      wave = waves.insert(waves.end(), Wave{});
      wave->window = window;
    }
    wave->tasks.push_back(task);
  }
  for (Wave& wave : waves) tile_rows(wave);
  return waves;
}

}  // namespace distca::attention::aten
