#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention/sm90/tiles.h"

namespace distca::attention::sm90 {
namespace {

using Blocks = std::vector<KeyBlock>;

auto fields(const QueryTile& t) {
  return std::tie(t.q_row, t.num_rows, t.position, t.k_begin, t.k_end, t.run, t.first_of_run,
                  t.num_of_run);
}

auto fields(const KeyBlock& b) {
  return std::tie(b.k_row, b.num_rows, b.first_tile, b.last_tile, b.run, b.first_of_run,
                  b.num_of_run, b.unused);
}

bool same(const TileLists& a, const TileLists& b) {
  const auto equal = [](const auto& x, const auto& y) { return fields(x) == fields(y); };
  return a.num_runs == b.num_runs &&
         std::equal(a.tiles.begin(), a.tiles.end(), b.tiles.begin(), b.tiles.end(), equal) &&
         std::equal(a.blocks.begin(), a.blocks.end(), b.blocks.begin(), b.blocks.end(), equal);
}

bool sees(const Mask& mask, int64_t position, int64_t key) {
  return (mask.window_left < 0 || key >= position - mask.window_left) &&
         (mask.window_right < 0 || key <= position + mask.window_right);
}

// Keys that any row of the tile sees, one by one.
std::set<int64_t> keys_seen(const QueryTile& tile, const Mask& mask) {
  std::set<int64_t> keys;
  for (int64_t key = tile.k_begin; key < tile.k_end; ++key) {
    for (int64_t i = 0; i < tile.num_rows; ++i) {
      if (!sees(mask, tile.position + i, key)) continue;
      keys.insert(key);
      break;
    }
  }
  return keys;
}

// Tiles or blocks of one run lie together, in the order of the runs, and say where.
template <typename Item>
std::string check_places(const std::vector<Item>& items, int32_t num_runs) {
  for (int32_t i = 0; i < static_cast<int32_t>(items.size()); ++i) {
    const Item& item = items[i];
    const auto inside = [&](int32_t j) {
      return j >= 0 && j < static_cast<int32_t>(items.size()) && items[j].run == item.run;
    };
    const int32_t end = item.first_of_run + item.num_of_run;
    if (item.run < 0 || item.run >= num_runs) return "run";
    if (i < item.first_of_run || i >= end) return "outside its run";
    if (!inside(item.first_of_run) || !inside(end - 1)) return "range of the run";
    if (inside(item.first_of_run - 1) || inside(end)) return "run beyond its range";
    if (i > 0 && items[i - 1].run > item.run) return "order of runs";
  }
  return "";
}

// Each task's rows are cut from its first one, with its keys, in order of position.
std::string check_tiles(const std::vector<PlacedTask>& tasks, const TileLists& lists) {
  std::map<int64_t, QueryTile> by_q_row;
  for (const QueryTile& tile : lists.tiles) {
    if (!by_q_row.emplace(tile.q_row, tile).second) return "two tiles of one row";
  }
  for (const PlacedTask& task : tasks) {
    for (int64_t row = 0; row < task.num_q_rows; row += lists.tile_rows) {
      const auto found = by_q_row.find(task.q_row + row);
      if (found == by_q_row.end()) return "no tile of a row";
      const QueryTile& tile = found->second;
      if (tile.num_rows != std::min<int64_t>(lists.tile_rows, task.num_q_rows - row)) return "rows";
      if (tile.position != task.k_row + task.q_offset + row) return "position";
      if (tile.k_begin != task.k_row) return "k_begin";
      if (tile.k_end != task.k_row + task.num_k_rows) return "k_end";
      by_q_row.erase(found);
    }
  }
  if (!by_q_row.empty()) return "tile of no task";
  for (size_t i = 1; i < lists.tiles.size(); ++i) {
    const QueryTile &a = lists.tiles[i - 1], &b = lists.tiles[i];
    if (a.run == b.run && std::tie(a.position, a.q_row) >= std::tie(b.position, b.q_row)) {
      return "order of tiles";
    }
  }
  return check_places(lists.tiles, lists.num_runs);
}

// A block ends where the next one starts, or where no task links the rows on its two sides.
std::string check_blocks(const std::vector<PlacedTask>& tasks, const TileLists& lists) {
  std::set<int64_t> covered, linked;  // rows read by a task; by a task that reads the row before
  for (const PlacedTask& task : tasks) {
    for (int64_t i = 0; i < task.num_k_rows; ++i) covered.insert(task.k_row + i);
    for (int64_t i = 1; i < task.num_k_rows; ++i) linked.insert(task.k_row + i);
  }
  Blocks blocks = lists.blocks;
  std::sort(blocks.begin(), blocks.end(),
            [](const KeyBlock& a, const KeyBlock& b) { return a.k_row < b.k_row; });
  size_t next = 0;
  for (auto row = covered.begin(); row != covered.end(); ++next) {
    if (next == blocks.size() || blocks[next].k_row != *row) return "row of no block";
    const bool continues = next > 0 && linked.count(*row) > 0;
    if (continues != (next > 0 && blocks[next - 1].run == blocks[next].run)) return "run of rows";
    int32_t num_rows = 0;
    do {
      ++num_rows, ++row;
    } while (num_rows < kKeyBlockRows && row != covered.end() && linked.count(*row) > 0);
    if (blocks[next].num_rows != num_rows) return "rows of a block";
  }
  if (next != blocks.size()) return "block of no rows";
  for (const QueryTile& tile : lists.tiles) {
    for (const KeyBlock& block : blocks) {
      const bool has_keys = tile.k_begin < tile.k_end;
      const bool meets = block.k_row < tile.k_end && tile.k_begin < block.k_row + block.num_rows;
      if (has_keys && meets && tile.run != block.run) return "run of a tile";
      if (!has_keys && tile.run == block.run) return "run of a tile without keys";
    }
  }
  return check_places(lists.blocks, lists.num_runs);
}

// Pair by pair: the range of each block is the smallest that holds all tiles which see it.
std::string check_ranges(const Mask& mask, const TileLists& lists) {
  std::vector<std::set<int64_t>> seen;
  std::map<int32_t, int32_t> first_tile_of_run, longest_of_run;
  for (const QueryTile& tile : lists.tiles) {
    seen.push_back(keys_seen(tile, mask));
    first_tile_of_run.emplace(tile.run, tile.first_of_run);
    int32_t& longest = longest_of_run[tile.run];
    longest = std::max(longest, static_cast<int32_t>(seen.back().size()));
  }
  for (int32_t run = 1; run < lists.num_runs; ++run) {
    if (longest_of_run[run - 1] < longest_of_run[run]) return "longest run first";
  }
  for (const KeyBlock& block : lists.blocks) {
    int32_t first = -1, last = -1;
    for (int32_t i = 0; i < static_cast<int32_t>(lists.tiles.size()); ++i) {
      const auto key = seen[i].lower_bound(block.k_row);
      if (key == seen[i].end() || *key >= block.k_row + block.num_rows) continue;
      if (first < 0) first = i;
      last = i + 1;
    }
    const auto tiles_of_run = first_tile_of_run.find(block.run);
    if (first < 0 && tiles_of_run != first_tile_of_run.end()) first = last = tiles_of_run->second;
    if (first >= 0 && (block.first_tile != first || block.last_tile != last)) return "tile range";
    if (first < 0 && block.first_tile != block.last_tile) return "range of a run without tiles";
  }
  for (size_t i = 1; i < lists.blocks.size(); ++i) {
    const KeyBlock &a = lists.blocks[i - 1], &b = lists.blocks[i];
    const int32_t num_a = a.last_tile - a.first_tile, num_b = b.last_tile - b.first_tile;
    if (a.run == b.run && std::tie(num_b, a.k_row) >= std::tie(num_a, b.k_row)) {
      return "order of blocks";
    }
  }
  return "";
}

std::string check(const std::vector<PlacedTask>& tasks, const Mask& mask, const TileLists& lists) {
  for (const std::string& wrong : {check_tiles(tasks, lists), check_blocks(tasks, lists)}) {
    if (!wrong.empty()) return wrong;
  }
  return check_ranges(mask, lists);
}

struct Random {
  std::mt19937 engine;

