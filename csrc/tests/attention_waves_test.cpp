#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "attention/aten/waves.h"

namespace distca::attention::aten {
namespace {

constexpr Mask kFull{-1, -1};

// Walks a wave's sequences: each is the wave's next task, or has no queries or no keys.
void check_wave(const Wave& wave) {
  const std::vector<int32_t>&cu_q = wave.cu_seqlens_q, &cu_k = wave.cu_seqlens_k;
  ASSERT_EQ(cu_q.size(), cu_k.size());
  ASSERT_EQ(cu_q[0], 0);
  ASSERT_EQ(cu_k[0], 0);
  size_t next = 0;
  for (size_t i = 0; i + 1 < cu_q.size(); ++i) {
    const int64_t num_q = cu_q[i + 1] - cu_q[i];
    const int64_t num_k = cu_k[i + 1] - cu_k[i];
    ASSERT_GE(num_q, 0);
    ASSERT_GE(num_k, 0);
    ASSERT_LE(num_k, wave.max_k);
    const bool is_task = [&] {
      if (next == wave.tasks.size()) return false;
      const PlacedTask& task = wave.tasks[next];
      return task.q_row == cu_q[i] && task.num_q_rows == num_q && task.k_row == cu_k[i] &&
             task.num_k_rows == num_k;
    }();
    if (is_task) {
      ASSERT_LE(num_q, wave.max_q);
      ++next;
    } else {
      ASSERT_TRUE(num_q == 0 || num_k == 0);
    }
  }
  ASSERT_EQ(next, wave.tasks.size());
}

// Every task with queries is one sequence of one wave.
void check(std::vector<PlacedTask> tasks) {
  std::vector<PlacedTask> in_waves;
  for (const Wave& wave : make_waves(tasks, kFull)) {
    check_wave(wave);
    if (::testing::Test::HasFatalFailure()) return;
    in_waves.insert(in_waves.end(), wave.tasks.begin(), wave.tasks.end());
  }
  std::erase_if(tasks, [](const PlacedTask& task) { return task.num_q_rows == 0; });
  std::ranges::sort(tasks, {}, &PlacedTask::q_row);  // distinct where there are queries
  std::ranges::sort(in_waves, {}, &PlacedTask::q_row);
  ASSERT_EQ(tasks.size(), in_waves.size());
  for (size_t i = 0; i < tasks.size(); ++i) {
    ASSERT_EQ(tasks[i].q_row, in_waves[i].q_row);
    ASSERT_EQ(tasks[i].k_row, in_waves[i].k_row);
  }
}

TEST(Waves, NoTasksNoWaves) {
  check({});
}

TEST(Waves, TasksThatTileRowsNeedNoFillers) {
  const std::vector<Wave> waves = make_waves({{0, 5, 0, 5, 0}, {5, 3, 5, 3, 0}}, kFull);
  ASSERT_EQ(waves.size(), 1u);
  EXPECT_EQ(waves[0].cu_seqlens_q, (std::vector<int32_t>{0, 5, 8}));
  EXPECT_EQ(waves[0].cu_seqlens_k, (std::vector<int32_t>{0, 5, 8}));
}

TEST(Waves, SharedKeysTakeAnotherWave) {
  const std::vector<Wave> waves = make_waves({{5, 3, 0, 8, 5}, {0, 5, 0, 5, 0}}, kFull);
  ASSERT_EQ(waves.size(), 2u);
  EXPECT_EQ(waves[0].cu_seqlens_q, (std::vector<int32_t>{0, 5}));
  EXPECT_EQ(waves[0].cu_seqlens_k, (std::vector<int32_t>{0, 5}));
  EXPECT_EQ(waves[1].cu_seqlens_q, (std::vector<int32_t>{0, 5, 8}));
  EXPECT_EQ(waves[1].cu_seqlens_k, (std::vector<int32_t>{0, 0, 8}));
  EXPECT_EQ(waves[1].max_q, 3);  // of the task, not of the rows before it
}

TEST(Waves, LongKeyGapsAreCut) {
  const Wave wave = make_waves({{2, 1, 100000, 4, 3}}, kFull)[0];
  EXPECT_EQ(wave.max_k, 4096);
  EXPECT_EQ(wave.cu_seqlens_q.size(), 1 + 25 + 1 + 1u);
}

TEST(Waves, RowsPastInt32AreRefused) {
  EXPECT_THROW(make_waves({{0, 1, int64_t{1} << 31, 4, 0}}, kFull), std::length_error);
}

// Whether PyTorch's kernel lets query `q` of a sequence see key `k`: the last query is at the last
// key, and a negative window has no limit.
bool kernel_shows(const Mask& window, const PlacedTask& task, int64_t q, int64_t k) {
  const int64_t position = q + task.num_k_rows - task.num_q_rows;
  return (window.window_left < 0 || position - k <= window.window_left) &&
         (window.window_right < 0 || k - position <= window.window_right);
}

// Tasks of documents that are cut into runs of queries, each with the keys that they see.
std::vector<PlacedTask> cut_documents(const Mask& mask, std::mt19937& random) {
  std::vector<PlacedTask> tasks;
  int64_t row = 0;
  for (int document = 0; document < 3; ++document) {
    const auto length = static_cast<int64_t>(1 + random() % 30);
    for (int64_t begin = 0, end = 0; begin < length; begin = end) {
      end = std::min(length, begin + 1 + static_cast<int64_t>(random() % 12));
      const Range keys = keys_of(mask, {begin, end}, length);
      tasks.push_back(
          {row + begin, end - begin, row + keys.begin, num_rows(keys), begin - keys.begin});
    }
    row += length;
  }
  return tasks;
}

TEST(Waves, WindowsHideTheSameKeys) {
  std::mt19937 random(2);
  for (int round = 0; round < 500; ++round) {
    const auto width = [&] { return static_cast<int64_t>(random() % 9) - 1; };
    const Mask mask{width(), width()};
    for (const Wave& wave : make_waves(cut_documents(mask, random), mask)) {
      check_wave(wave);
      for (const PlacedTask& task : wave.tasks) {
        for (int64_t q = 0; q < task.num_q_rows; ++q) {
          for (int64_t k = 0; k < task.num_k_rows; ++k) {
            const int64_t position = task.q_offset + q;
            const Range seen = keys_seen(mask, {position, position + 1}, {0, task.num_k_rows});
            ASSERT_EQ(kernel_shows(wave.window, task, q, k), seen.begin <= k && k < seen.end)
                << mask.window_left << ", " << mask.window_right << " in round " << round;
          }
        }
      }
    }
  }
}

TEST(Waves, CausalTasksOfDocumentsShareAWave) {
  const std::vector<Wave> waves = make_waves({{0, 5, 0, 5, 0}, {5, 3, 5, 3, 0}}, {-1, 0});
  ASSERT_EQ(waves.size(), 1u);
  EXPECT_TRUE(is_causal(waves[0].window));
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

}  // namespace
}  // namespace distca::attention::aten
