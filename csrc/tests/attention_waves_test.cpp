#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "attention/aten/waves.h"

namespace distca::attention::aten {
namespace {

// Walks a wave's sequences: each is the wave's next task, or has no queries or no keys.
void check_wave(const std::vector<PlacedTask>& tasks, const Waves& waves, const VarlenWave& wave,
                const int32_t* cu_seqlens, std::vector<int>& times_seen) {
  const int32_t* cu_q = cu_seqlens;
  const int32_t* cu_k = cu_seqlens + wave.num_sequences + 1;
  ASSERT_EQ(cu_q[0], 0);
  ASSERT_EQ(cu_k[0], 0);
  int64_t next = wave.first_task;
  for (int64_t i = 0; i < wave.num_sequences; ++i) {
    const int64_t num_q = cu_q[i + 1] - cu_q[i];
    const int64_t num_k = cu_k[i + 1] - cu_k[i];
    ASSERT_GE(num_q, 0);
    ASSERT_GE(num_k, 0);
    ASSERT_LE(num_k, wave.max_k);
    const bool is_task = [&] {
      if (next == wave.last_task) return false;
      const PlacedTask& task = tasks[waves.order[next]];
      return task.q_row == cu_q[i] && task.num_q_rows == num_q && task.k_row == cu_k[i] &&
             task.num_k_rows == num_k;
    }();
    if (is_task) {
      ASSERT_LE(num_q, wave.max_q);
      ++times_seen[waves.order[next++]];
    } else {
      ASSERT_TRUE(num_q == 0 || num_k == 0);
    }
  }
  ASSERT_EQ(next, wave.last_task);
}

// Every task with queries is one sequence of one wave.
void check(const std::vector<PlacedTask>& tasks) {
  const Waves waves = make_waves(tasks);
  std::vector<int> times_seen(tasks.size());
  size_t offset = 0;
  int64_t num_ordered = 0;
  for (const VarlenWave& wave : waves.waves) {
    ASSERT_EQ(wave.first_task, num_ordered);
    check_wave(tasks, waves, wave, waves.cu_seqlens.data() + offset, times_seen);
    if (::testing::Test::HasFatalFailure()) return;
    num_ordered = wave.last_task;
    offset += 2 * (wave.num_sequences + 1);
  }
  ASSERT_EQ(offset, waves.cu_seqlens.size());
  for (size_t i = 0; i < tasks.size(); ++i) ASSERT_EQ(times_seen[i], tasks[i].num_q_rows > 0);
  const std::vector<int64_t> words = host_words(waves);
  ASSERT_EQ(host_words(read_waves(words, static_cast<int64_t>(tasks.size()))), words);
}

TEST(Waves, NoTasksNoWaves) {
  check({});
}

TEST(Waves, TasksThatTileRowsNeedNoFillers) {
  const Waves waves = make_waves({{0, 5, 0, 5, 0}, {5, 3, 5, 3, 0}});
  EXPECT_EQ(waves.cu_seqlens, (std::vector<int32_t>{0, 5, 8, 0, 5, 8}));
}

TEST(Waves, SharedKeysTakeAnotherWave) {
  const Waves waves = make_waves({{5, 3, 0, 8, 5}, {0, 5, 0, 5, 0}});
  ASSERT_EQ(waves.waves.size(), 2u);
  EXPECT_EQ(waves.order, (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(waves.cu_seqlens, (std::vector<int32_t>{0, 5, 0, 5, 0, 5, 8, 0, 0, 8}));
}

TEST(Waves, LongKeyGapsAreCut) {
  const Waves waves = make_waves({{2, 1, 100000, 4, 3}});
  EXPECT_EQ(waves.waves[0].max_k, 4096);
  EXPECT_EQ(waves.waves[0].num_sequences, 1 + 25 + 1);
}

TEST(Waves, RowsPastInt32AreRefused) {
  EXPECT_THROW(make_waves({{0, 1, int64_t{1} << 31, 4, 0}}), std::length_error);
}

TEST(Waves, RandomTasks) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<PlacedTask> tasks;
    int64_t q_row = 0;
    const auto num_tasks = static_cast<int64_t>(random() % 12);
    for (int64_t i = 0; i < num_tasks; ++i) {
      if (random() % 3 == 0) q_row += static_cast<int64_t>(random() % 9);
      const auto num_q = static_cast<int64_t>(random() % 7);
      const int64_t spread = random() % 5 == 0 ? 200 : 1;
      tasks.push_back({q_row, num_q, static_cast<int64_t>(random() % 60) * spread,
                       static_cast<int64_t>(1 + random() % 40), 0});
      q_row += num_q;
    }
    std::shuffle(tasks.begin(), tasks.end(), random);
    check(tasks);
    if (HasFatalFailure()) return;
  }
}

TEST(Waves, WordsPastTheirEndsAreRefused) {
  const std::vector<PlacedTask> tasks = {{0, 10, 0, 20, 10}, {10, 5, 0, 5, 0}};
  const std::vector<int64_t> words = host_words(make_waves(tasks));
  ASSERT_EQ(words.size(), 13u);  // two waves, two tasks in order
  for (const size_t at : {0, 1, 4, 5, 11}) {
    for (const int64_t value : {int64_t{-1}, int64_t{1} << 40}) {
      std::vector<int64_t> wrong = words;
      wrong[at] = value;
      EXPECT_THROW(read_waves(wrong, 2), std::invalid_argument) << at << " " << value;
    }
  }
  EXPECT_THROW(read_waves({}, 2), std::invalid_argument);
  EXPECT_THROW(read_waves({words.begin(), words.end() - 2}, 2), std::invalid_argument);
}

}  // namespace
}  // namespace distca::attention::aten
