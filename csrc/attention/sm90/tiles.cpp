#include "tiles.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>

namespace distca::attention::sm90 {
namespace {

constexpr int64_t kReach = int64_t{1} << 30;  // rows that the kernels' copy descriptors can address

struct Run {
  Range keys;
  std::vector<QueryTile> tiles = {};
  int64_t longest = 0;  // keys that one tile sees, at most
};

void check_rows(const std::vector<PlacedTask>& tasks) {
  for (const PlacedTask& task : tasks) {
    const int64_t end = std::max(
        {query_rows(task).end, key_rows(task).end, task.k_row + task.q_offset + task.num_q_rows});
    if (end > kReach) {
      throw std::length_error("tasks: row " + std::to_string(end) +
                              " is past the 2^30 rows that the sm_90 kernels reach; use fewer "
                              "tokens a rank");
    }
  }
}

// Returns the key rows that at least one row of the tile sees.
Range visible_keys(const QueryTile& tile, const Mask& mask) {
  return keys_seen(mask, {tile.position, int64_t{tile.position} + tile.num_rows},
                   {tile.k_begin, tile.k_end});
}

void add_tiles(const PlacedTask& task, const Mask& mask, int32_t tile_rows, Run& run) {
  for (int64_t row = 0; row < task.num_q_rows; row += tile_rows) {
    QueryTile tile{};
    tile.q_row = static_cast<int32_t>(task.q_row + row);
    tile.num_rows = static_cast<int32_t>(std::min<int64_t>(tile_rows, task.num_q_rows - row));
    tile.position = static_cast<int32_t>(task.k_row + task.q_offset + row);
    tile.k_begin = static_cast<int32_t>(task.k_row);
    tile.k_end = static_cast<int32_t>(task.k_row + task.num_k_rows);
    const Range keys = visible_keys(tile, mask);
    run.longest = std::max(run.longest, num_rows(keys));
    run.tiles.push_back(tile);
  }
}

std::vector<Run> make_runs(const std::vector<PlacedTask>& tasks, const Mask& mask,
                           int32_t tile_rows) {
  std::vector<Run> runs;
  for (const TaskRun& of : runs_of(tasks)) {
    Run& run = runs.emplace_back(of.keys);
    for (const PlacedTask& task : of.tasks) add_tiles(task, mask, tile_rows, run);
  }
  // Runs of no rows may start where another does: in order of their queries then.
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
    return std::tie(b.longest, a.keys.begin) < std::tie(a.longest, b.keys.begin);
  });
  return runs;
}

// The first of `intervals`, in the order given, that covers each of `num_blocks`; -1 where none
// does. A block is visited once, however many intervals cover it: next[b] leads to the first block
// from b on that none has covered yet.
std::vector<int32_t> first_covering(const std::vector<Range>& intervals,
                                    const std::vector<int32_t>& order, int64_t num_blocks) {
  std::vector<int32_t> first(num_blocks, -1);
  std::vector<int64_t> next(num_blocks + 1);
  std::iota(next.begin(), next.end(), 0);
  const auto uncovered = [&](int64_t block) {
    while (next[block] != block) block = next[block] = next[next[block]];
    return block;
  };
  for (const int32_t i : order) {
    for (int64_t block = uncovered(intervals[i].begin); block < intervals[i].end;
         block = uncovered(block)) {
      first[block] = i;
      next[block] = block + 1;
    }
  }
  return first;
}

// Key blocks of the run that each of its tiles sees, counted from the run's first.
std::vector<Range> blocks_seen(const Run& run, const Mask& mask) {
  std::vector<Range> seen;
  for (const QueryTile& tile : run.tiles) {
    const Range keys = visible_keys(tile, mask);
    if (keys.begin == keys.end) {
      seen.push_back({0, 0});
    } else {
      seen.push_back({(keys.begin - run.keys.begin) / kKeyBlockRows,
                      (keys.end - 1 - run.keys.begin) / kKeyBlockRows + 1});
    }
  }
  return seen;
}

// Appends the run's blocks, whose tiles start at index `first_tile` of the lists.
void append_blocks(const Run& run, const Mask& mask, int32_t first_tile, TileLists& lists) {
  const int64_t num_rows = distca::num_rows(run.keys);
  const int64_t num_blocks = ceil_div(num_rows, kKeyBlockRows);
  const std::vector<Range> intervals = blocks_seen(run, mask);
  std::vector<int32_t> order(run.tiles.size());
  std::iota(order.begin(), order.end(), 0);
  const std::vector<int32_t> first = first_covering(intervals, order, num_blocks);
  std::reverse(order.begin(), order.end());
  const std::vector<int32_t> last = first_covering(intervals, order, num_blocks);

  const auto first_block = static_cast<int32_t>(lists.blocks.size());
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t begin = i * kKeyBlockRows;
    KeyBlock block{};
    block.k_row = static_cast<int32_t>(run.keys.begin + begin);
    block.num_rows = static_cast<int32_t>(std::min<int64_t>(kKeyBlockRows, num_rows - begin));
    block.first_tile = first_tile + std::max(first[i], 0);
    block.last_tile = first_tile + last[i] + 1;
    block.run = lists.num_runs;
    block.first_of_run = first_block;
    block.num_of_run = static_cast<int32_t>(num_blocks);
    lists.blocks.push_back(block);
  }
  std::stable_sort(lists.blocks.begin() + first_block, lists.blocks.end(),
                   [](const KeyBlock& a, const KeyBlock& b) {
                     return a.last_tile - a.first_tile > b.last_tile - b.first_tile;
                   });
}

void append_run(Run& run, const Mask& mask, TileLists& lists) {
  std::sort(run.tiles.begin(), run.tiles.end(), [](const QueryTile& a, const QueryTile& b) {
    return std::tie(a.position, a.q_row) < std::tie(b.position, b.q_row);
  });
  const auto first_tile = static_cast<int32_t>(lists.tiles.size());
  append_blocks(run, mask, first_tile, lists);
  for (QueryTile& tile : run.tiles) {
    tile.run = lists.num_runs;
    tile.first_of_run = first_tile;
    tile.num_of_run = static_cast<int32_t>(run.tiles.size());
  }
  lists.tiles.insert(lists.tiles.end(), run.tiles.begin(), run.tiles.end());
  ++lists.num_runs;
}

}  // namespace

int64_t count_tiles(const std::vector<PlacedTask>& tasks, int32_t tile_rows) {
  int64_t num_tiles = 0;
  for (const PlacedTask& task : tasks) num_tiles += ceil_div(task.num_q_rows, tile_rows);
  return num_tiles;
}

KeyCounts count_keys(const std::vector<PlacedTask>& tasks) {
  KeyCounts counts;
  for (const TaskRun& run : runs_of(tasks)) {
    ++counts.runs;
    counts.blocks += ceil_div(num_rows(run.keys), kKeyBlockRows);
  }
  return counts;
}

TileLists make_tile_lists(const std::vector<PlacedTask>& tasks, const Mask& mask,
                          int32_t tile_rows) {
  check_rows(tasks);
  TileLists lists;
  lists.tile_rows = tile_rows;
  for (Run& run : make_runs(tasks, mask, tile_rows)) append_run(run, mask, lists);
  return lists;
}

}  // namespace distca::attention::sm90