  int64_t below(int64_t limit) { return static_cast<int64_t>(engine() % limit); }
  int64_t length() {
    constexpr int64_t kEdges[] = {1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257};
    return below(3) == 0 ? 1 + below(400) : kEdges[below(std::size(kEdges))];
  }
  Mask mask() {
    constexpr int64_t kWindows[] = {-1, 0, 1, 60, 128, 1000};
    return below(2) == 0 ? Mask{} : Mask{kWindows[below(6)], kWindows[below(6)]};
  }
};

// Documents next to each other or apart, cut into shards that share keys as far as `mask` makes
// them; some shards are elsewhere, some tasks have no queries or no keys.
std::vector<PlacedTask> tasks_of_documents(Random& random, const Mask& mask) {
  std::vector<PlacedTask> tasks;
  int64_t first_row = random.below(3) * 50;
  for (int64_t num = random.below(5); num > 0; --num) {
    const int64_t length = random.length();
    for (int64_t begin = 0; begin < length;) {
      const int64_t end = std::min(length, begin + random.length());
      const int64_t left = mask.window_left, right = mask.window_right;
      const int64_t k_begin = left < 0 ? 0 : std::max<int64_t>(0, begin - left);
      const int64_t k_end = right < 0 ? length : std::min(length, end + right);
      const int64_t num_q = random.below(8) == 0 ? 0 : end - begin;
      const int64_t num_k = random.below(12) == 0 ? 0 : k_end - k_begin;
      if (random.below(5) > 0) {
        tasks.push_back({0, num_q, first_row + k_begin, num_k, begin - k_begin});
      }
      begin = end;
    }
    first_row += length + random.below(2) * random.below(200);
  }
  return tasks;
}

// Anything that a task list may say: keys, positions and mask unrelated.
std::vector<PlacedTask> crafted_tasks(Random& random) {
  std::vector<PlacedTask> tasks;
  for (int64_t num = random.below(8); num > 0; --num) {
    const int64_t num_k = random.below(6) == 0 ? 0 : random.length();
    const int64_t num_q = random.below(6) == 0 ? 0 : random.length();
    tasks.push_back({0, num_q, random.below(600), num_k, random.below(500)});
  }
  return tasks;
}

// Gives the tasks disjoint query rows, in an order of its own.
void place_queries(Random& random, std::vector<PlacedTask>& tasks) {
  std::shuffle(tasks.begin(), tasks.end(), random.engine);
  int64_t q_row = 0;
  for (PlacedTask& task : tasks) {
    task.q_row = q_row + random.below(2) * random.below(9);
    q_row = task.q_row + task.num_q_rows;
  }
  std::shuffle(tasks.begin(), tasks.end(), random.engine);
}

TEST(Tiles, RandomTasks) {
  Random random{std::mt19937(1)};
  for (int round = 0; round < 300; ++round) {
    const Mask mask = random.mask();
    std::vector<PlacedTask> tasks =
        round % 2 == 0 ? tasks_of_documents(random, mask) : crafted_tasks(random);
    place_queries(random, tasks);
    for (const int32_t tile_rows : kTileRows) {
      const TileLists lists = make_tile_lists(tasks, mask, tile_rows);
      ASSERT_EQ(check(tasks, mask, lists), "") << "round " << round << ", rows " << tile_rows;
      const KeyCounts keys{static_cast<int64_t>(lists.blocks.size()), lists.num_runs};
      ASSERT_EQ(count_keys(tasks), keys) << "round " << round;
      ASSERT_EQ(count_tiles(tasks, tile_rows), lists.tiles.size()) << "round " << round;
      std::shuffle(tasks.begin(), tasks.end(), random.engine);
      ASSERT_TRUE(same(make_tile_lists(tasks, mask, tile_rows), lists)) << "round " << round;
    }
  }
}

TEST(Tiles, EveryTamperedFieldIsFound) {
  const std::vector<PlacedTask> tasks = {
      {0, 200, 0, 300, 100}, {300, 100, 0, 100, 0}, {200, 9, 300, 9, 0}};
  const TileLists lists = make_tile_lists(tasks, {}, 64);
  ASSERT_EQ(check(tasks, {}, lists), "");
  const auto is_found = [&](auto tamper) {
    TileLists wrong = lists;
    tamper(wrong);
    return !check(tasks, {}, wrong).empty();
  };
  const auto tile_fields = {&QueryTile::q_row,        &QueryTile::num_rows,  &QueryTile::position,
                            &QueryTile::k_begin,      &QueryTile::k_end,     &QueryTile::run,
                            &QueryTile::first_of_run, &QueryTile::num_of_run};
  const auto block_fields = {&KeyBlock::k_row,     &KeyBlock::num_rows, &KeyBlock::first_tile,
                             &KeyBlock::last_tile, &KeyBlock::run,      &KeyBlock::first_of_run,
                             &KeyBlock::num_of_run};
  for (const int change : {-1, 1}) {
    for (const auto field : tile_fields) {
      EXPECT_TRUE(is_found([&](TileLists& l) { l.tiles[1].*field += change; }));
    }
    for (const auto field : block_fields) {
      EXPECT_TRUE(is_found([&](TileLists& l) { l.blocks[1].*field += change; }));
    }
  }
  EXPECT_TRUE(is_found([](TileLists& l) { l.tiles.pop_back(); }));
  EXPECT_TRUE(is_found([](TileLists& l) { l.blocks.pop_back(); }));
  EXPECT_TRUE(is_found([](TileLists& l) { std::swap(l.blocks[0], l.blocks[1]); }));
}

TEST(Tiles, NoTasksNoTiles) {
  const TileLists lists = make_tile_lists({}, {}, 64);
  EXPECT_EQ(lists.num_runs, 0);
  EXPECT_TRUE(lists.tiles.empty());
  EXPECT_TRUE(lists.blocks.empty());
}

TEST(Tiles, ShardsOfOneDocumentAreOneRun) {
  // 300 keys, a shard at their end and one at their start; a document of its own touches them.
  const TileLists lists =
      make_tile_lists({{0, 100, 0, 300, 200}, {100, 65, 0, 65, 0}, {165, 10, 300, 10, 0}}, {}, 64);
  ASSERT_EQ(lists.tiles.size(), 5u);
  ASSERT_EQ(lists.blocks.size(), 4u);
  EXPECT_EQ(lists.num_runs, 2);
  EXPECT_EQ(fields(lists.tiles[0]), std::make_tuple(100, 64, 0, 0, 65, 0, 0, 4));
  EXPECT_EQ(fields(lists.tiles[1]), std::make_tuple(164, 1, 64, 0, 65, 0, 0, 4));
  EXPECT_EQ(fields(lists.tiles[2]), std::make_tuple(0, 64, 200, 0, 300, 0, 0, 4));
  EXPECT_EQ(fields(lists.tiles[3]), std::make_tuple(64, 36, 264, 0, 300, 0, 0, 4));
  EXPECT_EQ(fields(lists.tiles[4]), std::make_tuple(165, 10, 300, 300, 310, 1, 4, 1));
  EXPECT_EQ(fields(lists.blocks[0]), std::make_tuple(0, 128, 0, 4, 0, 0, 3, 0));
  EXPECT_EQ(fields(lists.blocks[1]), std::make_tuple(128, 128, 2, 4, 0, 0, 3, 0));
  EXPECT_EQ(fields(lists.blocks[2]), std::make_tuple(256, 44, 2, 4, 0, 0, 3, 0));
  EXPECT_EQ(fields(lists.blocks[3]), std::make_tuple(300, 10, 4, 5, 1, 3, 1, 0));
}

TEST(Tiles, TasksWithoutKeysOrQueries) {
  const TileLists lists = make_tile_lists({{0, 70, 5, 0, 0},
                                           {70, 0, 10, 20, 0},
                                           {70, 3, 5, 0, 0},
                                           {73, 0, 90, 0, 0},
                                           {73, 1, 40, 2, 0}},
                                          {}, 64);
  EXPECT_EQ(lists.num_runs, 4);
  ASSERT_EQ(lists.tiles.size(), 4u);
  EXPECT_EQ(fields(lists.tiles[0]), std::make_tuple(73, 1, 40, 40, 42, 0, 0, 1));
  EXPECT_EQ(fields(lists.tiles[1]), std::make_tuple(0, 64, 5, 5, 5, 1, 1, 2));
  EXPECT_EQ(fields(lists.tiles[2]), std::make_tuple(64, 6, 69, 5, 5, 1, 1, 2));
  EXPECT_EQ(fields(lists.tiles[3]), std::make_tuple(70, 3, 5, 5, 5, 2, 3, 1));
  ASSERT_EQ(lists.blocks.size(), 2u);
  EXPECT_EQ(fields(lists.blocks[0]), std::make_tuple(40, 2, 0, 1, 0, 0, 1, 0));
  EXPECT_EQ(fields(lists.blocks[1]), std::make_tuple(10, 20, 4, 4, 3, 1, 1, 0));
}

TEST(Tiles, RowsPastTheDescriptorsAreRefused) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  EXPECT_EQ(make_tile_lists({{kLimit - 4, 4, kLimit - 4, 4, 0}}, {}, 64).tiles.size(), 1u);
  EXPECT_THROW(make_tile_lists({{kLimit - 3, 4, 0, 4, 0}}, {}, 64), std::length_error);
  EXPECT_THROW(make_tile_lists({{0, 4, 0, 4, kLimit - 3}}, {}, 64), std::length_error);
  try {
    make_tile_lists({{0, 4, kLimit - 3, 4, 0}}, {}, 64);
    FAIL();
  } catch (const std::length_error& error) {
    EXPECT_NE(std::string(error.what()).find("row 1073741825"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("use fewer tokens"), std::string::npos);
  }
}

TEST(Tiles, WindowsPastInt64DoNotWrap) {
  const Mask widest{std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()};
  const std::vector<PlacedTask> tasks = {{0, 200, 0, 300, 100}, {200, 100, 0, 300, 0}};
  EXPECT_TRUE(same(make_tile_lists(tasks, widest, 128), make_tile_lists(tasks, {-1, -1}, 128)));
}

TEST(Tiles, LongDocumentsTakeNearLinearTime) {
  constexpr int64_t kLength = 512 * 1024;
  std::vector<PlacedTask> shards;
  for (int64_t row = 0; row < kLength; row += 64) {
    shards.push_back({row, 64, 0, row + 64, row});
  }
  for (const auto& tasks : {std::vector<PlacedTask>{{0, kLength, 0, kLength, 0}}, shards}) {
    const auto start = std::chrono::steady_clock::now();
    const TileLists lists = make_tile_lists(tasks, {}, 64);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    EXPECT_EQ(lists.tiles.size(), 8192u);
    EXPECT_EQ(lists.blocks.size(), 4096u);
    EXPECT_LT(seconds.count(), 0.05);
    RecordProperty("milliseconds", std::to_string(1e3 * seconds.count()));
  }
}

}  // namespace
}  // namespace distca::attention::sm90
