#include "waves.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace distca::attention::aten {
namespace {

// A longer run of unread keys is cut, so that one long gap does not widen the launch of all
// sequences; each sequence costs the backward pass 128 rows of workspace, so not too finely.
constexpr int64_t kMaxGap = 4096;

constexpr int64_t kWaveWords = 5;

std::vector<std::vector<int64_t>> assign_waves(const std::vector<PlacedTask>& tasks) {
  std::vector<int64_t> by_q_row(tasks.size());
  std::iota(by_q_row.begin(), by_q_row.end(), 0);
  std::stable_sort(by_q_row.begin(), by_q_row.end(),
                   [&](int64_t a, int64_t b) { return tasks[a].q_row < tasks[b].q_row; });
  std::vector<std::vector<int64_t>> waves;
  for (const int64_t i : by_q_row) {
    if (tasks[i].num_q_rows == 0) continue;
    const auto fits = [&](const auto& wave) {
      return key_rows(tasks[wave.back()]).end <= tasks[i].k_row;
    };
    const auto wave = std::find_if(waves.begin(), waves.end(), fits);
    if (wave == waves.end()) {
      waves.push_back({i});
    } else {
      wave->push_back(i);
    }
  }
  return waves;
}

// cu_seqlens of one wave while its sequences are appended.
struct Sequences {
  std::vector<int32_t> cu_q{0};
  std::vector<int32_t> cu_k{0};
  int64_t max_k = 0;

  void append(int64_t num_q_rows, int64_t num_k_rows) {
    cu_q.push_back(static_cast<int32_t>(cu_q.back() + num_q_rows));
    cu_k.push_back(static_cast<int32_t>(cu_k.back() + num_k_rows));
    max_k = std::max(max_k, num_k_rows);
  }
};

Sequences tile_rows(const std::vector<PlacedTask>& tasks, const std::vector<int64_t>& wave,
                    int64_t max_k) {
  Sequences sequences;
  const int64_t max_gap = std::max(max_k, kMaxGap);
  for (const int64_t i : wave) {
    const PlacedTask& task = tasks[i];
    if (task.q_row > sequences.cu_q.back()) {
      sequences.append(task.q_row - sequences.cu_q.back(), 0);
    }
    while (task.k_row > sequences.cu_k.back()) {
      sequences.append(0, std::min(max_gap, task.k_row - sequences.cu_k.back()));
    }
    sequences.append(task.num_q_rows, task.num_k_rows);
  }
  return sequences;
}

}  // namespace

Waves make_waves(const std::vector<PlacedTask>& tasks) {
  for (const PlacedTask& task : tasks) {
    const int64_t end = std::max(query_rows(task).end, key_rows(task).end);
    if (end > kMaxRows) {
      throw std::length_error(
          "tasks: row " + std::to_string(end) +
          " is past the 2^31 - 1 rows of a varlen call; use fewer tokens a rank");
    }
  }
  Waves result;
  for (const std::vector<int64_t>& wave : assign_waves(tasks)) {
    int64_t max_q = 0, max_k = 0;
    for (const int64_t i : wave) {
      max_q = std::max(max_q, tasks[i].num_q_rows);
      max_k = std::max(max_k, tasks[i].num_k_rows);
    }
    const Sequences sequences = tile_rows(tasks, wave, max_k);
    const int64_t first_task = static_cast<int64_t>(result.order.size());
    result.order.insert(result.order.end(), wave.begin(), wave.end());
    result.waves.push_back({.num_sequences = static_cast<int64_t>(sequences.cu_q.size()) - 1,
                            .max_q = max_q,
                            .max_k = sequences.max_k,
                            .first_task = first_task,
                            .last_task = static_cast<int64_t>(result.order.size())});
    result.cu_seqlens.insert(result.cu_seqlens.end(), sequences.cu_q.begin(), sequences.cu_q.end());
    result.cu_seqlens.insert(result.cu_seqlens.end(), sequences.cu_k.begin(), sequences.cu_k.end());
  }
  return result;
}

std::vector<int64_t> host_words(const Waves& waves) {
  std::vector<int64_t> words = {static_cast<int64_t>(waves.waves.size())};
  for (const VarlenWave& w : waves.waves) {
    words.insert(words.end(), {w.num_sequences, w.max_q, w.max_k, w.first_task, w.last_task});
  }
  words.insert(words.end(), waves.order.begin(), waves.order.end());
  return words;
}

Waves read_waves(const std::vector<int64_t>& words, int64_t num_tasks) {
  const auto check = [](const char* name, int64_t value, int64_t least, int64_t most) {
    if (least <= value && value <= most) return;
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; expected " +
                                std::to_string(least) + " to " + std::to_string(most));
  };
  const auto num_words = static_cast<int64_t>(words.size());
  check("number of words of waves", num_words, 1, std::numeric_limits<int64_t>::max());
  check("number of waves", words[0], 0, (num_words - 1) / kWaveWords);
  Waves result;
  const auto order = words.begin() + 1 + kWaveWords * words[0];
  result.order.assign(order, words.end());
  for (const int64_t task : result.order) check("task of a wave", task, 0, num_tasks - 1);
  for (auto w = words.begin() + 1; w != order; w += kWaveWords) {
    check("number of sequences", w[0], 1, kMaxRows);
    check("max_q", w[1], 0, kMaxRows);
    check("max_k", w[2], 0, kMaxRows);
    check("last task of a wave", w[4], 1, static_cast<int64_t>(result.order.size()));
    check("first task of a wave", w[3], 0, w[4] - 1);
    result.waves.push_back({w[0], w[1], w[2], w[3], w[4]});
  }
  return result;
}

}  // namespace distca::attention::aten
